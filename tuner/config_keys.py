"""Reads keys of a model's `config.json`, which has many spellings for the same thing and nests them in places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tuner.errors import UsageError

Config = Mapping[str, Any]

_NO_LIMIT = 1e12  # some files say 1e30 where they mean that there is no limit

_ALIASES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num", "num_attention_groups"),
    "intermediate": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff"),
    "vocabulary": ("padded_vocab_size", "vocab_size"),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim", "hidden_size_per_head"),
    "experts": ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts"),
    "expert_width": ("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "shared_width": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k"),
    "max_positions": (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "seq_length",
        "model_max_length",
        "max_sequence_length",
    ),
}

_TEXT_KEYS = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config")

# What the published configuration classes assume when the file leaves a key out (transformers, read 2026-11).
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
    },
    "mistral": {"num_key_value_heads": 8, "vocab_size": 32000},
    "gemma": {"head_dim": 256, "vocab_size": 256000},
    "gemma2": {"head_dim": 256, "vocab_size": 256000, "sliding_window": 4096},
    "gemma3": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    "gpt_oss": {"head_dim": 64, "sliding_window": 128},
    "cohere2": {"sliding_window": 4096},
}


def text_config(config: Config) -> Config:
    """Return the part that describes the language model, with its family's defaults filled in."""
    nested = next((config[key] for key in _TEXT_KEYS if isinstance(config.get(key), Mapping)), None)
    if nested is None:
        text: dict[str, Any] = dict(config)
    elif any(isinstance(nested.get(key), Mapping) for key in _TEXT_KEYS):
        return text_config(nested)
    else:
        text = {key: config[key] for key in ("vocab_size",) if key in config} | dict(nested)
    family = str(text.get("model_type") or "").removesuffix("_text")
    defaults = _FAMILY_DEFAULTS.get(family, {})
    return defaults | {key: value for key, value in text.items() if value is not None}


def _first(config: Config, name: str) -> Any:
    return next((config[key] for key in _ALIASES[name] if config.get(key) is not None), None)


def first_int(config: Config, name: str) -> int | None:
    """Return the whole number under any spelling of `name` (the largest of a list); `None` where there is none."""
    value = _first(config, name)
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        value = max(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _NO_LIMIT:
        return None
    return int(value)


def required(config: Config, name: str) -> int:
    """Return the positive number under any spelling of `name`, or raise `UsageError`."""
    value = first_int(config, name)
    if value is None or value <= 0:
        raise UsageError(
            f"config.json: {_ALIASES[name][0]}: missing or not a positive number; "
            "memory cannot be predicted without it, so pass the model's complete config.json."
        )
    return value
