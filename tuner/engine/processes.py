"""Process hygiene: who belongs to us, how they are ended, and the proof that nothing of an engine is left.

A process is known by its id and its time of creation, never by name: ids are used again. What belongs to a process is
everything below it, and everything in a session or process group that one of these leads; a process that calls
`adopt_orphans` also keeps those below it whose parent died. Our own group is left out of this: in `tuner run | tee log`
it has others in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
DEVICE_TOLERANCE_GIB = 0.25
"""Slack for what a driver moves by itself. Chosen, not measured: an engine that lives on holds its weights."""
PYTHON_SEGMENT = "psm_"
"""How Python names the segments of `multiprocessing.shared_memory`."""
SEMAPHORES = ("sem.loky-", "sem.mp-")
"""How joblib and Python name the semaphores of processes: vLLM's worker, killed, leaves one of joblib's."""
POLL_S = 0.1

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36
"""From Linux' include/uapi/linux/prctl.h."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process: its id, and when it was created.

    Parameters
    ----------
    create_time:
        On Linux in seconds since the machine started, which the kernel never changes; seconds since 1970 are derived
        from a clock that is set and slewed, and would make one process look like two.
    """

    pid: int
    create_time: float

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Identify a process that exists.

        Raises
        ------
        psutil.NoSuchProcess
            When it does not.
        """
        return _row(pid).identity

    def process(self) -> psutil.Process | None:
        """Return the process if it is still this one and not merely waiting to be reaped."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            row = _row(self.pid)
            if row.identity == self and not row.is_zombie:
                return process
        return None

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self.process() is not None


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends, whatever its session.

    Without it a process that forked twice belongs to the machine's init and is lost to `descendants`. Linux only;
    elsewhere this does nothing.

    Raises
    ------
    OSError
        When the kernel refuses.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(pid: int) -> tuple[ProcessIdentity, ...]:
    """List what belongs to `pid`, itself and this process's own line left out. Zombies do not count.

    A process that is gone may still lead a group that outlived it.
    """
    return tuple(identity for identity in _family({pid}) if identity.pid != pid)


def families(pids: Iterable[int]) -> dict[int, tuple[ProcessIdentity, ...]]:
    """List what belongs to each of some processes, these included, from one look at the table."""
    protected = _protected()
    rows = [row for row in _rows() if row.identity.pid not in protected]
    return {pid: _members({pid}, rows, protected) for pid in pids}


def _family(roots: set[int]) -> tuple[ProcessIdentity, ...]:
    """Everything alive that belongs to one of `roots`, these included, without this process and its own ancestors."""
    protected = _protected()
    rows = [row for row in _rows() if row.identity.pid not in protected]
    return _members(roots, rows, protected)


def _protected() -> set[int]:
    """Return this process and those that it descends from."""
    return {os.getpid(), *(p.pid for p in psutil.Process().parents())}


def _members(roots: set[int], rows: Sequence[_Row], protected: set[int]) -> tuple[ProcessIdentity, ...]:
    members = set(roots)
    while new := {row.identity.pid for row in rows if row.belongs_to(members, members - protected)} - members:
        members |= new
    return tuple(row.identity for row in rows if row.identity.pid in members and not row.is_zombie)


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the process table; `group` and `session` are the ids of their leaders."""

    identity: ProcessIdentity
    parent: int
    group: int
    session: int
    is_zombie: bool

    def belongs_to(self, parents: set[int], leaders: set[int]) -> bool:
        return self.parent in parents or self.group in leaders or self.session in leaders


def _rows() -> Iterator[_Row]:
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error):
            yield _row(pid)


def _row(pid: int) -> _Row:
    """Look one process up. On Linux it is one read of proc(5), for whole tables are read twice a second."""
    if not sys.platform.startswith("linux"):
        return _portable_row(pid)
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123  half the time of Path.read_bytes
            fields = file.read().rpartition(b")")[2].split()  # the name in front of it may hold anything
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error
    state, parent, group, session = fields[0], int(fields[1]), int(fields[2]), int(fields[3])
    return _Row(ProcessIdentity(pid, int(fields[19]) / _TICKS_PER_S), parent, group, session, state in (b"Z", b"X"))


def _portable_row(pid: int) -> _Row:
    process = psutil.Process(pid)
    try:
        group, session = os.getpgid(pid), os.getsid(pid)
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error
    is_zombie = process.status() == psutil.STATUS_ZOMBIE
    return _Row(ProcessIdentity(pid, process.create_time()), process.ppid(), group, session, is_zombie)


