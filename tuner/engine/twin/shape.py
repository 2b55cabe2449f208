"""`ModelShape`: the sizes of a decoder-only transformer that decide what one step costs, read from `config.json`.

Knows nothing of devices or vLLM. Covers dense and mixture-of-experts models with ordinary (grouped) attention.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import EngineUnsupportedError, UsageError

_EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_QUANTISED_WEIGHT_BYTES = {
    # Bytes a weight, scales included: 4-bit methods keep one 16-bit scale (and zero point) for each group of 128.
    "awq": 0.53,
    "gptq": 0.53,
    "bitsandbytes": 0.53,
    "mxfp4": 0.53,
    "fp8": 1.0,
    "compressed-tensors": 1.0,
}
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model as a whole, before tensor parallelism divides them.

    Parameters
    ----------
    experts, experts_per_token:
        0 for a dense model. `intermediate` is then the width of one expert.
    weight_bytes:
        Bytes a weight of the linear layers; the embedding and output head stay in `dtype_bytes`.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    dtype_bytes: int
    weight_bytes: float
    experts: int = 0
    experts_per_token: int = 0

    @property
    def attention_params(self) -> int:
        """Weights of one layer's query, key, value and output projections."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_params(self) -> int:
        """Weights of one gated MLP, or of one expert."""
        return 3 * self.hidden * self.intermediate

    @property
    def head_params(self) -> int:
        """Weights of the output head."""
        return self.hidden * self.vocab

    @property
    def active_params(self) -> int:
        """Weights that one token passes through, without embedding and output head."""
        return self.layers * (self.attention_params + self.mlp_params * max(1, self.experts_per_token))

    def kv_bytes_per_token(self, kv_dtype_bytes: int | None = None) -> int:
        """Bytes of keys and values of one token over all layers; the model's own dtype unless stated."""
        return 2 * self.layers * self.kv_heads * self.head_dim * (kv_dtype_bytes or self.dtype_bytes)


def read_model_config(folder: Path) -> dict[str, Any]:
    """Read `config.json` of a model's folder.

    Raises
    ------
    UsageError
        The file is missing or is not JSON.
    """
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(
            f"{path}: cannot be read as a model's config.json ({error}); name a folder that has one."
        ) from (error)
    return config


def model_shape(config: Mapping[str, Any], dtype: str = "auto", quantization: str | None = None) -> ModelShape:
    """Read the sizes from a model's `config.json`, with vLLM's `dtype` and `quantization` arguments applied.

    Raises
    ------
    EngineUnsupportedError
        The model's attention is of a kind that the cost model does not cover.
    """
    text: Mapping[str, Any] = config.get("text_config", config)
    if text.get("kv_lora_rank"):
        raise EngineUnsupportedError(
            f"The twin cannot predict {text.get('model_type', 'this model')}: latent attention (kv_lora_rank in "
            "config.json) is not in its cost model; use the vllm backend."
        )
    heads = int(text["num_attention_heads"])
    hidden = int(text["hidden_size"])
    experts = next((int(text[k]) for k in _EXPERT_COUNT_KEYS if text.get(k)), 0)
    return ModelShape(
        layers=int(text["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        intermediate=int((experts and text.get("moe_intermediate_size")) or text["intermediate_size"]),
        vocab=int(text["vocab_size"]),
        tied=bool(text.get("tie_word_embeddings", False)),
        dtype_bytes=_dtype_bytes(text, dtype),
        weight_bytes=_weight_bytes(config, text, dtype, quantization),
        experts=experts,
        experts_per_token=int(text.get("num_experts_per_tok") or 1) if experts else 0,
    )


def kv_dtype_bytes(kv_cache_dtype: str, shape: ModelShape) -> int:
    """Bytes of one stored key or value for vLLM's `kv_cache_dtype` argument."""
    if kv_cache_dtype.startswith("fp8"):
        return 1
    return DTYPE_BYTES.get(kv_cache_dtype, shape.dtype_bytes)


def _dtype_bytes(text: Mapping[str, Any], dtype: str) -> int:
    if dtype == "auto":
        return 2  # vLLM's "auto" is 16 bit for every checkpoint, float32 ones included
    return DTYPE_BYTES.get(dtype, 2)


def _weight_bytes(config: Mapping[str, Any], text: Mapping[str, Any], dtype: str, quantization: str | None) -> float:
    method = quantization or (config.get("quantization_config") or {}).get("quant_method")
    if method is None:
        return float(_dtype_bytes(text, dtype))
    return next((v for k, v in _QUANTISED_WEIGHT_BYTES.items() if str(method).startswith(k)), 1.0)
