"""A study in a folder of its own that is run, disturbed and run again, and what must hold afterwards.

Twin studies run in processes that are forked from this one, which has imported everything: a run then takes seconds,
and is a process of its own all the same, with a session, a lock and a death of its own. Studies of the real engine are
started as a user starts them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
STUDY = "chaos"
MODEL = ROOT / "models" / "smollm2-135m-instruct"
MARK = "TUNER_CHAOS_RUN"
"""Environment variable by which everything that a study of the real engine starts is known."""
PATIENCE_S = 60.0
COMMON: dict[str, Any] = {
    "study": STUDY,
    "objectives": ["ttft_p95_s", "tpot_p95_s"],
    "search": {"sampler": "tpe", "startup_trials": 3, "seed": 5},
}
TWIN: dict[str, Any] = {
    **COMMON,
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "model_config_file": str(ROOT / "tests" / "data" / "models" / "qwen2.5-7b-instruct" / "config.json"),
    "engine": {"backend": "twin", "device": "a6000", "args": {"max_model_len": 8192}},
    "workload": {
        "kind": "long_documents",
        "prompt_tokens": {"512": 16, "2048": 8},
        "output_tokens": 64,
        "arrivals": {"kind": "poisson", "rate_per_s": 2},
        "seed": 1,
    },
    "space": {"max_num_seqs": [4, 8, 16, 32, 64], "max_num_batched_tokens": [512, 1024, 2048, 4096, 8192]},
    "budget": {"trials": 5},
    "noise": {"aa_runs": 1, "sentinel_every": 0},
    "confirm": {"rounds": 1},
}
REAL: dict[str, Any] = {
    **COMMON,
    "model": str(MODEL),
    "engine": {
        "args": {"max_model_len": 2048, "enforce_eager": True, "gpu_memory_utilization": 0.2},
        "env": {"HF_HUB_OFFLINE": 1},
    },
    "workload": {
        "kind": "long_documents",
        "prompt_tokens": {"128": 4, "512": 2},
        "output_tokens": 16,
        "arrivals": {"kind": "poisson", "rate_per_s": 4},
        "seed": 1,
    },
    "space": {"max_num_seqs": [1, 4, 16]},
    "budget": {"trials": 1},
    "noise": {"aa_runs": 0, "sentinel_every": 0},
    "measure": {
        "start_budget_s": 60,
        "run_budget_s": 30,
        "speed_probe": False,
        "min_requests": 6,
    },
}


class Forked:
    """One command of the tuner in a process forked from this one, the leader of a session of its own."""

    def __init__(self, folder: Path, arguments: tuple[str, ...], before: Callable[[], None] | None = None) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(folder, arguments, before)
        self._status: int | None = None

    def _run(self, folder: Path, arguments: tuple[str, ...], before: Callable[[], None] | None) -> None:
        from tuner.cli import main

        status = 99
        try:
            os.setsid()
            os.chdir(folder)
            output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if before is not None:
                before()
            status = main(arguments)
        except BaseException:  # noqa: BLE001  # of a process of its own: told, counted, and the end of it
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def poll(self) -> int | None:
        """Exit status, negative for a signal; `None` while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self, limit_s: float) -> int:
        """Wait for the end and return the exit status."""
        return _wait(self, limit_s)


class Started:
    """One command of the tuner as a user starts it."""

    def __init__(self, folder: Path, arguments: tuple[str, ...]) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
        environment |= {"PYTHONPATH": str(ROOT), MARK: str(folder)}
        with (folder / "output.txt").open("a") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tuner", *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Exit status, negative for a signal; `None` while it runs."""
        return self._process.poll()

    def wait(self, limit_s: float) -> int:
        """Wait for the end and return the exit status."""
        return _wait(self, limit_s)


Command = Forked | Started


def _wait(command: Command, limit_s: float) -> int:
    until_s = time.monotonic() + limit_s
    while (status := command.poll()) is None:
        if time.monotonic() > until_s:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.pid, signal.SIGKILL)
            raise AssertionError(f"it did not end within {limit_s:.0f} s")
        time.sleep(0.02)
    return status


