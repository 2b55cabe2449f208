from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from objectives.early_end import bar
from objectives.engine_use import HOST
from objectives.measurement import EngineFacts, Failure, FailureKind, Measurement, RequestRecord, StepRecord
from tuner.engine import trial
from tuner.engine.protocol import EngineDiedError, MeasurePlan, TokenDelta
from tuner.engine.race import Race
from tuner.engine.telemetry import DeviceSampler
from tuner.engine.trial import MAX_WARMUP_PROBES, measure
from tuner.probe import PROBE_OUTPUT_TOKENS, PROBE_PROMPT_TOKENS
from tuner.workload.model import Request, Workload

pytestmark = pytest.mark.usefixtures("frozen_heap")

REQUESTS = tuple(Request(0.001 * i, tuple(range(100 + i, 140 + i)), 4) for i in range(3))
WORKLOAD = Workload("short", REQUESTS, (100, 50_000), seed=0)
FACTS = EngineFacts("vllm", "0.32.0", "cpu", 1, "m", 20.0, max_model_len=4096)


RECORD = RequestRecord(
    "r", 40, 4, 0.0, 0.0, first_token_s=5.0, last_token_s=9.0, finish_reason="length", token_times_s=(5, 6, 7, 9)
)


@dataclass
class Engine:
    """A `RunningEngine` that answers at once and remembers in which order things were asked of it."""

    facts: EngineFacts = FACTS
    deltas: Callable[[Request, int], list[int]] = lambda request, _: [1] * request.output_tokens
    token_s: Callable[[int], float] = lambda _: 0.0
    dies: Callable[[list[str]], bool] = lambda _: False
    asked: list[tuple[str, Request]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    pending: list[StepRecord] = field(default_factory=list)

    async def generate(self, request: Request, request_id: str) -> AsyncIterator[TokenDelta]:
        index = len(self.asked)
        self.asked.append((request_id, request))
        self.events.append(request_id.split("-")[0])
        if self.dies([name for name, _ in self.asked]):
            raise EngineDiedError("the core is gone")
        counts = self.deltas(request, index)
        self.pending.append(StepRecord(time.monotonic(), 0.001, request.prompt_tokens, 0, 1, 0, 0.1, 0, 0, 0))
        for position, count in enumerate(counts):
            await asyncio.sleep(self.token_s(index))
            yield TokenDelta(count, finish_reason="length" if position == len(counts) - 1 else None)

    @property
    def steps(self) -> Engine:
        return self

    def take(self, origin_s: float, repeat: int) -> tuple[StepRecord, ...]:
        self.events.append("take")
        taken = tuple(dataclasses.replace(r, start_s=r.start_s - origin_s, repeat=repeat) for r in self.pending)
        self.pending.clear()
        return taken

    async def forget_prefixes(self) -> None:
        self.events.append("forget")


async def run(engine: Engine, strangers: Callable[[], int] = lambda: 0, **plan: object) -> Any:
    stages: list[str] = []
    result = await measure(
        engine,
        WORKLOAD,
        MeasurePlan(salt=7, **plan),  # type: ignore[arg-type]  # keywords of the plan
        lambda: DeviceSampler(None, (), 0.01),
        strangers,
        stages.append,
    )
    engine.events.append(",".join(stages))
    return result


def ids(engine: Engine) -> list[str]:
    return [request_id for request_id, _ in engine.asked]


async def test_warm_up_comes_first_and_is_never_scored() -> None:
    engine = Engine()

    result = await run(engine)

    assert ids(engine)[0] == "warm-7-long"
    assert engine.asked[0][1].prompt_tokens == max(r.prompt_tokens for r in REQUESTS)
    assert [r.request_id for r in result.requests] == ["7-0-0", "7-0-1", "7-0-2"]
    assert sum(step.prefill_tokens for step in result.steps) == sum(r.prompt_tokens for r in REQUESTS)


async def test_speed_is_probed_before_and_after_the_workload_and_always_in_the_same_way() -> None:
    engine = Engine()

    result = await run(engine)

    probes = [i for i, name in enumerate(ids(engine)) if name.startswith("probe-")]
    workload = [i for i, name in enumerate(ids(engine)) if name.startswith("7-")]
    assert probes[0] < min(workload)
    assert probes[-1] > max(workload)
    shapes = {(engine.asked[i][1].prompt_tokens, engine.asked[i][1].output_tokens) for i in probes}
    assert shapes == {(PROBE_PROMPT_TOKENS, PROBE_OUTPUT_TOKENS)}
    assert result.speed_before is not None
    assert result.speed_after is not None


async def test_no_two_requests_share_the_start_of_their_prompt() -> None:
    engine = Engine()

    await run(engine, repeats=3)

    starts = [request.prompt_token_ids[:16] for _, request in engine.asked]
    assert len(set(starts)) == len(starts)
    assert len(set(ids(engine))) == len(starts)
    assert REQUESTS[0].prompt_token_ids[:16] not in starts


async def test_every_repeat_starts_with_an_empty_prefix_cache_and_its_own_steps() -> None:
    engine = Engine()

    result = await run(engine, repeats=2)

    events = [event for event in engine.events if event not in ("warm", "probe")]
    assert events[:-1] == ["forget", "take", "7", "7", "7", "take"] * 2
    assert {r.repeat for r in result.requests} == {0, 1}
    assert [s.repeat for s in result.steps] == [0] * 3 + [1] * 3
    assert all(step.start_s > -0.01 for step in result.steps)
    assert len(result.duration_s) == 2
    assert result.workload_fingerprint == WORKLOAD.fingerprint()


async def test_warm_up_ends_when_two_probes_agree() -> None:
    engine = Engine(token_s=lambda index: 0.004 if index < 3 else 0.001)

    await run(engine)

    probes = [name for name in ids(engine) if name.startswith("probe-")]
    assert 3 <= len(probes) <= MAX_WARMUP_PROBES + 1


async def test_warm_up_of_a_machine_that_never_settles_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_agree", lambda *_: False)
    engine = Engine()

    result = await run(engine)

    assert len([name for name in ids(engine) if name.startswith("probe-")]) == MAX_WARMUP_PROBES + 1
    assert result.speed_before is not None


async def test_probe_that_is_switched_off_is_not_recorded_and_not_run_afterwards() -> None:
    engine = Engine()

    result = await run(engine, speed_probe=False)

    assert (result.speed_before, result.speed_after) == (None, None)
    assert ids(engine)[-1].startswith("7-")


async def test_probe_of_an_engine_with_a_short_context_is_cut_to_it() -> None:
    engine = Engine(facts=dataclasses.replace(FACTS, max_model_len=100))

    await run(engine)

    probes = [request for name, request in engine.asked if name.startswith("probe-")]
    assert {r.prompt_tokens + r.output_tokens for r in probes} == {100}


@pytest.mark.parametrize("together", [1, 2, 4, 33], ids=lambda n: f"{n} tokens a delta")
async def test_decode_step_is_the_time_of_a_token_also_where_several_arrive_together(together: int) -> None:
    def deltas(request: Request, _: int) -> list[int]:
        whole, rest = divmod(request.output_tokens, together)
        return [together] * whole + [rest] * bool(rest)

    engine = Engine(deltas=deltas, token_s=lambda _: 0.002 * together)

    result = await run(engine)

    assert result.speed_after is not None
    assert 0.0019 < result.speed_after.decode_step_s < 0.02
    assert result.speed_after.prefill_s > 0


@pytest.mark.parametrize(
    "dies",
    [
        lambda seen: len(seen) == 1,
        lambda seen: seen[-1] == "probe-7-1",
        lambda seen: seen[-1] == "7-0-0",
        lambda seen: seen[-1] == "7-1-2",
        lambda seen: seen[-1].startswith("probe") and seen[-2].startswith("7-"),
    ],
    ids=["warm-up", "first probe", "first request", "last request", "last probe"],
)
async def test_death_of_the_engine_goes_through_and_nothing_is_measured(dies: Callable[[list[str]], bool]) -> None:
    with pytest.raises(EngineDiedError):
        await run(Engine(dies=dies), repeats=2)


async def test_engine_that_cannot_serve_one_request_alone_is_not_measured() -> None:
    engine = Engine(deltas=lambda request, _: [1] * (request.output_tokens - 1))

    with pytest.raises(RuntimeError, match="3 of 4 tokens arrived for a request that was alone"):
        await run(engine)


SLOW = bar(7, {"ttft_p95_s": 1e-9, "tpot_p95_s": 1e-9}, {})
FAST = bar(8, {"ttft_p95_s": 90.0, "tpot_p95_s": 90.0}, {})


async def test_run_that_the_front_is_certain_to_beat_is_ended_early() -> None:
    engine = Engine(token_s=lambda _: 0.001)

    result = await run(engine, bars=(FAST, SLOW))

    assert isinstance(result, Failure)
    assert result.kind is FailureKind.DOMINATED
    assert result.at_least["tpot_p95_s"] > 0
    assert "trial 7 has" in result.message
    assert ids(engine)[-1].startswith("7-")  # no probe afterwards


async def test_run_that_the_front_may_not_beat_goes_on_to_its_end() -> None:
    result = await run(Engine(), bars=(FAST,), repeats=2)

    assert isinstance(result, Measurement)
    assert len(result.requests) == 6


def test_run_that_is_beaten_only_by_its_last_request_is_a_measurement() -> None:
    race = Race((SLOW,), planned=1)

    assert not race.is_lost_after(RECORD)
    assert race.lost is None


async def test_request_that_fails_is_a_record_with_its_error() -> None:
    def deltas(request: Request, index: int) -> list[int]:
        is_scored = ids(engine)[index].startswith("7-")
        return [1] if is_scored else [1] * request.output_tokens

    engine = Engine(deltas=deltas)

    result = await run(engine)

    assert [r.error for r in result.requests] == ["1 of 4 tokens arrived (finish reason 'length')"] * 3


async def test_most_strangers_seen_are_noted() -> None:
    counts = itertools.chain([0, 2], itertools.repeat(1))

    result = await run(Engine(), strangers=lambda: next(counts), repeats=2)

    assert result.notes["foreign_processes"] == 2.0
    assert result.notes["unsent"] == 0.0
    assert result.notes["held_back"] == 0.0
    assert 0 <= result.notes["client_lateness_p99_s"] < 1.0


async def test_devices_are_read_on_the_clock_of_the_first_repeat() -> None:
    result = await run(Engine(token_s=lambda _: 0.005))

    assert {sample.device for sample in result.device} == {HOST}
    assert min(sample.at_s for sample in result.device) < result.duration_s[0]


async def test_facts_tell_what_the_warm_up_took_and_stages_are_passed_on() -> None:
    engine = Engine(token_s=lambda _: 0.001)

    result = await run(engine)

    assert result.engine.warmup_s > 0.03
    assert dataclasses.replace(result.engine, warmup_s=0.0) == FACTS
    stages = engine.events[-1].split(",")
    assert stages[:2] == ["warm up", "run 0/3"]
    assert stages[-2:] == ["run 3/3", "probe speed"]