def end_tree(
    processes: Iterable[ProcessIdentity], *, term_s: float = 5.0, kill_s: float = 10.0
) -> tuple[ProcessIdentity, ...]:
    """End processes and everything that belongs to them: TERM, then KILL; return those that live on even then.

    What they start, or leave behind, while they are being ended is found and ended too, as is the group of one that
    ended before. This process and those that it descends from are never touched.
    """
    known = set(processes)
    alive: set[ProcessIdentity] = set()
    for send, limit_s in ((psutil.Process.terminate, term_s), (psutil.Process.kill, kill_s)):
        deadline_s = time.monotonic() + limit_s
        told: set[ProcessIdentity] = set()
        while alive := _still_alive(known):
            known |= alive
            _signal(alive - told, send)
            told |= alive
            if time.monotonic() > deadline_s:
                break
            time.sleep(min(POLL_S, limit_s))
    return tuple(alive)


def wait_for_end(processes: Collection[ProcessIdentity], limit_s: float) -> tuple[ProcessIdentity, ...]:
    """Wait until processes have ended by themselves, and return those that have not."""
    deadline_s = time.monotonic() + limit_s
    while (left := tuple(p for p in processes if p.is_alive())) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return left


def _still_alive(known: Iterable[ProcessIdentity]) -> set[ProcessIdentity]:
    """Those of `known` and of their families that run. A pid that was given away since leads to nothing."""
    leaders = {p.pid for p in known if not _is_reused(p)}
    return set(_family(leaders)) if leaders else set()


def _is_reused(identity: ProcessIdentity) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return ProcessIdentity.of(identity.pid) != identity
    return False


def _signal(targets: Iterable[ProcessIdentity], send: Callable[[psutil.Process], None]) -> None:
    for identity in targets:
        if process := identity.process():
            with contextlib.suppress(psutil.NoSuchProcess):
                send(process)


@dataclass(frozen=True, slots=True)
class ResourceSnapshot:
    """What a process and all that belongs to it held at one time.

    Parameters
    ----------
    shared_memory:
        Names of the segments in /dev/shm that our user owns, of whatever process.
    ports:
        TCP ports on which the process or its descendants listen.
    temp_files:
        Entries of the directory that only this process writes to; empty when none was named.
    device_memory_gib:
        Used memory by UUID.
    rss_gib:
        Resident memory of the process itself; `None` when it is gone.
    """

    pid: int
    processes: frozenset[ProcessIdentity]
    shared_memory: frozenset[str]
    device_memory_gib: Mapping[str, float]
    ports: frozenset[int] = frozenset()
    temp_files: frozenset[str] = frozenset()
    rss_gib: float | None = None
    temp_dir: Path | None = None

    @classmethod
    def take(cls, pid: int, device_memory_gib: Mapping[str, float], temp_dir: Path | None = None) -> ResourceSnapshot:
        """Look at a process now. `temp_dir` must be one that nobody else writes to."""
        processes = frozenset(descendants(pid))
        return cls(
            pid=pid,
            processes=processes,
            shared_memory=shared_memory(),
            device_memory_gib=dict(device_memory_gib),
            ports=_listening_ports({pid, *(p.pid for p in processes)}),
            temp_files=frozenset(p.name for p in temp_dir.iterdir()) if temp_dir is not None else frozenset(),
            rss_gib=_resident_gib(pid),
            temp_dir=temp_dir,
        )


def difference(before: ResourceSnapshot, after: ResourceSnapshot) -> list[str]:
    """Say in words what is there in `after` and was not in `before`; empty when nothing is.

    Resident memory is no part of it: the first engine of a process leaves its imports behind.
    """
    return [
        *(f"process {p.pid} still runs" for p in sorted(after.processes - before.processes, key=lambda p: p.pid)),
        *(f"shared memory {name} is still there" for name in sorted(after.shared_memory - before.shared_memory)),
        *(f"port {port} is still listened on" for port in sorted(after.ports - before.ports)),
        *(f"temporary file {name} is still there" for name in sorted(after.temp_files - before.temp_files)),
        *not_given_back(before.device_memory_gib, after.device_memory_gib),
    ]


def not_given_back(before_gib: Mapping[str, float], after_gib: Mapping[str, float]) -> list[str]:
    """Name the devices, by UUID, of which more is in use than before an engine started."""
    return [
        f"device {uuid} holds {after_gib[uuid] - was_gib:.2f} GiB more than before the start"
        for uuid, was_gib in before_gib.items()
        if after_gib.get(uuid, 0.0) > was_gib + DEVICE_TOLERANCE_GIB
    ]


