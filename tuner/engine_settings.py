"""The engine arguments that decide memory, resolved: spellings parsed, and what is missing taken from vLLM's defaults.

Defaults follow the version, the device's size and the way the engine is used, as vLLM's `EngineArgs.get_batch_defaults`
and `VllmConfig._set_cudagraph_sizes` have them (read in 0.32.0; older values from release notes and start-up logs).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tuner.argument_values import Arguments, as_mapping
from tuner.errors import UsageError
from tuner.model_arch import DTYPE_BYTES, AttentionKind, ModelArch, Quantisation
from tuner.model_quantisation import quantisation_from_method

Version = tuple[int, int]
Device = Literal["cuda", "cpu"]
Usage = Literal["api_server", "llm_class", "engine"]

NEWEST_KNOWN: Version = (0, 32)
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Engine arguments as vLLM would use them.

    Parameters
    ----------
    utilisation:
        Share of the device that vLLM may use.
    max_model_len:
        Tokens; 1 where vLLM is told to take what fits.
    logit_rows:
        Rows of logits that the sampler may see in one step (requests × tokens a request).
    capture_sizes:
        Batch sizes captured as CUDA graphs; empty when none are.
    full_graphs, piecewise_graphs:
        Which kinds of graphs are captured.
    charges_graphs:
        Whether the estimate of graph memory is taken off the KV pool.
    kv_pool_bytes:
        The pool's size where it is set by hand.
    caches_states:
        Whether states of Mamba-like layers are kept for reuse (on by default from 0.28): a second block a request.
    """

    version: Version
    device: Device
    utilisation: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    logit_rows: int
    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: int
    dtype_bytes: int
    quantisation: Quantisation | None
    kv_cache_dtype: str
    kv_pool_bytes: int | None
    block_size: int
    blocks_override: int | None
    hybrid_manager: bool
    caches_states: bool
    compiled: bool
    capture_sizes: tuple[int, ...]
    full_graphs: bool
    piecewise_graphs: bool
    charges_graphs: bool
    flashinfer_attention: bool
    flashinfer_sampler: bool
    second_runner: bool
    multimodal: bool
    offload_gib: float
    lora_slots: int
    lora_rank: int


def parse_version(text: str) -> Version:
    """Return (major, minor) of a version such as `0.22.0` or `0.8.x`; the newest known where it says nothing."""
    match = re.search(r"(\d+)\.(\d+)", text or "")
    return (int(match.group(1)), int(match.group(2))) if match else NEWEST_KNOWN


def resolve_settings(
    arch: ModelArch,
    engine_args: Mapping[str, Any],
    total_gib: float,
    version: Version,
    *,
    device: Device = "cuda",
    usage: Usage = "api_server",
    gpu_name: str = "",
) -> EngineSettings:
    """Resolve engine arguments.

    Parameters
    ----------
    engine_args:
        vLLM's own names, with `_` or `-`; `env.NAME` keys are environment variables.
    total_gib:
        Memory of one device, or RAM on the CPU backend.
    gpu_name:
        Name of the device where it is known; vLLM's defaults for an A100 are those of smaller devices.

    Raises
    ------
    UsageError
        An argument is not a number, or out of its range.
    """
    try:
        return _resolve(arch, Arguments(engine_args), total_gib, version, device, usage, gpu_name)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"engine arguments: a value has a form that vLLM does not take ({error}).") from error


