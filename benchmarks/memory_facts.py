"""Turns the published start-up facts in `tests/data/memory_facts.jsonl` into calls of `tuner.memory_model.predict`.

The facts hold numbers of an architecture, not the model's file: what is missing of its public `config.json` (kind of
model, experts, windows, vision tower) stands in `_FAMILIES`.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from tuner.memory_model import MeasuredMemory, MemoryPrediction, predict

FACTS = Path(__file__).resolve().parent.parent / "tests" / "data" / "memory_facts.jsonl"
Row = dict[str, Any]

MEMORY_FAILURES = ("kv-too-small", "oom-weights-load", "oom-sampler-warmup", "oom-cudagraph")
ENGINE_KEYS = (
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "enforce_eager",
    "optimization_level",
    "attention_backend",
    "block_size",
    "max_cudagraph_capture_size",
    "kv_cache_dtype",
    "dtype",
)

_GEMMA3_TOWER = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "image_size": 896,
    "patch_size": 14,
}
_FAMILIES: dict[str, Row] = {
    "qwen2.5-0.5b": {"model_type": "qwen2"},
    "qwen2.5-1.5b": {"model_type": "qwen2"},
    "qwen2.5-7b": {"model_type": "qwen2"},
    "qwen2.5-32b": {"model_type": "qwen2"},
    "qwen2.5-72b": {"model_type": "qwen2"},
    "qwen3-14b": {"model_type": "qwen3"},
    "qwen3-32b": {"model_type": "qwen3"},
    "llama-3-8b": {"model_type": "llama", "max_position_embeddings": 131072},
    "llama-3-70b": {"model_type": "llama", "max_position_embeddings": 131072},
    "phi-2": {"model_type": "phi", "max_position_embeddings": 2048},
    "phi-4": {"model_type": "phi3"},
    "gemma-2-9b": {"model_type": "gemma2", "sliding_window": 4096},
    "gemma-2-27b": {"model_type": "gemma2", "sliding_window": 4096},
    "gemma-3-4b": {"model_type": "gemma3", "sliding_window": 1024},
    "gemma-3-12b": {"model_type": "gemma3", "sliding_window": 1024},
    "mistral-small-24b": {"model_type": "mistral"},
    "mixtral-8x7b": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "qwen1.5-moe": {
        "model_type": "qwen2_moe",
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "deepseek-r1": {
        "model_type": "deepseek_v3",
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
}
_MULTIMODAL: dict[str, Row] = {
    "gemma-3-4b": {"vision_config": _GEMMA3_TOWER, "mm_tokens_per_image": 256},
    "gemma-3-12b": {"vision_config": _GEMMA3_TOWER, "mm_tokens_per_image": 256},
    "mistral-small-24b": {
        "vision_config": {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "image_size": 1540,
            "patch_size": 14,
        },
        "spatial_merge_size": 2,
    },
}
_QUANTISED_CHECKPOINTS: dict[str, Row] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "awq/gptq int4": {"quant_method": "moe_wna16", "bits": 4, "group_size": 128},
    "compressed-tensors fp8": {"quant_method": "compressed-tensors"},
    "fp8": {"quant_method": "fp8"},
    "bitsandbytes": {"quant_method": "bitsandbytes"},
}


def load_facts(path: Path = FACTS) -> list[Row]:
    """Return the facts, one dict a line of the file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def is_fit_part(row: Row) -> bool:
    """Whether a row belongs to the part that constants may be fitted on; the rest scores. By a hash of its id."""
    return hashlib.sha256(row["id"].encode()).digest()[0] % 2 == 0


def config_of(row: Row) -> Row:
    """Return the `config.json` of a row whose architecture is known."""
    arch, key = row["arch"], row["arch_key"]
    text: Row = {
        "hidden_size": arch["hidden"],
        "num_hidden_layers": arch["num_layers"],
        "num_attention_heads": arch["num_heads"],
        "num_key_value_heads": arch["num_kv_heads"],
        "head_dim": arch["head_dim"],
        "intermediate_size": arch["intermediate"],
        "vocab_size": arch["vocab"],
        "tie_word_embeddings": arch["tie"],
        "max_position_embeddings": max(32768, row.get("max_model_len") or 0),
        "torch_dtype": "bfloat16",
    } | _FAMILIES[key]
    method = row.get("quantization") or ("awq" if "(quantised" in row["model"] else None)
    if method in _QUANTISED_CHECKPOINTS:
        text["quantization_config"] = _QUANTISED_CHECKPOINTS[method]
    if key in _MULTIMODAL:
        return {"model_type": text["model_type"], "text_config": text} | _MULTIMODAL[key]
    return text


def args_of(row: Row) -> Row:
    """Return the engine arguments that a row states."""
    args: Row = {key: row[key] for key in ENGINE_KEYS if row.get(key) is not None}
    args["tensor_parallel_size"], args["pipeline_parallel_size"] = row["tp"], row["pp"]
    notes = row.get("notes") or ""
    if mode := re.search(r"performance_mode=(\w+)", notes):
        args["performance_mode"] = mode.group(1)
    if "flashinfer sampler" in notes:
        args["env.VLLM_USE_FLASHINFER_SAMPLER"] = "1"
    if speculated := re.search(r"speculative decoding, (\d+) tokens", notes):
        args["speculative_config"] = {"num_speculative_tokens": int(speculated.group(1))}
    if "LoRA enabled" in notes:
        args |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
    if row.get("quantization") == "fp8 (runtime)":
        args["quantization"] = "fp8"
    return args


def predict_row(row: Row, *, measured: MeasuredMemory | None = None) -> MemoryPrediction:
    """Predict a row from its configuration alone, or with what an earlier trial measured."""
    return predict(
        config_of(row),
        args_of(row),
        row["gpu_total_gib"],
        row.get("vllm_version") or "",
        measured=measured,
        gpu_name=row["gpu"],
    )


def has_architecture(row: Row) -> bool:
    """Whether the row's architecture is known and the device's total is stated."""
    return bool(row.get("arch")) and row.get("gpu_total_gib") is not None


def has_settings(row: Row) -> bool:
    """Whether everything that the KV pool depends on is stated, and the pool itself."""
    needed = ("kv_cache_gib", "gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs", "vllm_version")
    return has_architecture(row) and all(row.get(key) is not None for key in needed)
