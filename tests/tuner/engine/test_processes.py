from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tuner.engine.processes import (
    ProcessIdentity,
    ResourceSnapshot,
    descendants,
    difference,
    end_tree,
    prove_clean,
    remove_left_segments,
    shared_memory,
    wait_for_end,
)

Start = Callable[..., "subprocess.Popen[str]"]

needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and /dev/shm of Linux")

IMPORTABLE = [path for path in sys.path if path]

IGNORES_TERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); "


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a Python process that runs `code`, wait for its first line, and see to it that it is gone afterwards."""
    started: list[subprocess.Popen[str]] = []

    def begin(code: str, *, new_session: bool = False) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", textwrap.dedent(code)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=new_session,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_process_is_known_by_when_it_was_created(start: Start) -> None:
    process = start("print('ready', flush=True); import time; time.sleep(60)")
    first_line(process)
    identity = ProcessIdentity.of(process.pid)

    assert identity == ProcessIdentity.of(process.pid)
    assert identity.is_alive()
    assert not replace(identity, create_time=identity.create_time - 5).is_alive()


def test_process_that_does_not_exist_cannot_be_identified() -> None:
    with pytest.raises(psutil.NoSuchProcess):
        ProcessIdentity.of(2**22 + 1)


def test_zombie_is_not_alive(start: Start) -> None:
    process = start("print('ready', flush=True); import time; time.sleep(60)")
    first_line(process)
    identity = ProcessIdentity.of(process.pid)
    process.kill()

    deadline = time.monotonic() + 5
    while identity.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)

    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    assert not identity.is_alive()


def test_process_that_ends_when_asked_is_not_killed(start: Start) -> None:
    process = start("""
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        print('ready', flush=True)
        time.sleep(60)
    """)
    first_line(process)

    left = end_tree([ProcessIdentity.of(process.pid)], term_s=5)

    assert left == ()
    assert process.wait() == 7


def test_process_that_ignores_term_is_killed(start: Start) -> None:
    process = start(IGNORES_TERM + "time.sleep(60)")
    first_line(process)

    assert end_tree([ProcessIdentity.of(process.pid)], term_s=0.2) == ()
    assert process.wait() == -9


def test_stopped_process_is_ended(start: Start) -> None:
    process = start("import os, signal, time; print('ready', flush=True); os.kill(os.getpid(), signal.SIGSTOP)")
    first_line(process)

    assert end_tree([ProcessIdentity.of(process.pid)], term_s=0.2) == ()


def test_whole_tree_is_ended_though_its_root_leaves_at_once(start: Start) -> None:
    root = start(f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, '-S', '-c', {IGNORES_TERM + "time.sleep(60)"!r}])
        print(child.pid, flush=True)
        time.sleep(60)
    """)
    child = ProcessIdentity.of(int(first_line(root)))
    first_line(root)

    assert end_tree([ProcessIdentity.of(root.pid)], term_s=0.2) == ()
    assert not child.is_alive()


def test_child_born_in_another_session_while_its_parent_is_being_ended_is_ended_too(start: Start) -> None:
    root = start("""
        import signal, subprocess, sys, time
        def leave_one_more(*_):
            child = subprocess.Popen(['sleep', '60'], start_new_session=True)
            print(child.pid, flush=True)
        signal.signal(signal.SIGTERM, leave_one_more)
        print('ready', flush=True)
        while True:
            time.sleep(60)
    """)
    first_line(root)

    left = end_tree([ProcessIdentity.of(root.pid)], term_s=0.5)

    assert left == ()
    assert not runs(int(first_line(root)))


def test_group_that_outlives_its_leader_belongs_to_it(start: Start) -> None:
    leader = start(
        """
        import subprocess
        subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL)
        print('ready', flush=True)
        import time; time.sleep(60)
        """,
        new_session=True,
    )
    first_line(leader)
    (member,) = descendants(leader.pid)
    identity = ProcessIdentity.of(leader.pid)
    leader.kill()
    leader.wait()

    assert descendants(leader.pid) == (member,)
    assert end_tree([identity]) == ()
    assert not member.is_alive()


