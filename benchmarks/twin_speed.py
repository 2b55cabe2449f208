"""How fast the twin is: scheduler steps a second, and times real time on the example of a 32B model on four A6000.

Run as `python -m benchmarks.twin_speed`; it prints a table and ends with status 1 if a bound is missed.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

from objectives.measurement import Measurement
from tuner.config import EngineConfig
from tuner.engine.protocol import MeasurePlan
from tuner.engine.twin.devices import find_device
from tuner.engine.twin.engine import TwinEngine
from tuner.engine.twin.memory import GIB, KvPool
from tuner.workload.model import Request, Workload

MODEL = Path(__file__).parents[1] / "tests" / "data" / "models" / "deepseek-r1-distill-qwen-32b"
KV_TOKENS = 350_000
"""About what four 48 GB cards leave of a 32B model at 0.9 utilisation."""
STEPS_PER_S = 4000.0
TIMES_REAL_TIME = 300.0


def documents(count: int, rate_per_s: float, lengths: tuple[int, ...], output_tokens: int) -> Workload:
    """Prompts of mixed lengths with Poisson arrivals."""
    chance = random.Random(1)
    at_s = 0.0
    requests = []
    for index in range(count):
        requests.append(Request(at_s, (index,) * chance.choice(lengths), output_tokens))
        at_s += chance.expovariate(rate_per_s)
    return Workload("documents", tuple(requests), (0, 100_000), 1)


def timed(engine: TwinEngine, workload: Workload, **args: Any) -> tuple[Measurement, float]:
    config = EngineConfig({"tensor_parallel_size": 4, "max_model_len": 40_000, **args})
    begin = time.perf_counter()
    result = engine.run(config, workload, MeasurePlan(run_budget_s=1e6), lambda _: None)
    seconds = time.perf_counter() - begin
    if not isinstance(result, Measurement):
        raise SystemExit(f"the twin failed: {result.message}")
    return result, seconds


def main() -> int:
    engine = TwinEngine(find_device("A6000"), MODEL, lambda _: KvPool(KV_TOKENS, KV_TOKENS * 65_536 / GIB))
    mixed = documents(80, 0.1, (512, 2048, 8192, 32_768), 1024)
    timed(engine, documents(1, 1.0, (512,), 4))  # imports vLLM
    bounds = []

    print(
        f"{'A6000 x 4, 32B, prompts 512-32768, 1024 out':<52}{'seconds':>9}{'x real':>9}{'steps/s':>10}{'running':>9}"
    )
    for args in ({}, {"max_num_seqs": 8}, {"max_num_batched_tokens": 512}, {"enable_prefix_caching": False}):
        result, seconds = timed(engine, mixed, **args)
        speed = sum(result.duration_s) / seconds
        bounds.append(speed >= TIMES_REAL_TIME)
        print(_row(str(args), result, seconds, speed))

    print("32 running, requests without end of supply")
    rates = []
    for count in (64, 256, 1024):
        result, seconds = timed(engine, documents(count, 1e6, (512, 2048), 256), max_num_seqs=32)
        rates.append(len(result.steps) / seconds)
        print(_row(f"{count} requests", result, seconds, sum(result.duration_s) / seconds))
    bounds += [min(rates) >= STEPS_PER_S, rates[-1] >= 0.7 * rates[1]]
    print("bounds hold" if all(bounds) else "a bound is missed", bounds)
    return 0 if all(bounds) else 1


def _row(name: str, result: Measurement, seconds: float, speed: float) -> str:
    running = sum(s.running for s in result.steps) / len(result.steps)
    return f"{name:<52}{seconds:>9.2f}{speed:>9.0f}{len(result.steps) / seconds:>10.0f}{running:>9.1f}"


if __name__ == "__main__":
    sys.exit(main())
