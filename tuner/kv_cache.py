"""What the KV cache of one device costs: bytes a token, bytes a block, blocks a request.

Follows vLLM's own rules (`v1/kv_cache_interface.py` and `v1/core/kv_cache_utils.py`, read in 0.32.0): layers of one
kind form one group; models that mix kinds are divided into groups of equal page size that share one pool of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tuner.engine_settings import EngineSettings
from tuner.model_arch import Attention, AttentionKind, ModelArch
from tuner.model_weights import Stage

# Bytes of one cached element. Packed formats carry their scales: NVFP4 has an 8-bit scale for 16 elements.
_ELEMENT_BYTES = {"bfloat16": 2.0, "float16": 2.0, "half": 2.0, "float32": 4.0, "nvfp4": 0.5625, "nvfp4_4over6": 0.5625}
# Nominal widths of formats whose packing depends on the backend; never called exact.
_APPROXIMATE_BYTES = {
    "int4_per_token_head": 0.5,
    "turboquant_k8v4": 0.75,
    "turboquant_4bit_nc": 0.5,
    "turboquant_k3v4_nc": 0.44,
    "turboquant_3bit_nc": 0.375,
    "ultraquant_4bit": 0.5,
}
_PER_HEAD_SCALE_BYTES = 4  # int8/fp8_per_token_head: a float32 scale for each key and each value
# Whole rows of DeepSeek's sparse-attention cache, bytes a token and layer (flashmla_sparse.py).
_SPARSE_ROW_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_INDEXER_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache on one device: bytes a token, or bytes of a fixed state a request."""

    kind: AttentionKind
    token_bytes: float
    window: int = 0
    state_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block table. `block_tokens` is how many tokens one of its blocks holds."""

    kind: AttentionKind
    window: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class CachePlan:
    """How one device's pool is divided.

    Parameters
    ----------
    token_bytes:
        Bytes that one new token writes, over all layers of the device.
    block_bytes:
        Bytes of one block over all layers that share its number; 0 for a model without a cache.
    in_flight_tokens:
        Tokens scheduled but not settled: what a sliding window holds beyond itself.
    state_blocks:
        Blocks that a layer with a state holds for one request.
    exact:
        Whether `token_bytes` is known, not estimated.
    counts_requests:
        Whether vLLM reports the pool as requests times their length, a part of a block a request left out. Seen in
        start-up logs of 0.22.0 with block sizes that do not divide the length; no older log shows one.
    """

    token_bytes: float
    block_bytes: float
    groups: tuple[CacheGroup, ...]
    in_flight_tokens: int
    state_blocks: int
    exact: bool
    counts_requests: bool

    def blocks_for(self, tokens: int) -> int:
        """Blocks that one request of this length holds at most, over all groups."""
        return sum(self._group_blocks(group, tokens) for group in self.groups)

    def bytes_for(self, tokens: int) -> float:
        """Bytes that the pool must have for one request of this length."""
        return self.blocks_for(tokens) * self.block_bytes

    def tokens_in(self, pool_bytes: float, max_model_len: int) -> int:
        """Tokens that a pool holds, counted as vLLM reports it: requests of `max_model_len` times that length."""
        if self.block_bytes <= 0 or pool_bytes <= 0:
            return 0
        blocks = int(pool_bytes // self.block_bytes)
        if len(self.groups) == 1 and self.groups[0].kind in (AttentionKind.FULL, AttentionKind.LATENT):
            block_tokens = self.groups[0].block_tokens
            if not self.counts_requests or max_model_len < block_tokens:
                return blocks * block_tokens
        return int(blocks / self.blocks_for(max_model_len) * max_model_len)

    def longest_in(self, pool_bytes: float, limit: int) -> int:
        """Longest request that a pool holds, at most `limit` tokens; 0 if none fits."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes_for(middle) <= pool_bytes else (low, middle - 1)
        return low

    def _group_blocks(self, group: CacheGroup, tokens: int) -> int:
        if group.kind is AttentionKind.STATE:
            return self.state_blocks
        if group.kind is AttentionKind.SLIDING:
            held = min(group.window - 1 + self.in_flight_tokens, tokens)
            return -(-held // group.block_tokens) + 1
        if group.kind is AttentionKind.CHUNKED:
            tokens = min(group.window + self.in_flight_tokens, tokens)
        return -(-tokens // group.block_tokens)


def plan_cache(arch: ModelArch, stage: Stage, settings: EngineSettings) -> CachePlan:
    """Plan the KV cache of one device of a stage."""
    layers = [
        cache
        for layer in stage.layers
        if (cache := _layer_cache(layer.attention, arch, settings)).kind is not AttentionKind.NONE
    ]
    if not settings.hybrid_manager:
        layers = _promoted(layers)
    block_bytes, groups = _groups(layers, settings.block_size)
    return CachePlan(
        token_bytes=sum(layer.token_bytes for layer in layers),
        block_bytes=block_bytes,
        groups=groups,
        in_flight_tokens=_concurrent_batches(settings) * settings.max_num_batched_tokens,
        state_blocks=2 if settings.caches_states else 1,
        exact=settings.kv_cache_dtype not in _APPROXIMATE_BYTES
        and not settings.kv_cache_dtype.endswith("_per_token_head")
        and all(layer.kind is not AttentionKind.STATE for layer in layers),
        counts_requests=settings.version >= (0, 22),
    )


def _layer_cache(attention: Attention, arch: ModelArch, settings: EngineSettings) -> LayerCache:
    if attention.kind is AttentionKind.STATE:
        state = attention.state_elements / settings.tensor_parallel * settings.dtype_bytes
        return LayerCache(attention.kind, 0.0, state_bytes=state)
    element = _element_bytes(settings)
    if attention.kind is AttentionKind.LATENT:
        return LayerCache(attention.kind, _latent_bytes(attention, arch, settings, element))
    heads = max(1, attention.kv_heads // settings.tensor_parallel)
    token = heads * (attention.key_dim + attention.value_dim) * element
    if settings.kv_cache_dtype.endswith("_per_token_head"):
        token += heads * 2 * _PER_HEAD_SCALE_BYTES
    return LayerCache(attention.kind, token, attention.window)


def _element_bytes(settings: EngineSettings) -> float:
    name = settings.kv_cache_dtype
    if name in ("auto", ""):
        quantisation = settings.quantisation
        if quantisation is not None and quantisation.kv_bits is not None:
            return quantisation.kv_bits / 8
        return settings.dtype_bytes
    if name in _APPROXIMATE_BYTES:
        return _APPROXIMATE_BYTES[name]
    return _ELEMENT_BYTES.get(name, 1.0)


def _latent_bytes(attention: Attention, arch: ModelArch, settings: EngineSettings, element: float) -> float:
    name = settings.kv_cache_dtype
    if not arch.index_dim:
        return _SPARSE_ROW_BYTES.get(name, attention.key_dim * element)
    # Sparse attention keeps its cache in packed rows unless 16 bits are asked for, and the indexer's keys beside it.
    packed = name if name in _SPARSE_ROW_BYTES else "fp8_ds_mla"
    row = attention.key_dim * element if name in ("bfloat16", "float16") else _SPARSE_ROW_BYTES[packed]
    return row + arch.index_dim + _INDEXER_SCALE_BYTES


def _promoted(layers: Sequence[LayerCache]) -> list[LayerCache]:
    """Without the hybrid manager, windows are kept in full as soon as any layer is."""
    local = (AttentionKind.SLIDING, AttentionKind.CHUNKED)
    if all(layer.kind in local for layer in layers):
        return list(layers)
    return [replace(x, kind=AttentionKind.FULL, window=0) if x.kind in local else x for x in layers]


def _groups(layers: Sequence[LayerCache], block_size: int) -> tuple[float, tuple[CacheGroup, ...]]:
    """Return bytes of one block, and the groups that draw blocks from the pool."""
    if not layers:
        return 0.0, ()
    kinds = {(layer.kind, layer.window) for layer in layers}
    if len(kinds) == 1 and layers[0].kind is not AttentionKind.STATE:
        kind, window = kinds.pop()
        return sum(layer.token_bytes for layer in layers) * block_size, (CacheGroup(kind, window, block_size),)
    block_size = _aligned_block_size(layers, block_size)
    page = max(max(layer.token_bytes * block_size, layer.state_bytes) for layer in layers)
    buckets: dict[CacheGroup, int] = {}
    for layer in layers:
        group = CacheGroup(layer.kind, layer.window, _block_tokens(layer, page, block_size))
        buckets[group] = buckets.get(group, 0) + 1
    size = _group_size(list(buckets.values()))
    return size * page, tuple(group for group, count in buckets.items() for _ in range(-(-count // size)))


def _aligned_block_size(layers: Sequence[LayerCache], block_size: int) -> int:
    """Return the tokens of a block: enough for its page to be as large as a state, which fills one page."""
    state = max(layer.state_bytes for layer in layers)
    token = max(layer.token_bytes for layer in layers)
    if not state or not token:
        return block_size
    needed = -(-state // (token * block_size))
    return int(max(needed, 1)) * block_size


def _block_tokens(layer: LayerCache, page: float, block_size: int) -> int:
    """Tokens in a page: small layers take a multiple of the block size where it fills the page, else are padded."""
    if not layer.token_bytes:
        return block_size
    ratio = page / (layer.token_bytes * block_size)
    return block_size * int(ratio) if ratio == int(ratio) else block_size


def _group_size(counts: Sequence[int]) -> int:
    """Layers in each group: the rarest kind's number, or the commonest's where they are nearly as many."""
    fewest, most = min(counts), max(counts)
    return most if most < 1.5 * fewest else fewest


def _concurrent_batches(settings: EngineSettings) -> int:
    """Batches in flight: one a pipeline stage, and one more under asynchronous scheduling (default from 0.14)."""
    if settings.device == "cpu" or settings.version < (0, 14):
        return settings.pipeline_parallel
    if settings.second_runner:
        return settings.pipeline_parallel + 1
    return 2 if settings.pipeline_parallel == 1 else settings.pipeline_parallel