def _resolve(
    arch: ModelArch,
    args: Arguments,
    total_gib: float,
    version: Version,
    device: Device,
    usage: Usage,
    gpu_name: str,
) -> EngineSettings:
    tensor = args.count("tensor_parallel_size", 1)
    pipeline = args.count("pipeline_parallel_size", 1)
    max_len = _max_model_len(args, arch)
    seqs, batched = _batch_sizes(args, arch, max_len, total_gib, version, device, usage, gpu_name, tensor * pipeline)
    compilation = as_mapping(args.raw("compilation_config"), "mode")
    eager = args.flag("enforce_eager", default=False) or device == "cpu"
    level = _level(args, compilation)
    mode = "NONE" if eager or level == 0 else _graph_mode(args, compilation, level, version)
    kv_dtype = str(args.raw("kv_cache_dtype") or "auto")
    quantisation = _quantisation(args, arch)
    lookahead = as_mapping(args.raw("speculative_config"), "num_speculative_tokens").get("num_speculative_tokens") or 0
    second_runner = _uses_second_runner(args, arch, version, device)
    return EngineSettings(
        version=version,
        device=device,
        utilisation=args.share("gpu_memory_utilization", 0.92 if version >= (0, 21) else 0.9),
        max_model_len=max_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        logit_rows=min(seqs * (1 + int(lookahead)), max(batched, 1)),
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        expert_parallel=_expert_ranks(args, tensor),
        dtype_bytes=_dtype_bytes(args, arch),
        quantisation=quantisation,
        kv_cache_dtype=kv_dtype,
        kv_pool_bytes=_pool_bytes(args, device),
        block_size=args.count("block_size", 128 if device == "cpu" else 16),
        blocks_override=args.optional_count("num_gpu_blocks_override"),
        hybrid_manager=version >= (0, 10) and not args.flag("disable_hybrid_kv_cache_manager", default=False),
        caches_states=args.flag("enable_prefix_caching", default=version >= (0, 28)),
        compiled=not eager and level > 0 and version >= (0, 9),
        capture_sizes=() if mode == "NONE" else _capture_sizes(args, compilation, seqs, batched, version),
        full_graphs=mode.startswith("FULL"),
        piecewise_graphs="PIECEWISE" in mode,
        charges_graphs=args.env_flag("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", default=version >= (0, 21)),
        flashinfer_attention=_uses_flashinfer(args, kv_dtype, total_gib),
        flashinfer_sampler=args.env_flag("VLLM_USE_FLASHINFER_SAMPLER", default=False),
        second_runner=second_runner,
        multimodal=_sees_images(args, arch),
        offload_gib=args.number("cpu_offload_gb", 0.0),
        lora_slots=args.count("max_loras", 1) if args.flag("enable_lora", default=False) else 0,
        lora_rank=args.count("max_lora_rank", 16),
    )


def _max_model_len(args: Arguments, arch: ModelArch) -> int:
    value = args.raw("max_model_len")
    if value in (-1, "-1", "auto"):
        return 1
    if value is None and arch.max_positions is None:
        raise UsageError(
            "engine arguments: max_model_len: neither given nor in config.json (max_position_embeddings); set it."
        )
    return args.count("max_model_len", arch.max_positions or 1)


def _batch_sizes(
    args: Arguments,
    arch: ModelArch,
    max_len: int,
    total_gib: float,
    version: Version,
    device: Device,
    usage: Usage,
    gpu_name: str,
    world: int,
) -> tuple[int, int]:
    default_batched, default_seqs = _batch_defaults(total_gib, version, device, usage, gpu_name, world)
    given_seqs, given_batched = args.optional_count("max_num_seqs"), args.optional_count("max_num_batched_tokens")
    if args.raw("performance_mode") == "throughput":
        default_batched, default_seqs = 2 * default_batched, 2 * default_seqs
    seqs = given_seqs or default_seqs
    batched = given_batched or default_batched
    if given_batched is None:
        if not args.flag("enable_chunked_prefill", default=_chunks_by_default(arch, max_len, version)):
            batched = max(batched, max_len)
        elif max_len > 1:
            batched = min(batched, seqs * max_len)
    if given_seqs is None:
        seqs = min(seqs, batched)
    return seqs, batched


def _chunks_by_default(arch: ModelArch, max_len: int, version: Version) -> bool:
    """Before the V1 engine, prompts were cut up only for contexts beyond 32k tokens and for MLA."""
    latent = any(layer.attention.kind is AttentionKind.LATENT for layer in arch.layers)
    return version >= (0, 9) or max_len > 32768 or latent


def _batch_defaults(
    total_gib: float, version: Version, device: Device, usage: Usage, gpu_name: str, world: int
) -> tuple[int, int]:
    """`(max_num_batched_tokens, max_num_seqs)` when neither is set."""
    offline = usage == "llm_class"
    if usage == "engine":
        return 2048, 128
    if device == "cpu":
        return (4096 * world, 256 * world) if offline else (2048 * world, 128 * world)
    if version < (0, 9):
        return 2048, 256
    if total_gib >= 160:
        return 16384, 1024
    if total_gib >= 70 and "a100" not in gpu_name.lower():
        return (16384 if offline else 8192), (1024 if version >= (0, 10) else 256)
    return (8192 if offline else 2048), 256


def _expert_ranks(args: Arguments, tensor: int) -> int:
    if not args.flag("enable_expert_parallel", default=False):
        return 1
    return tensor * args.count("data_parallel_size", 1)


