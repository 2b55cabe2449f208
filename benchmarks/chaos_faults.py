"""The faults: each does something to a study that runs, or between two runs, and says so where it went otherwise."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from chaos_scene import PATIENCE_S, Command, Scene

LOCKED_S = 60.0
"""A store is locked for this long; MLflow's and Optuna's own patience is 5 s unless it was raised."""

ONCE = {"rounds": 0}
"""A study that is ended early by `--trials` and goes on would confirm its front in between, and propose otherwise."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Parameters
    ----------
    strike:
        Does it, and leaves the study to be resumed.
    runs:
        How often it is provoked, each time with another seed.
    """

    strike: Callable[[Scene], None]
    engine: str
    runs: int


def wait_until(what: str, holds: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
    """Wait for something to happen."""
    until_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until_s, f"waited {limit_s:.0f} s for: {what}"
        time.sleep(0.02)


# Ends of the driver ---------------------------------------------------------------------------------------------------


def kill_driver(scene: Scene) -> None:
    driver = scene.start()
    scene.any_moment()
    with contextlib.suppress(ProcessLookupError):
        os.kill(driver.pid, signal.SIGKILL)
    driver.wait(PATIENCE_S)


def power_cut(scene: Scene) -> None:
    driver = scene.start()
    scene.any_moment()
    for process in scene.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    driver.wait(PATIENCE_S)


def _signalled(scene: Scene, number: int) -> None:
    driver = scene.start()
    scene.any_moment()
    with contextlib.suppress(ProcessLookupError):
        os.kill(driver.pid, number)
    status = driver.wait(PATIENCE_S)
    scene.facts["status"] = status
    # Before the command has its handler of signals, the signal itself ends it.
    assert status in (0, 130, -number), f"it ended with status {status}"


def sigterm(scene: Scene) -> None:
    _signalled(scene, signal.SIGTERM)


def sigint(scene: Scene) -> None:
    _signalled(scene, signal.SIGINT)


def two_drivers(scene: Scene) -> None:
    first = scene.start()
    wait_until("the first holds the study", lambda: bool(scene.ends()) or first.poll() is not None)
    running = first.poll() is None
    second = scene.run(limit_s=PATIENCE_S)
    if running:
        assert second == 1, f"the second ended with status {second}"
        assert "another `tuner run`" in scene.output()
    assert first.wait(PATIENCE_S) == 0


def rebooted(scene: Scene) -> None:
    """The machine starts again: everything is gone, and the ids of noted processes belong to strangers."""
    scene.write(confirm=ONCE)
    power_cut(scene)
    if not scene.study.exists():
        return
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)
    try:
        ticks = float(Path(f"/proc/{stranger.pid}/stat").read_text().rpartition(")")[2].split()[19])
        created_s = ticks / os.sysconf("SC_CLK_TCK")
        noted = {"boot": "before", "processes": [[stranger.pid, created_s]], "shared_memory": []}
        (scene.study / "processes.json").write_text(json.dumps(noted))
        scene.run("--trials", "2")
        assert stranger.poll() is None, "a stranger with an id that was noted before the reboot was ended"
    finally:
        stranger.kill()
        stranger.wait()


# Files ----------------------------------------------------------------------------------------------------------------


def torn_ledger(scene: Scene) -> None:
    kill_driver(scene)
    if scene.ledger.exists():
        tail = scene.rng.choice([b'{"kind":"trial","record":{"number":', b"\x00" * 64, b'{"kind":"trial"}\n', b"\n\n{"])
        with scene.ledger.open("ab") as ledger:
            ledger.write(tail)


@contextmanager
def small_disk(path: Path, kib: int) -> Iterator[Callable[[], None]]:
    """Put a file system of this size at a path; what is yielded makes it large."""
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k,mode=700", "chaos", path], check=True)
    try:
        yield lambda: subprocess.run(["mount", "-o", "remount,size=256m", path], check=True) and None
        # What was written must stay for the run that follows: copy it to the disk below.
        kept = path.with_name(path.name + ".kept")
        subprocess.run(["cp", "-a", path, kept], check=True)
    finally:
        subprocess.run(["umount", "-l", path], check=True)
    subprocess.run(["cp", "-a", f"{kept}/.", path], check=True)
    subprocess.run(["rm", "-r", kept], check=True)


def _full(scene: Scene, path: Path, kib: int) -> None:
    with small_disk(path, kib) as free:
        status = scene.run()
        scene.facts["status"] = status
        assert status in (0, 1), f"it ended with status {status}"
        free()
        scene.run()


def full_store(scene: Scene) -> None:
    _full(scene, scene.study, scene.rng.choice([200, 300, 400, 600]))


def full_artifacts(scene: Scene) -> None:
    _full(scene, scene.folder / "mlruns" / "artifacts", scene.rng.choice([16, 64, 200]))


def full_trials(scene: Scene) -> None:
    """No room for a trial's tables and logs."""
    _full(scene, scene.study / "trials", scene.rng.choice([4, 16]))