def prove_clean(
    before: ResourceSnapshot, device_memory_gib: Callable[[], Mapping[str, float]], limit_s: float
) -> list[str]:
    """Wait until everything is back to what it was, and return in words what is not; empty is the proof.

    Shared memory that appeared since counts only when no process uses it any more, or one of ours does: that of others
    is none of our business. A device that stopped telling its memory is not proven free.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        if before.pid == os.getpid():
            _reap()
        memory_gib = device_memory_gib()
        after = ResourceSnapshot.take(before.pid, memory_gib, before.temp_dir)
        silent = [f"device {uuid} no longer tells its memory" for uuid in before.device_memory_gib.keys() - memory_gib]
        left = difference(before, _without_strangers(before, after)) + silent
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(POLL_S)


def _reap() -> None:
    """Collect the children of this process that have ended; orphans that it adopted have nobody else to do it.

    Those of `multiprocessing` are collected by it first, so that it learns how they ended.
    """
    multiprocessing.active_children()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def _without_strangers(before: ResourceSnapshot, after: ResourceSnapshot) -> ResourceSnapshot:
    """Drop the segments that appeared since and that somebody else uses."""
    if after.shared_memory <= before.shared_memory:
        return after
    ours = {after.pid, *(p.pid for p in after.processes)}
    strangers = {name for pid, names in _used_segments().items() if pid not in ours for name in names}
    return replace(after, shared_memory=after.shared_memory - (strangers - before.shared_memory))


def remove_left_segments(before: frozenset[str]) -> tuple[str, ...]:
    """Remove the segments and semaphores of `multiprocessing` that a dead engine left, and return their names.

    Only what was not there `before` and no process uses any more: an engine that fails while it starts leaves those of
    its queues, and one that is killed also those that its resource tracker would have removed.
    """
    new = {name for name in shared_memory() - before if name.startswith((PYTHON_SEGMENT, *SEMAPHORES))}
    left = new.difference(*_used_segments().values()) if new else set()
    for name in left:
        with contextlib.suppress(FileNotFoundError):
            _remove_segment(name)
    return tuple(sorted(left))


def _remove_segment(name: str) -> None:
    if name.startswith(SEMAPHORES):
        (SHARED_MEMORY / name).unlink()
        return
    segment = SharedMemory(name)  # attaching and unlinking also tells Python's resource tracker
    segment.close()
    segment.unlink()


def shared_memory() -> frozenset[str]:
    """Names in /dev/shm that belong to our user; empty on a machine without it."""
    names: set[str] = set()
    with contextlib.suppress(FileNotFoundError):
        for path in SHARED_MEMORY.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.lstat().st_uid == os.getuid():
                    names.add(path.name)
    return frozenset(names)


def _used_segments() -> dict[int, frozenset[str]]:
    """For each process the segments that it maps or holds open, as far as we may see; those without any are left out.

    Segments are told by inode, not by path: a semaphore is linked to its name once it has been made under another one,
    and the name under which it was made is what its maker's table of mappings shows for ever.
    """
    names = dict(_inodes())
    used = {pid: frozenset(names[inode] for inode in _open_inodes(pid) & names.keys()) for pid in psutil.pids()}
    return {pid: segments for pid, segments in used.items() if segments}


def _inodes() -> Iterator[tuple[int, str]]:
    for name in shared_memory():
        with contextlib.suppress(FileNotFoundError):
            yield (SHARED_MEMORY / name).stat().st_ino, name


def _open_inodes(pid: int) -> set[int]:
    """Inodes of the files in /dev/shm that a process maps or holds open."""
    prefix = f"{SHARED_MEMORY}/"
    inodes: set[int] = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            if prefix in line:
                inodes.add(int(line.split(maxsplit=5)[4]))  # proc(5): address, rights, offset, device, inode, path
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(link.readlink()).startswith(prefix):
                    inodes.add(link.stat().st_ino)
    return inodes


def _listening_ports(pids: Iterable[int]) -> frozenset[int]:
    ports: set[int] = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            sockets = psutil.Process(pid).net_connections(kind="tcp")
            ports |= {s.laddr.port for s in sockets if s.status == psutil.CONN_LISTEN}
    return frozenset(ports)


def _resident_gib(pid: int) -> float | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).memory_info().rss / 2**30
    return None
