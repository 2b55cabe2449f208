"""The seam between the study loop and whatever runs a configuration: vLLM in a Ray actor, or the twin.

Three protocols. `TrialEngine` is what the loop sees: a configuration and a workload in, a measurement or a failure out;
no exception crosses it for anything that an engine did. `EnginePool` has the engines that can run at once.
`TokenSource` is what the load driver sees: one running engine that streams tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from objectives.early_end import Bar
from objectives.measurement import Failure, Measurement
from tuner.config import EngineConfig
from tuner.workload.model import Request, Workload


@dataclass(frozen=True, slots=True)
class MeasurePlan:
    """How a trial is measured. Budgets in seconds; a start or run that exceeds its own is ended as `hung`.

    Parameters
    ----------
    repeats:
        Runs of the workload on the same engine, each with fresh token ids.
    speed_probe:
        Whether the speed probe runs before and after the workload.
    salt:
        Varies the fresh token ids of the whole trial, so that no two trials share one.
    log_path:
        File that the engine's own output is appended to; `None` discards it.
    end_by_s:
        A reading of `time.monotonic` by which the trial is ended whatever it does, as `interrupted`; `None` for never.
    bars:
        Members of the front: a run that is certain to be beaten by one is ended early, as `dominated`.
    """

    repeats: int = 1
    speed_probe: bool = True
    salt: int = 0
    start_budget_s: float = 1800.0
    run_budget_s: float = 3600.0
    stop_budget_s: float = 120.0
    sample_interval_s: float = 0.5
    log_path: Path | None = None
    end_by_s: float | None = None
    bars: tuple[Bar, ...] = ()


Progress = Callable[[str], None]
"""Called with a short sentence whenever a trial enters a new stage ("start engine", "warm up", "run 12/24")."""


class TrialEngine(Protocol):
    """Runs one configuration at a time. `run` starts, warms, measures, stops and proves; calls do not overlap.

    `run` may be called on another thread than `close`, which then ends it.
    """

    def run(
        self, config: EngineConfig, workload: Workload, plan: MeasurePlan, progress: Progress
    ) -> Measurement | Failure:
        """Measure `config`, or say how it failed."""
        ...

    def close(self) -> None:
        """End everything that belongs to this engine. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """A place where one engine at a time runs. Engines on the same machine may disturb each other."""

    engine: TrialEngine
    machine: str


class EnginePool(Protocol):
    """The engines that a study may use at once."""

    def seats(self) -> Sequence[Seat]:
        """Seats that there are now: without those whose machine is gone, with those on machines that joined."""
        ...

    def close(self) -> None:
        """End every engine, also those that run. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Tokens that arrived together. `finish_reason` is set on the last delta of a request.

    `queued_s`, `first_scheduled_s` are the engine's stamps on `time.monotonic`'s clock and come with the last delta,
    as do `cached_tokens` and `preemptions`; `None` where the engine does not tell.
    """

    token_count: int
    finish_reason: str | None = None
    queued_s: float | None = None
    first_scheduled_s: float | None = None
    cached_tokens: int | None = None
    preemptions: int | None = None


class EngineDiedError(Exception):
    """The engine itself is gone, not just one request: nothing that is in flight or still to come can be served."""


class TokenSource(Protocol):
    """A running engine as the load driver sees it."""

    def generate(self, request: Request, request_id: str) -> AsyncIterator[TokenDelta]:
        """Stream one request. Closing the iterator early aborts the request in the engine.

        Raises
        ------
        EngineDiedError
            When the engine is gone. Any other exception is the fault of this one request.
        """
        ...