@needs_linux
def test_orphan_of_a_double_fork_in_another_session_is_found_and_ended(start: Start) -> None:
    adopter = start(
        f"""
        import os, sys
        sys.path[:0] = {IMPORTABLE}
        from tuner.engine.processes import adopt_orphans, descendants, end_tree
        adopt_orphans()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
                os.execvp('sleep', ['sleep', '60'])
            os._exit(0)
        os.wait()
        found = descendants(os.getpid())
        print(len(found), os.getsid(found[0].pid) != os.getsid(0), end_tree(found), flush=True)
        """
    )

    assert first_line(adopter) == "1 True ()"


@needs_linux
def test_orphan_that_was_adopted_and_ended_does_not_stay_a_zombie(start: Start) -> None:
    adopter = start(
        f"""
        import os, sys, time
        sys.path[:0] = {IMPORTABLE}
        import psutil
        from tuner.engine.processes import ResourceSnapshot, adopt_orphans, prove_clean
        adopt_orphans()
        before = ResourceSnapshot.take(os.getpid(), {{}})
        if os.fork() == 0:
            os.fork()
            os._exit(0)
        os.wait()
        time.sleep(0.1)
        print(len(psutil.Process().children()), prove_clean(before, dict, 1.0), psutil.Process().children(), flush=True)
        """
    )

    assert first_line(adopter) == "1 [] []"


def test_process_that_ends_by_itself_is_waited_for(start: Start) -> None:
    brief, lasting = start("import time; time.sleep(0.1)"), start("import time; time.sleep(60)")
    identities = [ProcessIdentity.of(brief.pid), ProcessIdentity.of(lasting.pid)]

    assert wait_for_end(identities[:1], limit_s=10) == ()
    assert wait_for_end(identities, limit_s=0) == (identities[1],)


def test_process_never_ends_itself(start: Start) -> None:
    process = start(
        f"""
        import os, sys
        sys.path[:0] = {IMPORTABLE}
        from tuner.engine.processes import ProcessIdentity, end_tree
        print(end_tree([ProcessIdentity.of(os.getpid())], term_s=0, kill_s=0), flush=True)
        """
    )

    assert first_line(process) == "()"
    assert process.wait() == 0


def test_pid_that_was_given_to_another_process_is_left_alone(start: Start) -> None:
    other = start("print('ready', flush=True); import time; time.sleep(60)")
    first_line(other)
    earlier = replace(ProcessIdentity.of(other.pid), create_time=1.0)

    assert end_tree([earlier], term_s=0.1) == ()
    assert other.poll() is None


def test_unchanged_process_is_proven_clean() -> None:
    before = ResourceSnapshot.take(os.getpid(), {"GPU-1": 1.0})

    assert prove_clean(before, lambda: {"GPU-1": 1.1}, limit_s=0) == []


def test_child_that_is_left_is_named_and_one_that_ends_in_time_is_not(start: Start) -> None:
    before = ResourceSnapshot.take(os.getpid(), {})
    child = start("print('ready', flush=True); import time; time.sleep(60)")
    first_line(child)

    assert prove_clean(before, dict, limit_s=0) == [f"process {child.pid} still runs"]
    child.terminate()
    assert prove_clean(before, dict, limit_s=10) == []


def test_device_memory_is_waited_for() -> None:
    before = ResourceSnapshot.take(os.getpid(), {"GPU-1": 1.0, "GPU-2": 0.5})
    readings = iter([{"GPU-1": 40.0, "GPU-2": 0.5}, {"GPU-1": 1.2, "GPU-2": 0.5}])

    assert prove_clean(before, lambda: next(readings), limit_s=10) == []


def test_device_memory_that_does_not_come_back_is_named() -> None:
    before = ResourceSnapshot.take(os.getpid(), {"GPU-1": 1.0, "GPU-2": 0.5})

    left = prove_clean(before, lambda: {"GPU-1": 1.0, "GPU-2": 3.75}, limit_s=0)

    assert left == ["device GPU-2 holds 3.25 GiB more than before the start"]


def test_device_that_no_longer_answers_is_not_proven_free() -> None:
    before = ResourceSnapshot.take(os.getpid(), {"GPU-1": 1.0})

    assert prove_clean(before, dict, limit_s=0) == ["device GPU-1 no longer tells its memory"]


@needs_linux
def test_segment_that_nobody_uses_any_more_is_named() -> None:
    before = ResourceSnapshot.take(os.getpid(), {})
    name = f"tuner_test_{uuid.uuid4().hex}"

    with leaked_segment(name):
        assert prove_clean(before, dict, limit_s=0) == [f"shared memory {name} is still there"]
    assert prove_clean(before, dict, limit_s=0) == []


