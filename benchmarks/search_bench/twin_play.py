"""Runs of vLLM's scheduler on a clock, the true one among them; each schedule is played once and kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from objectives.intervals import percentile
from objectives.latency import is_served, tpot_s, ttft_s
from objectives.measurement import Failure, Measurement
from search_bench.cache import Cache
from search_bench.problem import Changes, key_of
from tuner.config import EngineConfig
from tuner.engine.protocol import MeasurePlan
from tuner.engine.twin.engine import TwinEngine
from tuner.engine.twin.play import Prepared
from tuner.engine.twin.steptime import StepCost, StepLoad
from tuner.workload.model import Workload

TRUE_COEFFICIENTS = {
    "step": 1.5,
    "linear": 1.2,
    "token": 1.6,
    "prefill_attention": 1.7,
    "decode_attention": 1.4,
    "request": 1.8,
    "communication": 1.3,
}
SMALL_CHUNK_TOKENS = 512
SMALL_CHUNK_SLOWER = 0.4
"""Steps with chunks of 512 tokens are measured 1.1 to 1.5 times slower than predicted (benchmarks/README.md, Twin)."""
BLOCK = 16
POOL_STEP = 1.1


class SlowSmallChunks(StepCost):
    """The cost of a step with a term that no coefficient of the cost model can take up."""

    def __init__(self, inner: StepCost) -> None:
        self._inner = inner

    def __call__(self, load: StepLoad) -> float:
        """Seconds of this step."""
        seconds = self._inner(load)
        if not load.prefill_tokens:
            return seconds
        share = SMALL_CHUNK_TOKENS / (SMALL_CHUNK_TOKENS + load.prefill_tokens)
        return seconds * (1 + 2 * SMALL_CHUNK_SLOWER * share * load.prefill_tokens / (load.prefill_tokens + 256))

    def components(self, load: StepLoad) -> tuple[float, ...]:
        """Return the catalogue's seconds."""
        return self._inner.components(load)


class TruthEngine(TwinEngine):
    """The scheduler on the true clock."""

    def prepare(self, config: EngineConfig, kv_tokens: int | None = None) -> Prepared | Failure:
        """Prepare as the twin does, with the other cost of a step."""
        prepared = super().prepare(config, kv_tokens)
        return prepared if isinstance(prepared, Failure) else replace(prepared, cost=SlowSmallChunks(prepared.cost))


class Player:
    """Plays one workload.

    Parameters
    ----------
    base:
        What every configuration starts with.
    """

    def __init__(self, base: EngineConfig, workload: Workload) -> None:
        self._base = base
        self._workload = workload

    def played(
        self, cache: Cache, engine: Callable[[], TwinEngine], settings: Changes, pool_tokens: int
    ) -> tuple[float, float, float]:
        """Return p95 TTFT, p95 TPOT and the duration, in seconds.

        Where nothing is shared, a pool that is larger than what a run with an ample one ever held schedules the same.
        """
        schedule = self.schedule(settings, pool_tokens)
        if not self._workload.shares_prefixes:
            ample = self._kept(cache, engine, {**schedule, "pool": self._everything_tokens})
            if ample[3] + self._workload.longest_tokens <= schedule["pool"]:
                return (ample[0], ample[1], ample[2])
        kept = self._kept(cache, engine, schedule)
        return (kept[0], kept[1], kept[2])

    def _kept(
        self, cache: Cache, engine: Callable[[], TwinEngine], schedule: Mapping[str, int | bool]
    ) -> Sequence[float]:
        """Return what a run showed, played where it was not yet."""
        key = key_of(schedule)
        if (kept := cache.get(key)) is None:
            cache.put(key, kept := _summary(self.run(engine(), schedule), int(schedule["pool"])))
        found: Sequence[float] = kept
        return found

    def schedule(self, settings: Changes, pool_tokens: int) -> dict[str, int | bool]:
        """Return what the schedule hangs on, equal for configurations that schedule alike.

        A pool that holds everything there is to hold is as good as a larger one; smaller ones are taken in steps of
        a tenth. The effect of the block size, and of prefix caching where nothing is shared, is in the field alone.
        """
        piece = settings["long_prefill_token_threshold"]
        smaller = math.floor(math.log(pool_tokens) / math.log(POOL_STEP))
        caching = bool(settings["enable_prefix_caching"]) or not self._workload.shares_prefixes
        enough = self._everything_tokens if caching else 10**7
        return {
            "seqs": min(settings["max_num_seqs"], len(self._workload.requests)),
            "batched": settings["max_num_batched_tokens"],
            "piece": 0 if piece >= settings["max_num_batched_tokens"] else piece,
            "caching": caching,
            "pool": min(enough, max(self._workload.longest_tokens + 2 * BLOCK, int(POOL_STEP**smaller))),
        }

    @cached_property
    def _everything_tokens(self) -> int:
        """Tokens of all requests together, what is shared counted once: a pool of this size never evicts."""
        requests = self._workload.requests
        shared = {r.prompt_token_ids[: r.shared_tokens] for r in requests}
        own = sum(r.prompt_tokens - r.shared_tokens + r.output_tokens + 2 * BLOCK for r in requests)
        return own + sum(len(prefix) + BLOCK for prefix in shared)

    def run(self, engine: TwinEngine, schedule: Mapping[str, int | bool]) -> Measurement:
        """Play a schedule.

        Raises
        ------
        RuntimeError
            When it does not run.
        """
        config = self._base.with_args(
            {
                "max_model_len": self._workload.longest_tokens,
                "max_num_seqs": schedule["seqs"],
                "max_num_batched_tokens": schedule["batched"],
                "long_prefill_token_threshold": schedule["piece"],
                "enable_prefix_caching": schedule["caching"],
                "num_gpu_blocks_override": schedule["pool"] // BLOCK,
                "block_size": BLOCK,
            }
        )
        outcome = engine.run(config, self._workload, MeasurePlan(speed_probe=False, run_budget_s=1e6), lambda _: None)
        if isinstance(outcome, Failure):
            raise RuntimeError(f"{dict(schedule)} does not run: {outcome.message}")
        return outcome


def _summary(outcome: Measurement, pool_tokens: int) -> list[float]:
    """Return p95 TTFT, p95 TPOT, the duration, and the most tokens that the pool held after a step."""
    served = [r for r in outcome.requests if is_served(r)]
    ttft = percentile([t for r in served if (t := ttft_s(r)) is not None], 95)
    tpot = percentile([t for r in served if (t := tpot_s(r)) is not None], 95)
    held = max(step.kv_usage for step in outcome.steps) * pool_tokens
    return [float(f"{x:.6g}") for x in (ttft, tpot, sum(outcome.duration_s), held)]