@dataclass
class Scene:
    """One study and what is done to it."""

    folder: Path
    engine: str
    rng: random.Random
    usual_s: float
    """What an undisturbed run takes."""
    document: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    segments: frozenset[str] = frozenset()
    sessions: list[int] = field(default_factory=list)

    @classmethod
    def make(cls, folder: Path, engine: str, seed: int, usual_s: float, template: Path | None) -> Scene:
        """Make a fresh folder with a study file and, from the template, a store that MLflow has laid out."""
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "mlruns").mkdir(parents=True)
        if template is not None and template.exists():
            shutil.copyfile(template, folder / "mlruns" / "mlflow.db")
        document = json.loads(json.dumps(TWIN if engine == "twin" else REAL))
        scene = cls(folder, engine, random.Random(seed), usual_s, document, segments=shared_memory())
        scene.write()
        return scene

    @classmethod
    def again(cls, folder: Path, struck: Path) -> Scene:
        """Find a scene again that an earlier process has struck."""
        known = json.loads(struck.read_text())
        document = yaml.safe_load((folder / "study.yaml").read_text())
        segments = frozenset(known["segments"])
        return cls(folder, known["engine"], random.Random(0), known["usual_s"], document, known["facts"], segments)

    def remember(self, struck: Path) -> None:
        """Write down what was seen when the fault had struck."""
        known = {"engine": self.engine, "usual_s": self.usual_s, "facts": self.facts}
        struck.write_text(json.dumps({**known, "segments": sorted(self.segments), "seen": self.ends()}))

    @property
    def study(self) -> Path:
        """Folder of the study."""
        return self.folder / "mlruns" / "studies" / STUDY

    @property
    def ledger(self) -> Path:
        """The ledger."""
        return self.study / "ledger.jsonl"

    def write(self, **changes: Any) -> None:
        """Write the study file, changed by these keys from now on."""
        self.document |= changes
        (self.folder / "study.yaml").write_text(yaml.safe_dump(self.document, sort_keys=False))

    def start(self, *options: str, before: Callable[[], None] | None = None, command: str = "run") -> Command:
        """Start a command on the study."""
        arguments = (command, "study.yaml", *options)
        started = Started(self.folder, arguments) if self.engine == "real" else Forked(self.folder, arguments, before)
        self.sessions.append(started.pid)
        return started

    def run(self, *options: str, limit_s: float = 0.0, command: str = "run") -> int:
        """Run a command to its end and return its exit status."""
        return self.start(*options, command=command).wait(limit_s or 10 * self.usual_s + PATIENCE_S)

    def any_moment(self) -> None:
        """Let a time pass that is drawn from the whole length of a run."""
        moment_s = self.rng.uniform(0.0, self.usual_s)
        self.facts["at_s"] = round(moment_s, 2)
        time.sleep(moment_s)

    def output(self) -> str:
        """Everything that the commands have said."""
        path = self.folder / "output.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def lines(self) -> list[dict[str, Any]]:
        """Whole lines of the ledger, as JSON."""
        if not self.ledger.exists():
            return []
        found = []
        for line in self.ledger.read_bytes().splitlines(keepends=True):
            with contextlib.suppress(ValueError):
                if line.endswith(b"\n"):
                    found.append(json.loads(line))
        return found

    def ends(self) -> list[dict[str, Any]]:
        """Records of trials that are over, a line each."""
        records = [line["record"] for line in self.lines() if line["kind"] == "trial" and "record" in line]
        return [r for r in records if r["state"] != "running" and not _is_open(r)]

    def processes(self) -> list[psutil.Process]:
        """Everything alive that the study's commands have started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if os.getsid(process.pid) in self.sessions or self._is_marked(process):
                    found.append(process)
        return found

    def _is_marked(self, process: psutil.Process) -> bool:
        return self.engine == "real" and process.environ().get(MARK) == str(self.folder)


def _is_open(record: dict[str, Any]) -> bool:
    return bool(record["failure"]) and record["failure"]["kind"] == "interrupted"


def shared_memory() -> frozenset[str]:
    """Names of the segments of this user."""
    mine = (p for p in Path("/dev/shm").iterdir())
    names = set()
    for path in mine:
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid == os.getuid():
                names.add(path.name)
    return frozenset(names)


def signature(record: dict[str, Any]) -> tuple[Any, ...]:
    """What a trial was: enough to tell whether another study proposed the same."""
    return record["source"], json.dumps(record["params"], sort_keys=True), record["repeats"]


@dataclass(frozen=True)
class Invariants:
    """What must hold after whatever happened, counted from the raw files and not by the tuner's own readers."""

    lost: int
    doubled: int
    orphans: int
    segments: int
    open_runs: int
    mlflow_wrong: int
    other_proposals: int
    on_front_wrong: int
    tracebacks: int
    doctor: int
    mended: int

    @property
    def holds(self) -> bool:
        """Whether everything is as it must be."""
        wrong = (self.lost, self.doubled, self.orphans, self.segments, self.open_runs, self.mlflow_wrong)
        return not any((*wrong, self.other_proposals, self.on_front_wrong, self.tracebacks, self.doctor))