def full_cache(scene: Scene) -> None:
    _full(scene, scene.folder / "mlruns" / "cache", 4)


def full_temporary(scene: Scene) -> None:
    """No room where files are gathered for MLflow."""
    place = scene.folder / "tmp"
    place.mkdir()
    os.environ["TMPDIR"] = str(place)
    try:
        _full(scene, place, 4)
    finally:
        del os.environ["TMPDIR"]


def file_changed(scene: Scene) -> None:
    """Budget, tracking and whom to notify may change; what makes trials comparable may not."""
    scene.write(confirm=ONCE)
    assert scene.run("--trials", "3") == 0
    before = dict(scene.document)
    scene.write(space={"max_num_seqs": [4, 8, 16]})
    assert scene.run() == 2, "a changed space was accepted"
    assert "space.max_num_seqs" in scene.output()
    assert "so that its trials could not be compared" in scene.output()
    scene.write(**before, notify={"command": ["true"]}, tracking={"experiment": None})
    assert scene.run("--trials", "4") == 0


def vllm_changed(scene: Scene) -> None:
    scene.write(confirm=ONCE)
    assert scene.run("--trials", "3") == 0
    path = scene.study / "identity.json"
    identity = json.loads(path.read_text())
    path.write_text(json.dumps({**identity, "vllm": "0.31.0"}))
    assert scene.run() == 2, "another vLLM was accepted without a word"
    assert '"0.31.0"' in scene.output()
    assert scene.run("--trials", "4", "--allow-different") == 0
    assert scene.run("--trials", "4") == 0, "what was allowed once must be asked for no more"


# Others ---------------------------------------------------------------------------------------------------------------


def _locked(scene: Scene, store: Callable[[], Path]) -> None:
    driver = scene.start()
    wait_until("the store is there", lambda: (store().exists() and bool(scene.ends())) or driver.poll() is not None)
    holder = sqlite3.connect(store(), timeout=30, check_same_thread=False)
    holder.isolation_level = None
    holder.execute("BEGIN EXCLUSIVE")
    time.sleep(LOCKED_S)
    holder.execute("ROLLBACK")
    holder.close()
    scene.facts["status"] = driver.wait(10 * scene.usual_s + PATIENCE_S)
    assert scene.facts["status"] == 0


def mlflow_locked(scene: Scene) -> None:
    _locked(scene, lambda: scene.folder / "mlruns" / "mlflow.db")


def optuna_locked(scene: Scene) -> None:
    _locked(scene, lambda: scene.study / "optuna.db")


