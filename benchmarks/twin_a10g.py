"""The twin against a published GPU study: 48 configurations of Qwen2.5-7B on one A10G (vLLM 0.22, saturated).

    python -m benchmarks.twin_a10g

The study kept about 300 requests of 512 prompt and 128 output tokens in the engine, so its throughput and inter-token
latency say what a step costs, and its time to the first token only how long the queue was. In that regime the
schedule does not depend on how long steps take: each configuration is played once, the time of its steps is linear in
the coefficients, and a fit on 8 rows is one small non-negative least squares over their throughput and ITL. Prints
Spearman and median error on the other 40 rows, for one fixed choice of 8 and for many random ones, and what is left
by attention backend and execution mode. The rows are in tests/data/twin/a10g-study.jsonl with their source.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from objectives.measurement import Failure, RequestRecord
from tuner.config import EngineConfig
from tuner.engine.twin.calibrate import robust_nonnegative_fit
from tuner.engine.twin.devices import find_device
from tuner.engine.twin.engine import TwinEngine
from tuner.engine.twin.play import VirtualRun
from tuner.engine.twin.steptime import COMPONENTS, StepCost, StepLoad
from tuner.engine.twin.vllm_scheduler import VirtualScheduler
from tuner.workload.model import Request, Workload

Array = NDArray[np.float64]

DATA = Path(__file__).parents[1] / "tests" / "data"
TURNS = 10
"""Requests a user sends, as many as in the study's 570 s; the first and the last turn are ramps and not counted. Equal
requests that start together run in waves, so a shorter count would depend on where it cuts them."""
SMALL_CHUNK_TOKENS = 512
TRAINING_ROWS = 8
DRAWS = 200


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration: what was measured, and the catalogue's seconds of each component behind it.

    Parameters
    ----------
    request_s, itl_s:
        Components of the time a finished request takes of the engine, and of a mean gap between tokens.
    """

    facts: dict[str, Any]
    request_s: Array
    itl_s: Array
    running: float

    @property
    def measured(self) -> tuple[float, float]:
        """Seconds a finished request, and the mean gap between tokens in seconds."""
        return 1.0 / self.facts["requests_per_s"], self.facts["itl_mean_ms"] / 1e3

    @property
    def label(self) -> str:
        """Attention backend, execution mode, and whether prompts are cut into small chunks."""
        params = self.facts["params"]
        mode = "eager" if params["enforce_eager"] == "true" else "graphs"
        chunks = "small" if params["max_num_batched_tokens"] <= SMALL_CHUNK_TOKENS else "large"
        return f"{params['attention_backend']}, {mode}, {chunks} chunks"


class RecordingCost:
    """A step cost that keeps what it was asked for."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self.loads: list[StepLoad] = []

    def __call__(self, load: StepLoad) -> float:
        """Seconds of this step."""
        self.loads.append(load)
        return self._cost(load)


def engine_config(params: dict[str, Any]) -> EngineConfig:
    """Return the study's parameters as engine arguments; what the twin has no use for is left out."""
    return EngineConfig(
        {
            "max_model_len": params["max_model_len"],
            "max_num_seqs": params["max_num_seqs"],
            "max_num_batched_tokens": params["max_num_batched_tokens"],
            "block_size": int(params["block_size"]),
            "kv_cache_dtype": params["kv_cache_dtype"],
            "enforce_eager": params["enforce_eager"] == "true",
            "max_cudagraph_capture_size": params["max_cudagraph_capture_size"],
            "scheduling_policy": params["scheduling_policy"],
            "enable_prefix_caching": False,
        }
    )