def check(scene: Scene, seen_before: list[dict[str, Any]], expected: dict[int, tuple[Any, ...]] | None) -> Invariants:
    """Hold a study that was resumed to its end against the invariants.

    Parameters
    ----------
    seen_before:
        Records that were finished when the fault struck.
    expected:
        What an undisturbed study proposed, by number; `None` where measurements, and so proposals, differ.
    """
    time.sleep(0.1)
    orphans = _settled(scene)
    doctor = scene.run("--json", command="doctor", limit_s=PATIENCE_S)
    said = _last_document(scene)
    scene.run("--json", command="front", limit_s=PATIENCE_S)
    shown = _last_document(scene).get("trials", [])
    scene.facts["front"] = [trial["number"] for trial in shown if trial["pareto"]]
    ends = scene.ends()
    counts = Counter(record["number"] for record in ends)
    by_number = {record["number"]: record for record in ends}
    runs = list(_mlflow_runs(scene))
    wanted = {str(number) for number in by_number}
    got = Counter(trial for trial, _ in runs)
    return Invariants(
        lost=sum(by_number.get(r["number"]) != r for r in seen_before),
        doubled=sum(count > 1 for count in counts.values()),
        orphans=orphans,
        segments=len(shared_memory() - scene.segments) if scene.engine == "real" else 0,
        open_runs=sum(status == "RUNNING" for _, status in runs),
        mlflow_wrong=len(wanted ^ set(got)) + sum(count > 1 for count in got.values()),
        other_proposals=sum(
            signature(r) != expected[n] for n, r in by_number.items() if expected is not None and n in expected
        ),
        on_front_wrong=sum(trial["pareto"] and trial["state"] != "complete" for trial in shown),
        tracebacks=scene.output().count("Traceback (most recent call last)"),
        doctor=doctor,
        mended=sum(finding["level"] == "mended" for finding in said.get("findings", [])),
    )


def _settled(scene: Scene, limit_s: float = 20.0) -> int:
    """Processes that are left, after what ends by itself has had its time."""
    until_s = time.monotonic() + limit_s
    while (left := scene.processes()) and time.monotonic() < until_s:
        time.sleep(0.2)
    return len(left)


def _last_document(scene: Scene) -> dict[str, Any]:
    """Read the JSON document that the last command printed."""
    text = scene.output()
    at = text.rfind("\n{\n")
    try:
        document: dict[str, Any] = json.loads(text[at:]) if at >= 0 else json.loads(text)
    except ValueError:
        return {}
    return document


def _mlflow_runs(scene: Scene) -> Iterator[tuple[str, str]]:
    path = scene.folder / "mlruns" / "mlflow.db"
    if not path.exists():
        return
    with contextlib.closing(sqlite3.connect(path)) as store:
        yield from store.execute(
            "SELECT t.value, r.status FROM runs r JOIN tags t ON t.run_uuid = r.run_uuid AND t.key = 'trial' "
            "WHERE r.lifecycle_stage = 'active'"
        ).fetchall()
