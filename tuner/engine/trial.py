"""One measurement on a running engine: warm up, probe the machine's speed, run the workload, probe again.

Knows a running engine by its protocol only, so that the same code measures vLLM and a scripted engine. Nothing of the
warm-up or the probes is scored.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Protocol

from objectives.intervals import percentile
from objectives.measurement import EngineFacts, Failure, Measurement, SpeedProbe, StepRecord
from objectives.validity import (
    NOTE_CLIENT_LATENESS,
    NOTE_FOREIGN_PROCESSES,
    NOTE_HELD_BACK,
    NOTE_UNSENT,
)
from tuner.engine.load import LoadResult, run_load
from tuner.engine.protocol import MeasurePlan, Progress, TokenSource
from tuner.engine.race import Race
from tuner.engine.telemetry import DeviceSampler
from tuner.probe import PROBE_OUTPUT_TOKENS, PROBE_PROMPT_TOKENS
from tuner.workload.fresh import fresh
from tuner.workload.model import Request, Workload

STEADY = 0.10
"""Warm-up ends when two probes in a row agree within this share in both figures …"""
MAX_WARMUP_PROBES = 6
"""… or after so many: a machine that never settles is caught by the probes around the workload."""


class Steps(Protocol):
    """Hands out the rows of the engine's steps."""

    def take(self, origin_s: float, repeat: int) -> tuple[StepRecord, ...]:
        """Hand out and forget the rows so far, with `origin_s` (monotonic) as 0."""
        ...


class RunningEngine(TokenSource, Protocol):
    """An engine that has started."""

    @property
    def facts(self) -> EngineFacts:
        """What it says about itself."""
        ...

    @property
    def steps(self) -> Steps:
        """Its step statistics."""
        ...

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        ...


async def measure(
    engine: RunningEngine,
    workload: Workload,
    plan: MeasurePlan,
    sampler: Callable[[], DeviceSampler],
    foreign_processes: Callable[[], int],
    progress: Progress,
) -> Measurement | Failure:
    """Measure a workload on an engine that has just started; a `dominated` failure where it need not be finished.

    Parameters
    ----------
    sampler:
        Makes the device sampler that runs beside the workload.
    foreign_processes:
        Counts the processes of others on the devices.

    Raises
    ------
    EngineDiedError
        When the engine dies; nothing of the measurement is kept then.
    """
    probes = _Probes(engine, workload, plan.salt)
    warmup_started_s = time.monotonic()
    progress("warm up")
    before = await _warm_up(engine, probes, workload, plan.salt)
    facts = dataclasses.replace(engine.facts, warmup_s=time.monotonic() - warmup_started_s)
    steps: list[StepRecord] = []
    loads: list[LoadResult] = []
    strangers = foreign_processes()
    race = Race(plan.bars, len(workload.requests) * plan.repeats)
    with sampler() as samples:
        progress(f"run 0/{len(workload.requests)}")
        for repeat in range(plan.repeats):
            await engine.forget_prefixes()
            engine.steps.take(0.0, 0)
            load = await run_load(
                engine,
                fresh(workload, plan.salt, repeat),
                id_prefix=f"{plan.salt}",
                repeat=repeat,
                on_progress=progress,
                is_enough=race.is_lost_after if plan.bars else None,
            )
            if race.lost is not None:
                return race.lost
            loads.append(load)
            steps += engine.steps.take(load.started_s, repeat)
            strangers = max(strangers, foreign_processes())
    progress("probe speed")
    return Measurement(
        engine=facts,
        workload_fingerprint=workload.fingerprint(),
        requests=tuple(record for load in loads for record in load.records),
        steps=tuple(steps),
        device=samples.samples(loads[0].started_s),
        duration_s=tuple(load.duration_s for load in loads),
        speed_before=before if plan.speed_probe else None,
        speed_after=await probes.run() if plan.speed_probe else None,
        notes=_notes(loads, strangers),
    )


