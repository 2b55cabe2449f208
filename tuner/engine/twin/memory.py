"""How large the KV pool of a configuration is: from the caller's memory model, or exactly where its bytes are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from objectives.measurement import Failure, FailureKind, Stage
from tuner.config import EngineConfig
from tuner.engine.twin.shape import ModelShape, kv_dtype_bytes

GIB = 2**30


@dataclass(frozen=True, slots=True)
class KvPool:
    """The KV pool of one device: its size in tokens, and in GiB of that device."""

    tokens: int
    gib: float
    weights_gib: float | None = None


MemoryOracle = Callable[[EngineConfig], KvPool | Failure]
"""Says how many tokens the KV pool of a configuration holds, or how its memory fails."""


def exact_pool(config: EngineConfig, shape: ModelShape, block_tokens: int) -> KvPool | None:
    """Size of a pool whose bytes the configuration states (`kv_cache_memory_bytes`); `None` where it does not.

    vLLM allocates whole blocks: pool bytes // (block tokens x layers x 2 x KV heads x head size x bytes a value).
    """
    pool_bytes = config.args.get("kv_cache_memory_bytes")
    if pool_bytes is None:
        return None
    block_bytes = token_bytes(config, shape) * block_tokens
    return KvPool(tokens=int(int(pool_bytes) // block_bytes) * block_tokens, gib=int(pool_bytes) / GIB)


def known_pool(tokens: int, config: EngineConfig, shape: ModelShape) -> KvPool:
    """Describe a pool whose size in tokens is known, from a measured trial."""
    return KvPool(tokens, tokens * token_bytes(config, shape) / GIB)


def token_bytes(config: EngineConfig, shape: ModelShape) -> float:
    """Bytes that one token takes of one device's pool; a device holds at least one KV head."""
    value_bytes = kv_dtype_bytes(str(config.args.get("kv_cache_dtype") or "auto"), shape)
    tensor_parallel = int(config.args.get("tensor_parallel_size") or 1)
    kv_share = max(1, shape.kv_heads // tensor_parallel) / shape.kv_heads
    return shape.kv_bytes_per_token(value_bytes) * kv_share


def pool_too_small(pool_blocks: int, block_tokens: int, max_model_len: int, bytes_per_token: float) -> Failure | None:
    """Apply vLLM's check that the pool holds one request of `max_model_len`; one block is vLLM's null block."""
    usable = max(0, pool_blocks - 1)
    needed = -(-max_model_len // block_tokens)
    if needed <= usable:
        return None
    needed_gib = needed * block_tokens * bytes_per_token / GIB
    available_gib = usable * block_tokens * bytes_per_token / GIB
    return Failure(
        kind=FailureKind.OOM_KV_CACHE,
        stage=Stage.KV_CACHE,
        message=(
            f"Predicted: one request of max_model_len {max_model_len} needs {needed_gib:.2f} GiB of KV cache and "
            f"{available_gib:.2f} GiB are there; at most {usable * block_tokens} tokens fit."
        ),
        needed_gib=needed_gib,
        available_gib=available_gib,
        fitting_tokens=usable * block_tokens,
    )