@needs_linux
def test_segment_that_our_own_process_still_uses_is_named() -> None:
    before = ResourceSnapshot.take(os.getpid(), {})
    name = f"tuner_test_{uuid.uuid4().hex}"

    with leaked_segment(name) as path, path.open():
        assert prove_clean(before, dict, limit_s=0) == [f"shared memory {name} is still there"]


@needs_linux
def test_segment_that_a_stranger_uses_is_none_of_our_business(start: Start) -> None:
    ours = start("print('ready', flush=True); import time; time.sleep(60)")
    first_line(ours)
    before = ResourceSnapshot.take(ours.pid, {})
    name = f"tuner_test_{uuid.uuid4().hex}"

    with leaked_segment(name) as path, path.open():
        assert prove_clean(before, dict, limit_s=0) == []


@needs_linux
@pytest.mark.parametrize("kind", ["psm_", "sem.loky-", "sem.mp-"])
def test_only_pythons_segments_that_nobody_uses_are_removed(start: Start, kind: str) -> None:
    unused, used, foreign = (f"{prefix}{uuid.uuid4().hex}" for prefix in (kind, kind, "other_"))
    process = start(
        f"""
        import os, sys
        sys.path[:0] = {IMPORTABLE}
        from tuner.engine.processes import ResourceSnapshot, remove_left_segments
        before = ResourceSnapshot.take(os.getpid(), {{}})
        opened = [open("/dev/shm/" + name, "xb", buffering=0) for name in {[unused, used, foreign]}]
        opened[0].write(b"x")
        opened[0].close()
        opened[2].close()
        print(*remove_left_segments(before.shared_memory), flush=True)
        """
    )
    removed = first_line(process)
    process.wait()

    remaining = [name for name in (unused, used, foreign) if (Path("/dev/shm") / name).exists()]
    for name in remaining:
        (Path("/dev/shm") / name).unlink()
    assert removed == unused
    assert remaining == [used, foreign]


@needs_linux
def test_semaphore_that_its_maker_still_holds_is_not_removed(start: Start) -> None:
    before = shared_memory()
    maker = start(
        """
        import time
        from multiprocessing import get_context
        lock = get_context("spawn").Lock()
        print(lock._semlock.name, flush=True)
        time.sleep(60)
        """
    )
    name = f"sem.{first_line(maker).removeprefix('/')}"

    removed = remove_left_segments(before)

    assert name not in removed
    assert name in shared_memory()


@contextlib.contextmanager
def leaked_segment(name: str) -> Iterator[Path]:
    path = Path("/dev/shm") / name
    path.write_bytes(b"x")
    try:
        yield path
    finally:
        path.unlink()


def test_port_and_temporary_file_that_are_left_are_named(tmp_path: Path) -> None:
    import socket

    before = ResourceSnapshot.take(os.getpid(), {}, temp_dir=tmp_path)
    (tmp_path / "0b2c.sock").touch()

    with socket.create_server(("127.0.0.1", 0)) as server:
        left = prove_clean(before, dict, limit_s=0)
        port = server.getsockname()[1]

    assert left == [f"port {port} is still listened on", "temporary file 0b2c.sock is still there"]


def test_difference_says_nothing_of_what_was_there_before_or_is_gone() -> None:
    before = ResourceSnapshot(
        1, frozenset({ProcessIdentity(5, 1.0)}), frozenset({"psm_a"}), {"GPU-1": 9.0}, frozenset({80})
    )
    after = ResourceSnapshot(1, frozenset(), frozenset(), {"GPU-1": 0.1})

    assert difference(before, after) == []
    assert len(difference(after, before)) == 4


def test_snapshot_of_a_process_that_is_gone_is_empty(start: Start) -> None:
    process = start("pass")
    process.wait()

    snapshot = ResourceSnapshot.take(process.pid, {})

    assert (snapshot.processes, snapshot.ports, snapshot.rss_gib) == (frozenset(), frozenset(), None)


def test_resident_memory_is_recorded() -> None:
    snapshot = ResourceSnapshot.take(os.getpid(), {})

    assert snapshot.rss_gib == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.2)