def _notes(loads: list[LoadResult], strangers: int) -> dict[str, float]:
    lateness = [late for load in loads for late in load.lateness_s]
    return {
        NOTE_CLIENT_LATENESS: percentile(lateness, 99) if lateness else 0.0,
        NOTE_HELD_BACK: float(sum(1 for load in loads for held in load.held_back_s if held > 0)),
        NOTE_UNSENT: float(sum(load.unsent for load in loads)),
        NOTE_FOREIGN_PROCESSES: float(strangers),
    }


async def _warm_up(engine: RunningEngine, probes: _Probes, workload: Workload, salt: int) -> SpeedProbe:
    """Run the longest prompt once, so that every shape and buffer exists, then probe until the figures are steady."""
    longest = max(workload.requests, key=lambda r: r.prompt_tokens)
    await _drain(engine, probes.request(longest.prompt_tokens, min(longest.output_tokens, 4)), f"warm-{salt}-long")
    previous = await probes.run()
    for _ in range(MAX_WARMUP_PROBES - 1):
        current = await probes.run()
        if _agree(previous, current):
            return current
        previous = current
    return previous


def _agree(a: SpeedProbe, b: SpeedProbe) -> bool:
    pairs = ((a.prefill_s, b.prefill_s), (a.decode_step_s, b.decode_step_s))
    return all(abs(x - y) <= STEADY * max(x, y) for x, y in pairs)


class _Probes:
    """The speed probe of one engine: the same request whatever the configuration, with fresh ids each time."""

    def __init__(self, engine: RunningEngine, workload: Workload, salt: int) -> None:
        self._engine = engine
        self._vocabulary = workload.vocabulary
        self._draw = random.Random(f"probe {salt}")
        self._count = 0
        self._id_prefix = f"probe-{salt}"
        room = engine.facts.max_model_len or PROBE_PROMPT_TOKENS + PROBE_OUTPUT_TOKENS
        self._prompt_tokens = min(PROBE_PROMPT_TOKENS, room - PROBE_OUTPUT_TOKENS)

    def request(self, prompt_tokens: int, output_tokens: int) -> Request:
        """Make a request whose token ids no other has."""
        low, high = self._vocabulary
        ids = tuple(self._draw.randrange(low, high) for _ in range(prompt_tokens))
        return Request(arrival_s=0.0, prompt_token_ids=ids, output_tokens=output_tokens)

    async def run(self) -> SpeedProbe:
        """Probe once, alone on the engine."""
        self._count += 1
        request = self.request(self._prompt_tokens, PROBE_OUTPUT_TOKENS)
        started_s = time.monotonic()
        arrivals = await _drain(self._engine, request, f"{self._id_prefix}-{self._count}")
        return SpeedProbe(arrivals[0][0] - started_s, _decode_step_s(arrivals, started_s))


def _decode_step_s(arrivals: list[tuple[float, int]], started_s: float) -> float:
    """Median time per token after the first delta; tokens that came together share the time since the one before.

    An engine that sends the whole answer at once tells nothing of its steps, so that its prefill counts among them.
    """
    steps = [(b - a) / count for (a, _), (b, count) in itertools.pairwise(arrivals) for _ in range(count)]
    return statistics.median(steps) if steps else (arrivals[0][0] - started_s) / arrivals[0][1]


async def _drain(engine: RunningEngine, request: Request, request_id: str) -> list[tuple[float, int]]:
    """Run one request alone and return the arrival of each of its deltas on the monotonic clock, with its tokens.

    Raises
    ------
    RuntimeError
        When the answer is not whole: an engine that cannot serve one request alone is not measured.
    """
    arrivals: list[tuple[float, int]] = []
    async for delta in engine.generate(request, request_id):
        if delta.token_count:
            arrivals.append((time.monotonic(), delta.token_count))
    tokens = sum(count for _, count in arrivals)
    if tokens != request.output_tokens:
        raise RuntimeError(f"{tokens} of {request.output_tokens} tokens arrived for a request that was alone")
    return arrivals
