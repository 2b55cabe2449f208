"""Bytes of a model's weights on one device: tensor by tensor, as tensor, pipeline and expert parallelism divide them.

Also the exact size of a checkpoint that lies in a folder, from its safetensors index or headers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tuner.errors import UsageError
from tuner.model_arch import Attention, AttentionKind, FeedForward, Layer, ModelArch, Quantisation

MIB = 1 << 20
_VOCABULARY_PADDING = 64  # vLLM pads the vocabulary to this many rows for each rank
_MXFP4_PADDING = 256  # MXFP4 kernels pad an expert's width and the hidden size to a multiple of this


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a model that one pipeline rank holds."""

    layers: tuple[Layer, ...]
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Sharding:
    """How weights are divided.

    Parameters
    ----------
    tensor:
        Tensor-parallel ranks.
    expert:
        Ranks over which whole experts are spread; 1 for none.
    stored:
        As they lie in the checkpoint: neither padded for kernels nor kept twice.
    """

    tensor: int = 1
    expert: int = 1
    stored: bool = False


def stages_of(arch: ModelArch, pipeline: int) -> tuple[Stage, ...]:
    """Divide the layers as vLLM's `get_pp_indices` does: what remains goes to the stages before the last."""
    sizes = [len(arch.layers) // pipeline] * pipeline
    for offset in range(2, len(arch.layers) % pipeline + 2):
        sizes[-offset] += 1
    starts = [sum(sizes[:rank]) for rank in range(pipeline)]
    return tuple(
        Stage(arch.layers[start : start + size], first=rank == 0, last=rank == pipeline - 1)
        for rank, (start, size) in enumerate(zip(starts, sizes, strict=True))
    )


def stage_bytes(
    arch: ModelArch,
    stage: Stage,
    sharding: Sharding,
    quantisation: Quantisation | None,
    dtype_bytes: int,
    *,
    unsplit_from_bytes: int | None = None,
) -> float:
    """Bytes that a stage's weights take on one device.

    Parameters
    ----------
    unsplit_from_bytes:
        PyTorch's allocator takes 2 MiB pages for what is larger than 10 MiB and keeps up to 1 MiB of the rest with the
        tensor; from this size it keeps all of the rest. `None` counts the tensors' own bytes only.
    """
    tensors = _stage_tensors(arch, stage, sharding, quantisation, dtype_bytes)
    if unsplit_from_bytes is None:
        return sum(tensors)
    return sum(_allocated(size, unsplit_from_bytes) for size in tensors)


def parameters(arch: ModelArch) -> float:
    """Parameters of the whole model, without norms and biases."""
    whole = Stage(arch.layers, first=True, last=True)
    return stage_bytes(arch, whole, Sharding(), None, 1) - arch.rotary_elements


def checkpoint_bytes(folder: Path) -> int | None:
    """Exact bytes of the tensors in a folder's safetensors files; `None` where it holds none.

    Raises
    ------
    UsageError
        A file is there but cannot be read as safetensors.
    """
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            total = json.loads(index.read_text(encoding="utf-8")).get("metadata", {}).get("total_size")
            if isinstance(total, int) and total > 0:
                return total
        sizes = [_header_bytes(path) for path in sorted(folder.glob("*.safetensors"))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UsageError(f"{folder}: its safetensors files cannot be read ({error}); fetch the model again.") from error
    return sum(sizes) if sizes else None


def _header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return sum(
        entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"
    )


def _allocated(size: float, unsplit_from_bytes: int) -> float:
    if size < 10 * MIB:
        return size
    rest = -size % (2 * MIB)
    return size + (rest if rest <= MIB or size >= unsplit_from_bytes else 0)


def _stage_tensors(
    arch: ModelArch, stage: Stage, sharding: Sharding, quantisation: Quantisation | None, dtype_bytes: int
) -> Iterator[float]:
    rows = -(-arch.vocabulary // (_VOCABULARY_PADDING * sharding.tensor)) * _VOCABULARY_PADDING
    if stage.first or (stage.last and arch.tied):
        yield rows * arch.hidden * dtype_bytes
    if stage.first and arch.layer_embedding:
        yield arch.layer_embedding * dtype_bytes
    if stage.last and not arch.tied:
        yield rows * arch.hidden * dtype_bytes
    if stage.first and arch.vision is not None:
        yield arch.vision.parameters / sharding.tensor * dtype_bytes
    yield arch.rotary_elements * dtype_bytes
    for layer in stage.layers:
        yield from _attention_tensors(layer.attention, sharding, quantisation, dtype_bytes)
        yield from _feed_forward_tensors(layer.feed_forward, arch.hidden, sharding, quantisation, dtype_bytes)


def _attention_tensors(
    attention: Attention, sharding: Sharding, quantisation: Quantisation | None, dtype_bytes: int
) -> Iterator[float]:
    linear = quantisation.linear_bits if quantisation is not None and quantisation.attention else None
    element = dtype_bytes if linear is None else linear / 8
    divided = [size / sharding.tensor for size in attention.matrices]
    if attention.kv_matrix:  # query, key and value are one tensor in vLLM
        divided[0] += attention.kv_matrix / min(sharding.tensor, max(attention.kv_heads, 1))
    yield from (size * element for size in divided)
    if attention.replicated:
        yield attention.replicated * element
    if attention.kind is AttentionKind.LATENT and linear is not None and not sharding.stored:
        # A quantised up-projection is kept once more in the model's dtype, absorbed into query and output.
        yield divided[1] * dtype_bytes


def _feed_forward_tensors(
    part: FeedForward, hidden: int, sharding: Sharding, quantisation: Quantisation | None, dtype_bytes: int
) -> Iterator[float]:
    linear = quantisation.linear_bits if quantisation is not None else None
    element = dtype_bytes if linear is None else linear / 8
    if part.width:
        yield (part.projections - 1) * hidden * part.width / sharding.tensor * element
        yield hidden * part.width / sharding.tensor * element
    if not part.experts:
        return
    yield hidden * part.experts * dtype_bytes  # the router
    expert_bits = quantisation.expert_bits if quantisation is not None else None
    element = dtype_bytes if expert_bits is None else expert_bits / 8
    width: float = part.expert_width
    if quantisation is not None and "mxfp4" in quantisation.method and not sharding.stored:
        width = -(-part.expert_width // _MXFP4_PADDING) * _MXFP4_PADDING
    share = part.experts / sharding.tensor if sharding.expert == 1 else -(-part.experts // sharding.expert)
    yield (part.projections - 1) * hidden * width * share * element
    yield hidden * width * share * element