def mlflow_away(scene: Scene) -> None:
    """Nobody listens at the tracking server's address for the whole of a run."""
    scene.write(confirm=ONCE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    scene.write(tracking={"uri": f"http://127.0.0.1:{port}"})
    assert scene.run("--trials", "3", limit_s=20 * scene.usual_s + 2 * PATIENCE_S) == 0
    scene.write(tracking={})


def clock_jumps(scene: Scene) -> None:
    """The wall clock is set, by hours, while trials run."""
    hours = scene.rng.choice([-30.0, -1.0, 1.0, 30.0])
    at_s = scene.rng.uniform(0.0, scene.usual_s / 2)
    scene.facts["hours"] = hours

    def jump() -> None:
        real = time.time

        def later() -> None:
            time.time = lambda: real() + 3600 * hours

        timer = threading.Timer(at_s, later)
        timer.daemon = True
        timer.start()

    scene.write(budget={"trials": 5, "hours": 0.5})
    driver = scene.start(before=jump)
    status = driver.wait(10 * scene.usual_s + PATIENCE_S)
    assert status == 0, f"it ended with status {status}"
    ends = scene.ends()
    assert all(0 <= record["engine_s"] < 60 for record in ends), "an engine's seconds follow the wall clock"
    assert sum(record["source"] not in ("sentinel", "confirm") for record in ends) == 5, "the jump ended the study"


# The real engine ------------------------------------------------------------------------------------------------------


def named(scene: Scene, *names: str) -> list[psutil.Process]:
    """Processes of the study whose name or command holds one of these."""
    found = []
    for process in scene.processes():
        with contextlib.suppress(psutil.Error):
            words = f"{process.name()} {' '.join(process.cmdline()[:4])}"
            if any(name in words for name in names):
                found.append(process)
    return found


def _log(scene: Scene) -> str:
    logs = sorted(scene.study.glob("trials/*/engine.log"), key=lambda p: p.stat().st_mtime)
    return logs[-1].read_text(errors="replace") if logs else ""


def _strike(scene: Scene, names: tuple[str, ...], send: Callable[[psutil.Process], None]) -> None:
    driver = scene.start()
    wait_until(
        f"one of {names} is there", lambda: bool(named(scene, *names)) or driver.poll() is not None, 2 * PATIENCE_S
    )
    time.sleep(scene.rng.uniform(0.0, 15.0))
    victims = named(scene, *names)
    scene.facts["victim"] = sorted({process.name() for process in victims})
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            send(process)
    _finish(scene, driver)


def _finish(scene: Scene, driver: Command) -> None:
    """Let the driver go on until its budget is used up, or it gives up."""
    scene.facts["status"] = driver.wait(6 * PATIENCE_S)
    assert scene.facts["status"] in (0, 1)


def kill_actor(scene: Scene) -> None:
    _strike(scene, ("ray::EngineHost",), psutil.Process.kill)


def kill_core(scene: Scene) -> None:
    _strike(scene, ("EngineCor",), psutil.Process.kill)


def kill_worker(scene: Scene) -> None:
    _strike(scene, ("VLLM::Worker", "Worker"), psutil.Process.kill)


def kill_raylet(scene: Scene) -> None:
    _strike(scene, ("raylet/raylet",), psutil.Process.kill)


def kill_head(scene: Scene) -> None:
    _strike(scene, ("gcs_server",), psutil.Process.kill)


def hung_core(scene: Scene) -> None:
    """Everything of the engine stops in the middle of whatever it does, and nobody says a word."""
    _strike(scene, ("EngineCor",), psutil.Process.suspend)


def half_the_cpu(scene: Scene) -> None:
    """Another program takes one of two cores for a while."""
    driver = scene.start()
    wait_until("the engine starts", lambda: bool(_log(scene)) or driver.poll() is not None, 2 * PATIENCE_S)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(20)
    finally:
        busy.kill()
        busy.wait()
    _finish(scene, driver)


FAULTS: dict[str, Fault] = {
    "kill -9 of the driver": Fault(kill_driver, "twin", 20),
    "power cut": Fault(power_cut, "twin", 10),
    "SIGTERM": Fault(sigterm, "twin", 6),
    "Ctrl-C": Fault(sigint, "twin", 6),
    "torn last line of the ledger": Fault(torn_ledger, "twin", 6),
    "two drivers": Fault(two_drivers, "twin", 3),
    "reboot": Fault(rebooted, "twin", 3),
    "disk full: store": Fault(full_store, "twin", 4),
    "disk full: tables and logs": Fault(full_trials, "twin", 2),
    "disk full: artefacts": Fault(full_artifacts, "twin", 2),
    "disk full: cache": Fault(full_cache, "twin", 1),
    "disk full: temporary files": Fault(full_temporary, "twin", 1),
    "study file changed": Fault(file_changed, "twin", 1),
    "vLLM changed": Fault(vllm_changed, "twin", 1),
    "MLflow's store locked": Fault(mlflow_locked, "twin", 2),
    "Optuna's store locked": Fault(optuna_locked, "twin", 2),
    "MLflow away": Fault(mlflow_away, "twin", 1),
    "clock jumps": Fault(clock_jumps, "twin", 4),
    "kill -9 of the driver, engine running": Fault(kill_driver, "real", 2),
    "power cut, engine running": Fault(power_cut, "real", 1),
    "kill -9 of the actor": Fault(kill_actor, "real", 2),
    "kill -9 of the engine core": Fault(kill_core, "real", 2),
    "kill -9 of the worker": Fault(kill_worker, "real", 1),
    "kill -9 of the raylet": Fault(kill_raylet, "real", 1),
    "kill -9 of Ray's head": Fault(kill_head, "real", 1),
    "engine core stopped (SIGSTOP)": Fault(hung_core, "real", 1),
    "half the CPU taken": Fault(half_the_cpu, "real", 1),
}
"""In the order of the table."""