def _dtype_bytes(args: Arguments, arch: ModelArch) -> int:
    name = str(args.raw("dtype") or "auto").removeprefix("torch.")
    return DTYPE_BYTES.get(name, arch.dtype_bytes)


def _quantisation(args: Arguments, arch: ModelArch) -> Quantisation | None:
    method = args.raw("quantization")
    if arch.quantisation is not None or not isinstance(method, str):
        return arch.quantisation
    return quantisation_from_method(method)


def _pool_bytes(args: Arguments, device: Device) -> int | None:
    if device == "cpu" and args.raw("env.VLLM_CPU_KVCACHE_SPACE") not in (None, ""):
        space_gib = args.number("env.VLLM_CPU_KVCACHE_SPACE", 0)
        if space_gib > 0:
            return int(space_gib * GIB)
    return args.optional_count("kv_cache_memory_bytes")


def _level(args: Arguments, compilation: Mapping[str, Any]) -> int:
    level = args.raw("optimization_level")
    if level is None:
        level = compilation.get("level", compilation.get("mode"))
    if isinstance(level, str) and not level.strip().isdigit():
        return 0 if level.upper() == "NONE" else 2
    return 2 if level is None else int(level)


def _graph_mode(args: Arguments, compilation: Mapping[str, Any], level: int, version: Version) -> str:
    explicit = compilation.get("cudagraph_mode") or args.raw("cudagraph_mode")
    if explicit is not None:
        return str(explicit).rsplit(".", maxsplit=1)[-1].upper()
    return "FULL_AND_PIECEWISE" if version >= (0, 11) and level >= 2 else "PIECEWISE"


def _capture_sizes(
    args: Arguments, compilation: Mapping[str, Any], seqs: int, batched: int, version: Version
) -> tuple[int, ...]:
    listed = compilation.get("cudagraph_capture_sizes") or args.raw("cudagraph_capture_sizes")
    listed = listed or args.raw("cuda_graph_sizes")
    if isinstance(listed, list | tuple) and len(listed) > 1:
        return tuple(sorted({int(size) for size in listed if int(size) <= batched}))
    largest = compilation.get("max_cudagraph_capture_size") or args.raw("max_cudagraph_capture_size")
    if isinstance(listed, list | tuple) and listed:
        largest = largest or listed[0]
    limit = min(int(largest) if largest else min(2 * seqs, 512), batched)
    if args.raw("performance_mode") == "interactivity":
        sizes = set(range(1, min(limit, 32) + 1))
    else:
        sizes = {size for size in (1, 2, 4) if size <= limit}
    wide_step = 16 if version >= (0, 12) else 8
    sizes |= set(range(8, min(limit + 1, 256), 8)) | set(range(256, limit + 1, wide_step))
    if batched <= limit:
        sizes.add(batched)
    return tuple(sorted(sizes))


def _uses_flashinfer(args: Arguments, kv_dtype: str, total_gib: float) -> bool:
    """FlashInfer when asked for, and for an fp8 cache on devices whose FlashAttention cannot read one."""
    backend = args.raw("attention_backend") or args.raw("env.VLLM_ATTENTION_BACKEND")
    backend = backend or as_mapping(args.raw("attention_config"), "backend").get("backend")
    if backend:
        return "FLASHINFER" in str(backend).upper()
    return kv_dtype.startswith("fp8") and total_gib < 70


def _uses_second_runner(args: Arguments, arch: ModelArch, version: Version, device: Device) -> bool:
    """Model Runner V2: Qwen3 from 0.22, Llama and Mistral from 0.23, all dense from 0.25, all from 0.29.

    Release notes of 0.23.0, 0.25.0 and 0.29.0.
    """
    if device == "cpu":
        return False
    if args.raw("env.VLLM_USE_V2_MODEL_RUNNER") not in (None, ""):
        return args.env_flag("VLLM_USE_V2_MODEL_RUNNER", default=False)
    if version >= (0, 29):
        return True
    if arch.is_mixture:
        return False
    families = ("qwen3",) if version < (0, 23) else ("qwen3", "llama", "mistral")
    return version >= (0, 25) or (version >= (0, 22) and arch.model_type in families)


def _sees_images(args: Arguments, arch: ModelArch) -> bool:
    if arch.vision is None or args.flag("language_model_only", default=False):
        return False
    limits = as_mapping(args.raw("limit_mm_per_prompt"), "image")
    return not limits or any(limit not in (0, "0") for limit in limits.values())
