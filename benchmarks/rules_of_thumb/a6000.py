"""The twin of 4×A6000 and DeepSeek-R1-Distill-Qwen-32B, and the loads that the rules are tried under.

The study file is the example's; the twin is not calibrated for the device. Loads are shares of the rate at which
vLLM's defaults work off all requests of the workload when they are there at once, so that 100% is saturation whatever
the workload. Each load is played with several draws of Poisson arrivals; two configurations are compared draw by draw.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.rules_of_thumb.model import Change
from objectives.intervals import percentile
from objectives.latency import Latencies
from objectives.measurement import Failure, Measurement
from tuner.config import EngineConfig
from tuner.engine.protocol import MeasurePlan
from tuner.ledger import History
from tuner.memory_model import MemoryPrediction
from tuner.opening import Machine, base_config, make_twin, memory_predictor, planned_machine
from tuner.study_file import read
from tuner.workload.model import Request, Workload

if TYPE_CHECKING:
    from tuner.engine.twin.engine import TwinEngine

STUDY = Path(__file__).parents[2] / "examples" / "a6000-qwen32b-longdoc.yaml"
VOCABULARY = (100, 100_000)
LOADS = (0.2, 0.5, 0.8, 1.0, 1.3)
"""From hardly any queue to one that grows as long as requests come."""
DRAWS = 3
NOISE = 0.02
"""Beneath this share, differences of the twin are called none: it is exact, the arrivals are not."""
WHERE = "twin of 4×A6000"

Args = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Mix:
    """Lengths of the requests of a workload: prompts are drawn in equal shares of `prompts` as listed."""

    name: str
    requests: int
    prompts: tuple[int, ...]
    output_tokens: int

    @property
    def text(self) -> str:
        """What it is, for the reader."""
        lengths = sorted(set(self.prompts))
        return (
            f"{self.name}: {self.requests} requests, prompts of {', '.join(map(str, lengths))} tokens "
            f"(mean {np.mean(self.prompts):.0f}), {self.output_tokens} output tokens"
        )


CHAT = Mix("chat", 80, (256, 512, 1024, 2048), 192)
DOCUMENTS = Mix("documents", 50, (512,) * 4 + (2048,) * 3 + (8192,) * 2 + (32_768,), 256)
"""Lengths in the shares of the example study, with a quarter of its output."""
MIXES = (CHAT, DOCUMENTS)


@dataclass(frozen=True, slots=True)
class Point:
    """What one configuration came to under one load and draw; seconds."""

    ttft_mean_s: float
    ttft_p95_s: float
    tpot_mean_s: float
    tpot_p95_s: float
    ttft_short_s: float
    ttft_long_s: float
    most_running: int
    mean_running: float
    preemptions: int
    kv_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class _Opened:
    twin: TwinEngine
    machine: Machine
    base: EngineConfig


@cache
def opened() -> _Opened:
    """Return the twin of the example, its machine, and the arguments that all configurations share."""
    file = read(STUDY)
    machine, device = planned_machine(file)
    memory = memory_predictor(file, machine, lambda: History(None, (), (), ()))
    return _Opened(make_twin(file, device, memory), machine, base_config(file))


def predict_memory(**args: Any) -> MemoryPrediction:
    """Predict the memory of one of the four cards."""
    file = read(STUDY)
    here = opened()
    predictor = memory_predictor(file, here.machine, lambda: History(None, (), (), ()))
    prediction = predictor(EngineConfig({**here.base.args, **args}, dict(here.base.env)))
    if prediction is None:
        raise SystemExit(f"{STUDY}: the model's config.json is not there")
    return prediction


def play(workload: Workload, **args: Any) -> Point | Failure:
    """Predict one configuration on any workload."""
    here = opened()
    config = EngineConfig({**here.base.args, **args}, dict(here.base.env))
    plan = MeasurePlan(speed_probe=False, run_budget_s=1e9)
    result = here.twin.run(config, workload, plan, lambda _: None)
    return point(result) if isinstance(result, Measurement) else result


def point(measured: Measurement) -> Point:
    """Sum up a measurement."""
    found = Latencies.of(measured.requests)
    middle = float(np.median(found.prompt_tokens))
    busy = [step for step in measured.steps if step.running]
    return Point(
        ttft_mean_s=float(found.ttft_s.mean()),
        ttft_p95_s=percentile(found.ttft_s, 95),
        tpot_mean_s=float(np.nanmean(found.tpot_s)),
        tpot_p95_s=percentile(found.tpot_s[~np.isnan(found.tpot_s)], 95),
        ttft_short_s=float(found.ttft_s[found.prompt_tokens <= middle].mean()),
        ttft_long_s=float(found.ttft_s[found.prompt_tokens >= found.prompt_tokens.max()].mean()),
        most_running=max(step.running for step in busy),
        mean_running=sum(s.running * s.duration_s for s in busy) / sum(s.duration_s for s in busy),
        preemptions=sum(step.preemptions for step in measured.steps),
        kv_tokens=measured.engine.kv_tokens or 0,
        duration_s=sum(measured.duration_s),
    )


def arrivals(mix: Mix, rate_per_s: float, draw: int) -> Workload:
    """Return a mix with Poisson arrivals; a draw has the same gaps, but for their scale, at every rate."""
    chance = random.Random(f"{mix.name} {draw}")
    lengths = [mix.prompts[i % len(mix.prompts)] for i in range(mix.requests)]
    chance.shuffle(lengths)
    at_s, requests = 0.0, []
    for index, length in enumerate(lengths):
        requests.append(Request(at_s, (VOCABULARY[0] + index,) * length, mix.output_tokens))
        at_s += chance.expovariate(1.0) / rate_per_s
    return Workload(mix.name, tuple(requests), VOCABULARY, draw)


def at_once(mix: Mix) -> Workload:
    """Return a mix of which every request is there at the start."""
    return arrivals(mix, 1e9, 0)


@cache
def capacity_per_s(mix: Mix) -> float:
    """Requests a second that vLLM's defaults work off."""
    return mix.requests / succeeded(play(at_once(mix))).duration_s


def succeeded(outcome: Point | Failure) -> Point:
    """Return the point of a configuration that has to run.

    Raises
    ------
    SystemExit
        When it does not.
    """
    if isinstance(outcome, Failure):
        raise SystemExit(f"the twin failed: {outcome.message}")
    return outcome


def points(mix: Mix, load: float, **args: Any) -> tuple[Point, ...]:
    """Return what a configuration comes to under a load, a point a draw; known ones are not played again."""
    return _points(mix, load, json.dumps(args, sort_keys=True))


@cache
def _points(mix: Mix, load: float, args: str) -> tuple[Point, ...]:
    rate = load * capacity_per_s(mix)
    given = json.loads(args)
    return tuple(succeeded(play(arrivals(mix, rate, draw), **given)) for draw in range(DRAWS))


def change(old: Sequence[Point], new: Sequence[Point], name: str) -> Change:
    """Compare a figure draw by draw."""
    return Change.of([getattr(p, name) for p in old], [getattr(p, name) for p in new])


def mean(found: Sequence[Point], name: str) -> float:
    """Average a figure over the draws."""
    return float(np.mean([getattr(p, name) for p in found]))


def how(mixes: Sequence[Mix], what: str) -> str:
    """Say how the figures of a table were got."""
    loads = "; ".join(f"{mix.text}, 100% = {capacity_per_s(mix):.2f} requests/s" for mix in mixes)
    return f"Predicted, {DRAWS} draws of Poisson arrivals a load, compared draw by draw. {loads}. {what}".rstrip()
