"""The speed probe, and when two probes differ by the machine alone and not by the configurations of their engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tuner.config import EngineConfig
from tuner.space import Parameter

PROBE_PROMPT_TOKENS = 512
PROBE_OUTPUT_TOKENS = 33
"""One token from the prefill and 32 decode steps."""

_NOT_FELT = frozenset(
    {
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_long_partial_prefills",
        "max_model_len",
        "max_num_partial_prefills",
        "max_num_seqs",
        "num_gpu_blocks_override",
        "scheduling_policy",
        "seed",
    }
)
"""A request that is alone, with token ids that nobody had before, is served the same whatever these are."""
_PIECES = ("max_num_batched_tokens", "long_prefill_token_threshold")
"""Length of the pieces that a prompt is cut into: on a CPU, pieces of 64 tokens took 1.27 times as long as the whole
probe (benchmarks/README.md, Twin). Where they are as long as the probe, it is not cut."""


def is_felt(name: str, values: Iterable[Any]) -> bool:
    """Whether the probe may take another time where an argument has one of these values."""
    if name in _PIECES:
        return any(isinstance(v, int | float) and 0 < v < PROBE_PROMPT_TOKENS for v in values)
    return name not in _NOT_FELT


def is_felt_in(name: str, parameter: Parameter) -> bool:
    """Whether the probe may take different times over a searched parameter."""
    values = parameter.choices if parameter.choices is not None else (parameter.low, parameter.high)
    return is_felt(name, values)


def probes_alike(one: EngineConfig, other: EngineConfig) -> bool:
    """Whether what differs between the probes of two configurations is the machine: its speed, then and now."""
    return not any(is_felt(name, values) for name, values in one.difference(other).items())
