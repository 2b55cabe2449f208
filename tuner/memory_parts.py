"""What a device holds beside its KV pool: estimated, and corrected by what earlier trials measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner import memory_terms as terms
from tuner.engine_settings import GIB, EngineSettings
from tuner.memory_terms import Estimate
from tuner.model_arch import ModelArch
from tuner.model_weights import MIB, Sharding, Stage, stage_bytes

_WEIGHTS_MARGIN = 0.01  # formula against "Model loading took … GiB": biases, norms, buffers of single models
_EXACT_MARGIN = 0.005  # the checkpoint's bytes are known: only buffers and replicated parts can differ
_WEIGHTS_MARGIN_GIB = 0.05
_QUANTISED_MARGIN = 0.06  # which layers a checkpoint leaves unquantised, padding and repacking differ
_MEASURED_SPREAD_GIB = 0.15  # one engine's memory differs this much between starts (vLLM's own safety buffer: 150 MiB)
_UNSPLIT_BYTES = 20 * MIB  # from 0.21 vLLM loads weights with `max_split_size_mb:20`
_NEVER_UNSPLIT = 1 << 62


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """What one earlier trial of the same model on the same machine showed, for one device.

    Parameters
    ----------
    engine_args:
        The arguments of that trial (`env.NAME` keys included).
    weights_gib, kv_gib, graphs_gib:
        "Model loading took", "Available KV cache memory" and the graph memory of its log; `None` where unknown.
    """

    engine_args: Mapping[str, Any]
    weights_gib: float | None = None
    kv_gib: float | None = None
    graphs_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """What a device holds beside the KV pool."""

    weights: Estimate
    activation: Estimate
    non_torch: Estimate
    graphs: Estimate

    def charged(self, settings: EngineSettings) -> list[Estimate]:
        """Parts that are taken off the budget before the KV pool gets the rest."""
        return [self.weights, self.activation, self.non_torch, *([self.graphs] if settings.charges_graphs else [])]


def estimate_parts(
    arch: ModelArch, stage: Stage, settings: EngineSettings, total_gib: float, weight_bytes: int | None
) -> Parts:
    """Estimate what one device of a stage holds beside its KV pool."""
    return Parts(
        weights=_weights(arch, stage, settings, weight_bytes),
        activation=terms.activation(arch, stage, settings, total_gib),
        non_torch=terms.non_torch(stage, settings, total_gib),
        graphs=terms.graphs(stage, settings),
    )


def _weights(arch: ModelArch, stage: Stage, settings: EngineSettings, weight_bytes: int | None) -> Estimate:
    sharding = Sharding(settings.tensor_parallel, settings.expert_parallel)
    unsplit = None if settings.device == "cpu" else _UNSPLIT_BYTES if settings.version >= (0, 21) else _NEVER_UNSPLIT
    size = stage_bytes(arch, stage, sharding, settings.quantisation, settings.dtype_bytes, unsplit_from_bytes=unsplit)
    margin = _WEIGHTS_MARGIN if settings.quantisation is None else _QUANTISED_MARGIN
    if weight_bytes is not None:
        size *= weight_bytes / _checkpoint_size(arch)
        margin = _EXACT_MARGIN if settings.quantisation is None else _QUANTISED_MARGIN
    gib = size / GIB + _adapters_gib(arch, stage, settings)
    spread = margin * gib + _WEIGHTS_MARGIN_GIB
    offload = settings.offload_gib
    return Estimate(max(gib - offload, 0.0), max(gib - spread - offload, 0.0), max(gib + spread - offload, 0.0))


def _checkpoint_size(arch: ModelArch) -> float:
    """Bytes that the formula gives for the checkpoint as it lies on disk."""
    whole = Stage(arch.layers, first=True, last=True)
    rotary = arch.rotary_elements * arch.dtype_bytes
    return stage_bytes(arch, whole, Sharding(stored=True), arch.quantisation, arch.dtype_bytes) - rotary


def _adapters_gib(arch: ModelArch, stage: Stage, settings: EngineSettings) -> float:
    """LoRA slots: two thin matrices for each linear layer of attention and dense feed-forward parts."""
    if not settings.lora_slots:
        return 0.0
    sides = 0.0
    for layer in stage.layers:
        mixer, part = layer.attention, layer.feed_forward
        query, value = mixer.heads * mixer.key_dim, mixer.heads * mixer.value_dim
        sides += 4 * arch.hidden + query + value + mixer.kv_heads * (mixer.key_dim + mixer.value_dim)
        sides += part.projections * (arch.hidden + part.width)
    return settings.lora_slots * settings.lora_rank * sides * settings.dtype_bytes / GIB


def layout_of(settings: EngineSettings) -> tuple[Any, ...]:
    """Return what must be equal for one trial's weights and overheads to hold for another."""
    return (
        settings.tensor_parallel,
        settings.pipeline_parallel,
        settings.expert_parallel,
        settings.dtype_bytes,
        settings.quantisation,
        settings.offload_gib,
        settings.second_runner,
    )


def correct_parts(
    arch: ModelArch,
    stage: Stage,
    settings: EngineSettings,
    total_gib: float,
    parts: Parts,
    alike: Sequence[tuple[MeasuredMemory, EngineSettings]],
) -> tuple[Parts, frozenset[str]]:
    """Take over measured weights, and the measured error of the overheads as a correction of their estimate."""
    weights = [trial.weights_gib for trial, _ in alike if trial.weights_gib is not None]
    if not weights:
        return parts, frozenset()
    loaded = sum(weights) / len(weights)
    parts = Parts(Estimate(loaded, min(weights), max(weights)), parts.activation, parts.non_torch, parts.graphs)
    errors = [
        _overhead_error(arch, stage, other, total_gib, trial, loaded)
        for trial, other in alike
        if trial.kv_gib is not None and other.kv_pool_bytes is None and other.blocks_override is None
    ]
    if not errors:
        return parts, frozenset({"weights_gib"})
    offset = sum(errors) / len(errors)
    spread = max(_MEASURED_SPREAD_GIB, max(errors) - min(errors))
    outside = parts.non_torch.value + offset
    corrected = Parts(
        weights=parts.weights,
        # What was measured is the sum of both: an overestimate beyond the non-torch part was the activation's.
        activation=Estimate.known(max(parts.activation.value + min(outside, 0.0), 0.0)),
        non_torch=Estimate.known(max(outside, 0.0), spread),
        graphs=parts.graphs,
    )
    return corrected, frozenset({"weights_gib", "non_torch_gib"})


def _overhead_error(
    arch: ModelArch,
    stage: Stage,
    settings: EngineSettings,
    total_gib: float,
    trial: MeasuredMemory,
    weights_gib: float,
) -> float:
    """GiB that a trial's activation and non-torch memory took beyond their estimate."""
    graphs = terms.graphs(stage, settings).value if trial.graphs_gib is None else trial.graphs_gib
    charged = graphs if settings.charges_graphs else 0.0
    taken = settings.utilisation * total_gib - weights_gib - (trial.kv_gib or 0.0) - charged
    activation = terms.activation(arch, stage, settings, total_gib).value
    return taken - activation - terms.non_torch(stage, settings, total_gib).value
