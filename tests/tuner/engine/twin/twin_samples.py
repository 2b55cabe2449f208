"""Samples for the tests of the twin: models of which only config.json exists, small workloads, a CPU configuration."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from objectives.measurement import Measurement, RequestRecord
from tuner.config import EngineConfig
from tuner.workload.model import Request, Workload

MODELS = Path(__file__).parents[3] / "data" / "models"
SMOLLM2 = MODELS / "smollm2-135m"
QWEN_32B = MODELS / "deepseek-r1-distill-qwen-32b"


def poisson(
    count: int,
    rate_per_s: float,
    prompt_tokens: tuple[int, ...] = (200, 700, 1500),
    output_tokens: int = 40,
    shared_tokens: int = 0,
    seed: int = 7,
) -> Workload:
    """Requests with exponential gaps; ids are private beyond `shared_tokens`."""
    chance = random.Random(seed)
    prefix = tuple(range(shared_tokens))
    at_s = 0.0
    requests = []
    for index in range(count):
        length = chance.choice(prompt_tokens)
        private = tuple(10_000 + index for _ in range(length - shared_tokens))
        requests.append(Request(at_s, prefix + private, output_tokens, shared_tokens))
        at_s += chance.expovariate(rate_per_s)
    return Workload("poisson", tuple(requests), (10_000, 40_000), seed)


def cpu_config(**args: Any) -> EngineConfig:
    """A configuration of the 135M model on the CPU with a pool of 256 MiB, 11,648 tokens."""
    defaults = {
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "block_size": 32,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 256 * 2**20,
    }
    return EngineConfig({**defaults, **args})


def percentile_s(measurement: Measurement, what: str, q: float) -> float:
    """Percentile of `ttft` or `tpot` over the requests of a measurement."""
    return float(np.percentile([_ttft_s(r) if what == "ttft" else _tpot_s(r) for r in measurement.requests], q))


def _ttft_s(record: RequestRecord) -> float:
    assert record.first_token_s is not None
    return record.first_token_s - record.scheduled_s


def _tpot_s(record: RequestRecord) -> float:
    assert record.first_token_s is not None
    assert record.last_token_s is not None
    return (record.last_token_s - record.first_token_s) / (record.output_tokens - 1)