def play(facts: dict[str, Any], twin: TwinEngine) -> Row:
    """Play one configuration and add up its steps in the steady part."""
    users = facts["concurrency"]
    requests = tuple(
        Request(0.0, (0,) * facts["input_tokens"], facts["output_tokens"], user=user)
        for _ in range(TURNS)
        for user in range(users)
    )
    prepared = twin.prepare(engine_config(facts["params"]), kv_tokens=facts["params"]["kv_cache_tokens"])
    if isinstance(prepared, Failure):
        raise SystemExit(f"{facts['id']}: {prepared.message}")
    cost = RecordingCost(prepared.cost)
    scheduler = VirtualScheduler(prepared.resolved, prepared.pool_blocks)
    recording = dataclasses.replace(prepared, cost=cost)  # type: ignore[arg-type]  # called like the one it wraps
    run = VirtualRun(scheduler, recording, Workload("closed", requests, (0, 1), 1), 0)
    if (failure := run.play(1e9)) is not None:
        raise SystemExit(f"{facts['id']}: {failure.message}")
    steady = slice(len(cost.loads) // TURNS, len(cost.loads) * (TURNS - 1) // TURNS)
    seconds = np.array([prepared.cost.components(load) for load in cost.loads[steady]])
    tokens = sum(load.sampled for load in cost.loads[steady])
    steps = [s for s in run.steps if s.prefill_tokens or s.decode_tokens]
    between = _between_tokens(run.records(), np.array([s.start_s + s.duration_s for s in steps]))[steady]
    return Row(
        facts,
        request_s=seconds.sum(axis=0) * facts["output_tokens"] / tokens,
        itl_s=between @ seconds / (tokens * (1 - 1 / facts["output_tokens"])),
        running=float(np.mean([s.running for s in steps[steady]])),
    )


def _between_tokens(records: Sequence[RequestRecord], ends_s: Array) -> Array:
    """Count, for each step, the requests that are between two of their tokens, preempted ones included."""
    first = np.searchsorted(ends_s, [r.first_token_s or 0.0 for r in records])
    last = np.searchsorted(ends_s, [r.last_token_s or 0.0 for r in records])
    change = np.zeros(len(ends_s) + 1)
    np.add.at(change, first + 1, 1.0)
    np.add.at(change, last + 1, -1.0)
    counts: Array = np.cumsum(change)[:-1]
    return counts


def fit(rows: Sequence[Row]) -> Array:
    """Fit the factors of the components that occur to the throughput and ITL of these rows."""
    equations = np.vstack([part for row in rows for part in (row.request_s, row.itl_s)])
    measured = np.array([value for row in rows for value in row.measured])
    factors = np.ones(len(COMPONENTS))
    seen = np.asarray(equations.any(axis=0))
    factors[seen] = robust_nonnegative_fit(equations[:, seen], measured)
    return factors


def score(rows: Sequence[Row], factors: Array) -> dict[str, float]:
    """Spearman and median relative error of throughput and ITL."""
    predicted = np.array([(row.request_s @ factors, row.itl_s @ factors) for row in rows])
    measured = np.array([row.measured for row in rows])
    errors = np.median(np.abs(predicted / measured - 1), axis=0)
    return {
        "throughput spearman": float(spearmanr(predicted[:, 0], measured[:, 0])[0]),
        "throughput error": float(errors[0]),
        "itl spearman": float(spearmanr(predicted[:, 1], measured[:, 1])[0]),
        "itl error": float(errors[1]),
    }


def main() -> int:
    twin = TwinEngine(find_device("A10G"), DATA / "models" / "qwen2.5-7b-instruct")
    lines = (DATA / "twin" / "a10g-study.jsonl").read_text().splitlines()
    rows = [play(json.loads(line), twin) for line in lines]

    training = rows[:: len(rows) // TRAINING_ROWS]
    held_out = [row for row in rows if row not in training]
    factors = fit(training)
    print(f"uncalibrated, {len(held_out)} rows      ", _text(score(held_out, np.ones(len(COMPONENTS)))))
    print(f"calibrated on {len(training)} rows, {len(held_out)} others", _text(score(held_out, factors)))
    print("factors:", {name: round(float(f), 2) for name, f in zip(COMPONENTS, factors, strict=True)})

    draw = np.random.default_rng(1)
    results: dict[str, list[float]] = defaultdict(list)
    for _ in range(DRAWS):
        chosen = set(draw.choice(len(rows), TRAINING_ROWS, replace=False).tolist())
        drawn = fit([rows[i] for i in chosen])
        for name, value in score([row for i, row in enumerate(rows) if i not in chosen], drawn).items():
            results[name].append(value)
    print(f"{DRAWS} random choices of {TRAINING_ROWS} rows: median (5%-95%)")
    for name, values in results.items():
        low, mid, high = np.percentile(values, [5, 50, 95])
        print(f"  {name:<22}{mid:>6.2f}  ({low:.2f}-{high:.2f})")

    print("running requests (a matter of the schedule alone): ", _running(rows))
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in held_out:
        groups[row.label].append(row)
    print("what is left, measured over predicted (median):")
    for label, group in sorted(groups.items()):
        ratios = np.array([np.array(r.measured) / (r.request_s @ factors, r.itl_s @ factors) for r in group])
        medians = np.median(ratios, axis=0)
        print(f"  {label:<34}{len(group):>3} rows  time a request x{medians[0]:.2f}  itl x{medians[1]:.2f}")
    return 0


def _running(rows: Sequence[Row]) -> str:
    predicted, measured = np.array([r.running for r in rows]), np.array([r.facts["running"] for r in rows])
    error = float(np.median(np.abs(predicted / measured - 1)))
    return f"spearman {spearmanr(predicted, measured)[0]:.2f}, median error {error:.0%}"


def _text(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.2f}" for name, value in values.items())


if __name__ == "__main__":
    sys.exit(main())
