"""What each measured step really computed: the twin's scheduler led through a measured run, step by step.

Step rows say how many tokens a step computed, not over which contexts. The scheduler is deterministic, so with the
engine's own queueing stamps and the rows as its clock it makes the same decisions again, contexts included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from objectives.measurement import Measurement, RequestRecord, StepRecord
from tuner.config import EngineConfig
from tuner.engine.twin.play import Prepared, shared_blocks
from tuner.engine.twin.steptime import StepLoad
from tuner.engine.twin.vllm_scheduler import VirtualScheduler
from tuner.workload.model import Workload


@dataclass(frozen=True, slots=True)
class MeasuredTrial:
    """A trial that a real engine ran, with what is needed to follow it.

    Parameters
    ----------
    speed:
        How many times as long the machine took for everything as for the reference (the trial's speed index).
    """

    config: EngineConfig
    workload: Workload
    measurement: Measurement
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class ReplayedSteps:
    """Steps of one trial whose replay agrees with what was measured.

    Parameters
    ----------
    seconds:
        Measured time of each step, from the end of the one before where the engine had work, overheads included.
    agreement:
        Share of the measured steps that computed as many prompt and output tokens as the replay.
    """

    loads: tuple[StepLoad, ...]
    seconds: tuple[float, ...]
    agreement: float


def replay(trial: MeasuredTrial, prepared: Prepared, most_steps: int | None = None) -> ReplayedSteps:
    """Follow every repeat of a trial, or its first `most_steps` steps.

    Requests without the engine's queueing stamp are taken as queued when sent.
    """
    scheduler = VirtualScheduler(prepared.resolved, prepared.pool_blocks)
    measurement = trial.measurement
    rows: list[_Row] = []
    for repeat in range(len(measurement.duration_s)):
        scheduler.forget_prefixes()
        steps = sorted((s for s in measurement.steps if s.repeat == repeat), key=lambda s: s.start_s + s.duration_s)
        requests = [r for r in measurement.requests if r.repeat == repeat and r.output_tokens]
        left = None if most_steps is None else max(0, most_steps - len(rows))
        rows += _follow(scheduler, prepared, trial.workload, steps[:left], requests)
        if scheduler.unfinished:  # rows are missing: what is left would disturb the next repeat
            scheduler = VirtualScheduler(prepared.resolved, prepared.pool_blocks)
    overhead_s = _overhead_s(rows)
    agreeing = [row for row in rows if row.agrees]
    return ReplayedSteps(
        loads=tuple(row.load for row in agreeing),
        seconds=tuple(row.step.duration_s + overhead_s if row.period_s is None else row.period_s for row in agreeing),
        agreement=len(agreeing) / len(rows) if rows else 0.0,
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """A measured step beside its replay. `period_s` runs from the end of the step before; `None` after idling."""

    step: StepRecord
    load: StepLoad
    prompt_tokens: int
    period_s: float | None

    @property
    def agrees(self) -> bool:
        tokens = self.load.prefill_tokens + self.load.decodes
        return (self.step.prefill_tokens, self.step.decode_tokens) == (self.prompt_tokens, tokens - self.prompt_tokens)


def _follow(
    scheduler: VirtualScheduler,
    prepared: Prepared,
    workload: Workload,
    steps: list[StepRecord],
    requests: list[RequestRecord],
) -> Iterator[_Row]:
    pending = deque(sorted(requests, key=_queued_s))
    resolved = prepared.resolved

    def admit() -> None:
        record = pending.popleft()
        request = workload.requests[_index(record)]
        blocks = shared_blocks(request, resolved.block_tokens) if resolved.prefix_caching else ()
        scheduler.add(record.request_id, record.prompt_tokens, record.output_tokens, _queued_s(record), blocks)

    previous_end_s: float | None = None
    for step in steps:
        end_s = step.start_s + step.duration_s
        busy = scheduler.unfinished
        while pending and _queued_s(pending[0]) <= step.start_s:
            admit()
        if not scheduler.unfinished:
            if not pending:
                return
            admit()
        replayed = scheduler.step()
        if not (replayed.load.prefill_tokens or replayed.load.decodes) and scheduler.unfinished:
            replayed = scheduler.step()  # a step that only preempts is not reported by the engine
        period_s = end_s - previous_end_s if busy and previous_end_s is not None else None
        yield _Row(step, replayed.load, replayed.prompt_tokens, period_s)
        previous_end_s = end_s


def _queued_s(record: RequestRecord) -> float:
    return record.sent_s if record.queued_s is None else record.queued_s


def _index(record: RequestRecord) -> int:
    """Position in the workload: the last part of the id that the load driver and the twin give a request."""
    return int(record.request_id.rsplit("-", 1)[-1])


def _overhead_s(rows: list[_Row]) -> float:
    """Time between steps that the engine's own duration of a step leaves out: the median where it did not idle."""
    gaps = [row.period_s - row.step.duration_s for row in rows if row.period_s is not None]
    return max(0.0, float(np.median(gaps))) if gaps else 0.0
