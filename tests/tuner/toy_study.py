"""A study of a made-up machine: real loop, proposer, ledger and gate; an engine that is a function of its arguments.

The toy's times are exact: every request of a trial has the same TTFT and TPOT, so that a percentile is the value itself
and the front is known.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from objectives.measurement import (
    EngineFacts,
    Failure,
    FailureKind,
    Measurement,
    RequestRecord,
    SpeedProbe,
    Stage,
)
from objectives.score import UserMetric
from tuner.config import EngineConfig
from tuner.engine.pool import FixedPool
from tuner.engine.protocol import EnginePool, MeasurePlan, Progress
from tuner.gate import ForMemory, Gate
from tuner.judge import objectives_of
from tuner.ledger import History, TrialRecord
from tuner.night import Deadline
from tuner.proposal import Proposal
from tuner.proposer import Proposer
from tuner.study import Ending, Rooms, StudyRun
from tuner.study_file import StudyFile, parse
from tuner.study_folder import StudyFolder
from tuner.view import Objective
from tuner.workload.model import Request, Workload

REQUESTS, OUTPUT_TOKENS = 20, 5
WORKLOAD = Workload("toy", tuple(Request(float(i), (11, 12, 13), OUTPUT_TOKENS) for i in range(REQUESTS)), (10, 20), 0)
PROBE = SpeedProbe(0.4, 0.05)
SEQS, CHUNKS = (1, 4, 16), (64, 256, 1024, 4096)
DEFAULTS = {"max_num_seqs": 4, "max_num_batched_tokens": 1024}
SPEC: dict[str, Any] = {
    "study": "toy",
    "model": "org/model",
    "workload": {
        "kind": "long_documents",
        "requests": REQUESTS,
        "prompt_tokens": 3,
        "output_tokens": OUTPUT_TOKENS,
        "arrivals": {"kind": "constant", "rate_per_s": 1},
    },
    "space": {"max_num_seqs": list(SEQS), "max_num_batched_tokens": list(CHUNKS)},
    "budget": {"trials": 8},
    "search": {"sampler": "random", "startup_trials": 3},
    "noise": {"aa_runs": 0, "sentinel_every": 0},
    "gate": {"memory": "off"},
}

OOM = Failure(FailureKind.OOM_KV_CACHE, Stage.KV_CACHE, "4.00 GiB KV cache is needed", 4.0, 1.0)
BUSY = Failure(FailureKind.MEMORY_NOT_FREE, Stage.CONFIG, "another process holds 30 GiB")

Outcome = Measurement | Failure | BaseException
Script = Callable[[EngineConfig, int], Outcome]
"""Configuration and number of the call, from 0 -> what the engine does."""


def args_of(config: EngineConfig) -> dict[str, Any]:
    return {**DEFAULTS, **config.args}


def times(config: EngineConfig) -> tuple[float, float]:
    """TTFT and TPOT of a configuration: large batches shorten the one and lengthen the other."""
    args = args_of(config)
    seqs, chunk = args["max_num_seqs"], args["max_num_batched_tokens"]
    return 0.5 + 40 / chunk + 1 / seqs, 0.02 + chunk / 40_000 + seqs / 500


def oom_beyond(config: EngineConfig, _: int) -> Outcome:
    """What most tests run: the largest batches run out of memory, everything else is measured."""
    args = args_of(config)
    return OOM if args["max_num_seqs"] * args["max_num_batched_tokens"] > 8 * 1024 else measured(config)


def measured(config: EngineConfig, **changes: Any) -> Measurement:
    """A valid measurement of `config`."""
    ttft_s, tpot_s = times(config)
    requests = tuple(served(i, ttft_s, tpot_s) for i in range(REQUESTS))
    facts: dict[str, Any] = {
        "engine": EngineFacts("vllm", "0.32.0", "toy", 1, "org/model", 20.0, 10_000, 2.0, 4_000),
        "workload_fingerprint": WORKLOAD.fingerprint(),
        "requests": requests,
        "steps": (),
        "device": (),
        "duration_s": (max(r.last_token_s or 0.0 for r in requests),),
        "speed_before": PROBE,
        "speed_after": PROBE,
    }
    return Measurement(**(facts | changes))


def served(index: int, ttft_s: float, tpot_s: float) -> RequestRecord:
    tokens = tuple(index + ttft_s + k * tpot_s for k in range(OUTPUT_TOKENS))
    return RequestRecord(
        f"r{index}", 3, OUTPUT_TOKENS, float(index), index + 0.001, first_token_s=tokens[0], last_token_s=tokens[-1],
        cached_tokens=0, finish_reason="length", token_times_s=tokens,
    )  # fmt: skip


def void(config: EngineConfig) -> Measurement:
    """A measurement beside which somebody else used the device."""
    return measured(config, notes={"foreign_processes": 1.0})


@dataclass
class ToyEngine:
    """A `TrialEngine` that follows a script and remembers what it was asked."""

    script: Script = oom_beyond
    runs: list[tuple[EngineConfig, MeasurePlan]] = field(default_factory=list)
    closed: bool = False

    def run(
        self, config: EngineConfig, workload: Workload, plan: MeasurePlan, progress: Progress
    ) -> Measurement | Failure:
        progress("run 1/1")
        self.runs.append((config, plan))
        outcome = self.script(config, len(self.runs) - 1)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        self.closed = True


@dataclass
class Heard:
    """A `Listener` that remembers."""

    begun: list[Proposal] = field(default_factory=list)
    records: list[TrialRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)

    def began(self, proposal: Proposal, of_trials: int | None, ends_at: float | None) -> None:
        self.begun.append(proposal)

    def progressed(self, number: int, text: str) -> None:
        self.stages.append(text)

    def finished(self, record: TrialRecord, history: History) -> None:
        assert record in history.trials
        self.records.append(record)

    def noted(self, text: str) -> None:
        self.notes.append(text)


@dataclass
class ToyStudy:
    """One study on disk, which may be run, interrupted and opened again."""

    folder: StudyFolder
    changes: Mapping[str, Any] = field(default_factory=dict)
    predict: ForMemory = lambda _: None
    user_metrics: Mapping[str, UserMetric] = field(default_factory=dict)
    heard: Heard = field(default_factory=Heard)
    woken: int = 0
    memory: Any = None
    """Optuna's storage in memory, which outlives the run as a file does; `None` has it in the study's folder."""

    @classmethod
    def at(cls, path: Path, **changes: Any) -> ToyStudy:
        """Make a study whose file differs from `SPEC` by these keys, its reference queued."""
        study = cls(StudyFolder(path / "toy"), changes)
        study.folder.prepare()
        (study.folder.path / "optuna.db").write_bytes(_empty_storage())
        study.proposer().enqueue("reference", {}, DEFAULTS)
        return study

    @classmethod
    def in_memory(cls, path: Path, **changes: Any) -> ToyStudy:
        """Make the same study with Optuna's part in memory: for what is about the loop, in a third of the time."""
        import optuna

        study = cls(StudyFolder(path / "toy"), changes, memory=optuna.storages.InMemoryStorage())
        study.folder.prepare()
        study.proposer().enqueue("reference", {}, DEFAULTS)
        return study

    @property
    def file(self) -> StudyFile:
        path = self.folder.path / "study.yaml"
        return StudyFile(path, parse({**SPEC, **self.changes}, path))

    @property
    def file_objectives(self) -> tuple[Objective, ...]:
        return objectives_of(self.file)

    def proposer(self) -> Proposer:
        spec = self.file.spec
        return Proposer(
            self.memory or self.folder.storage_url,
            spec.study,
            spec.space,
            spec.search,
            constraints=list(spec.constraints),
            objectives=[(True, 1) for _ in spec.objectives],
        )

    def open(
        self, engine: ToyEngine | EnginePool, trials: int | None = None, deadline: float | None = None
    ) -> StudyRun:
        """Open it as a new process would."""
        file = self.file
        rooms = Rooms(
            file=file,
            folder=self.folder,
            workload=WORKLOAD,
            base=EngineConfig({"model": file.model}),
            objectives=objectives_of(file),
            user_metrics=self.user_metrics,
            proposer=self.proposer(),
            gate=Gate(None, self.predict, longest_tokens=8, memory=file.spec.gate.memory),
            pool=FixedPool([engine], "toy") if isinstance(engine, ToyEngine) else engine,
            listener=self.heard,
            after_trial=self._wake,
        )
        return StudyRun(rooms, trials=trials, deadline=None if deadline is None else Deadline(at=deadline))

    def run(self, engine: ToyEngine | EnginePool, trials: int | None = None, deadline: float | None = None) -> Ending:
        return self.open(engine, trials, deadline).run()

    def _wake(self) -> None:
        self.woken += 1

    @property
    def history(self) -> History:
        return self.folder.ledger.history()

    @property
    def trials(self) -> tuple[TrialRecord, ...]:
        return self.history.trials

    def told(self) -> dict[int, Any]:
        """What Optuna was told: trial number -> state, violation of `starts`."""
        trials = self.proposer()._study.get_trials(deepcopy=False)
        return {t.number: (t.state.name, t.constraints.get("starts")) for t in trials}


@functools.cache
def _empty_storage() -> bytes:
    """Optuna's storage without a study: to lay out its tables takes longer than most toy studies."""
    import optuna

    with tempfile.TemporaryDirectory() as folder:
        optuna.storages.RDBStorage(f"sqlite:///{folder}/optuna.db")
        return Path(folder, "optuna.db").read_bytes()


def exact_front() -> set[tuple[int, int]]:
    """(max_num_seqs, max_num_batched_tokens) of every configuration that runs and that none dominates."""
    all_of_them = [
        EngineConfig({"max_num_seqs": seqs, "max_num_batched_tokens": chunk})
        for seqs, chunk in itertools.product(SEQS, CHUNKS)
    ]
    runs = [c for c in all_of_them if isinstance(oom_beyond(c, 0), Measurement)]
    return {
        (c.args["max_num_seqs"], c.args["max_num_batched_tokens"])
        for c in runs
        if not any(_dominates(times(other), times(c)) for other in runs)
    }


def _dominates(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] <= b[0] and a[1] <= b[1] and a != b
