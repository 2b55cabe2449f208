"""Rule 7: what it costs to run without graphs."""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path

from benchmarks.rules_of_thumb import a6000, cpu
from benchmarks.rules_of_thumb.a6000 import MIXES, Mix, Point, point
from benchmarks.rules_of_thumb.model import Change, Finding, Outcome, Tried, ms, percent
from objectives.measurement import Failure
from tuner.config import EngineConfig
from tuner.engine.protocol import MeasurePlan

COSTS = "TPOT costs 10–30%"
SAID = (1.10, 1.30)
LOADS = (0.2, 0.8, 1.3)
TTFT, TPOT = "ttft_mean_s", "tpot_mean_s"
SMALL_MODEL = Path(__file__).parents[2] / "tests" / "data" / "models" / "qwen2.5-7b-instruct"
SMALL_POOL_BYTES = 20 * 2**30


def without_graphs() -> Finding:
    """Rule 7."""
    return Finding(
        number=7,
        rule="Turning graphs off (`enforce_eager`) costs 10 to 30%.",
        criterion=f"Mean TPOT grows by {SAID[0] - 1:.0%} to {SAID[1] - 1:.0%} (p95 between pairs of the CPU table).",
        tried=(*(_twin(mix) for mix in MIXES), _small(), _cpu_probe(), _cpu_pairs()),
        turns_on="how long a step is beside its launches: batch, context, model and prompts in the step",
        why=(
            "Without graphs each layer is launched from Python, a fixed time a layer and step. It weighs most where "
            "steps are short (few requests, short contexts, small models, fast cards) and least where steps are full "
            "of prompt tokens, which no graph replays in any case. The CPU engine has no graphs: there the argument "
            "turns off compiled code, which is another thing."
        ),
    )


def judge_cost(situation: str, tpot_ratio: float) -> Outcome:
    """Hold TPOT without graphs over TPOT with them against rule 7."""
    return Outcome(situation, COSTS, SAID[0] <= tpot_ratio <= SAID[1])


def _twin(mix: Mix) -> Tried:
    rows: list[tuple[str, ...]] = []
    outcomes: list[Outcome] = []
    for load in LOADS:
        graphs, eager = (a6000.points(mix, load, enforce_eager=eager) for eager in (False, True))
        tpot = a6000.change(graphs, eager, TPOT)
        ttft = a6000.change(graphs, eager, TTFT)
        rows.append(
            (
                f"{load:.0%}",
                f"{a6000.mean(graphs, 'mean_running'):.1f}",
                f"{ms(a6000.mean(graphs, TPOT))} → {ms(a6000.mean(eager, TPOT))} ({percent(tpot.mid)})",
                f"{ms(a6000.mean(graphs, TTFT))} → {ms(a6000.mean(eager, TTFT))} ({percent(ttft.mid)})",
            )
        )
        outcomes.append(judge_cost(f"{mix.name}, {load:.0%}", tpot.mid))
    return Tried(
        where=f"{a6000.WHERE}, {mix.name}",
        predicted=True,
        how=a6000.how([mix], ASSUMED),
        header=("load", "running, mean", "TPOT, graphs → eager", "TTFT, graphs → eager"),
        rows=tuple(rows),
        outcomes=tuple(outcomes),
    )


ASSUMED = (
    "The launches are an assumption of the twin's catalogue (60 µs a layer, published 40 to 80), so that these "
    "figures say how the cost varies, not how large it is."
)


@cache
def _small_point(load_per_s: float, eager: bool) -> Point:
    from tuner.engine.twin.devices import find_device
    from tuner.engine.twin.engine import TwinEngine

    twin = TwinEngine(find_device("A6000"), SMALL_MODEL)
    config = EngineConfig({"max_model_len": 4096, "kv_cache_memory_bytes": SMALL_POOL_BYTES, "enforce_eager": eager})
    workload = a6000.arrivals(a6000.CHAT, load_per_s, 0)
    result = twin.run(config, workload, MeasurePlan(speed_probe=False, run_budget_s=1e9), lambda _: None)
    if isinstance(result, Failure):
        raise SystemExit(f"the twin failed: {result.message}")
    return point(result)


SMALL_RATES_PER_S = (0.2, 2.0, 8.0)


def _small() -> Tried:
    rows: list[tuple[str, ...]] = []
    outcomes: list[Outcome] = []
    for rate in SMALL_RATES_PER_S:
        graphs, eager = _small_point(rate, False), _small_point(rate, True)
        ratio = eager.tpot_mean_s / graphs.tpot_mean_s
        rows.append(
            (
                f"{rate:g}/s",
                f"{graphs.mean_running:.1f}",
                f"{ms(graphs.tpot_mean_s)} → {ms(eager.tpot_mean_s)} ({percent(ratio)})",
            )
        )
        outcomes.append(judge_cost(f"{rate:g} requests/s", ratio))
    return Tried(
        where="twin of 1×A6000, 7B",
        predicted=True,
        how=f"Predicted, Qwen2.5-7B on one card, one draw: {a6000.CHAT.text}. {ASSUMED}",
        header=("rate", "running, mean", "TPOT, graphs → eager"),
        rows=tuple(rows),
        outcomes=tuple(outcomes),
    )


def _cpu_probe() -> Tried:
    """Compare the speed probes of all eager and all compiled engines: one request alone, whatever the scheduler."""
    long_steps = [case for case in cpu.cases() if case.settings["tokens"] >= 512]
    rows: list[tuple[str, ...]] = []
    outcomes: list[Outcome] = []
    for name, figure, cases in (
        ("one token, alone", "decode_s", cpu.cases()),
        ("512 prompt tokens, alone", "prefill_s", long_steps),
    ):
        times = {
            eager: [getattr(case, figure) for case in cases if case.settings["eager"] is eager]
            for eager in (False, True)
        }
        if not all(times.values()):
            continue
        compiled, eager = (statistics.median(times[kind]) for kind in (False, True))
        counts = f"{len(times[False])} and {len(times[True])} engines"
        rows.append((name, f"{ms(compiled)} → {ms(eager)} ({percent(eager / compiled)})", counts))
        if figure == "decode_s":
            outcomes.append(judge_cost("one request alone", eager / compiled))
    return Tried(
        where=f"{cpu.WHERE}, one request alone",
        predicted=False,
        how=f"Measured, SmolLM2-135M: medians of the speed probes of the CPU table; {cpu.speeds()}.",
        header=("what", "compiled → eager", "from"),
        rows=tuple(rows),
        outcomes=tuple(outcomes),
    )


def _cpu_pairs() -> Tried:
    def judge(situation: str, ttft: Change, tpot: Change, noise: float) -> tuple[Outcome, ...]:
        """Judge TPOT only; pairs come with the compiled one first."""
        return (judge_cost(situation, tpot.mid),)

    return cpu.paired(cpu.cases(), "eager", "compiled → eager", judge, f"{cpu.WHERE}, under load")
