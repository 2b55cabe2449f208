"""How a checkpoint's weights are quantised, from its `quantization_config` or `--quantization`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tuner.config_keys import Config
from tuner.model_arch import Quantisation


def quantisation_from_method(method: str) -> Quantisation | None:
    """Return what `--quantization METHOD` means for a checkpoint whose own file says nothing about it."""
    return _quantisation_of({"quant_method": method})


def quantisation_in(config: Config, text: Config) -> Quantisation | None:
    """Return how `config.json` says its weights are quantised; `None` where they are not."""
    for source in (config, text):
        for key in ("quantization_config", "compression_config"):
            if isinstance(source.get(key), Mapping):
                return _quantisation_of(source[key])
    return None


def _quantisation_of(raw: Config) -> Quantisation | None:
    producer = raw.get("producer")
    algorithm = str(raw.get("quant_algo") or "").lower()
    method = str(raw.get("quant_method") or "").lower().replace("_", "-")
    if not method and (algorithm or isinstance(producer, Mapping)):
        method = "modelopt-fp4" if "fp4" in algorithm else "modelopt"
    bits, experts_only = _bits(raw, method)
    if bits is None:
        return None
    ignored = " ".join(
        str(item) for key in ("ignore", "modules_to_not_convert", "exclude_modules") for item in raw.get(key) or ()
    )
    cache = raw.get("kv_cache_scheme") or raw.get("kv_cache_quant_algo")
    return Quantisation(
        method=method,
        linear_bits=None if experts_only else bits,
        expert_bits=bits,
        attention=not experts_only and "attn" not in ignored,
        kv_bits=8 if cache else None,
    )


def _bits(raw: Config, method: str) -> tuple[float | None, bool]:
    """Return bits a weight with scales, and whether only experts are quantised.

    Four-bit formats with a 16-bit scale and a 4-bit zero point a group of 128: 4 + 20/128. MXFP4: 8-bit scale for 32.
    NVFP4: 8-bit scale for 16. bitsandbytes: 4.25 with double-quantised scales, as its loaded sizes show.
    """
    if "mxfp4" in method:
        return 4.25, True
    if "fp4" in method:
        return 4.5, False
    if "bitsandbytes" in method:
        return (8.0 if raw.get("load_in_8bit") else 4.25), False
    if method == "compressed-tensors":
        return _compressed_bits(raw), False
    if method in ("awq", "gptq", "awq-marlin", "gptq-marlin", "moe-wna16", "auto-round", "inc", "hqq", "gguf"):
        width = raw.get("bits") or raw.get("w_bit") or 4
        group = raw.get("group_size") or raw.get("q_group_size") or 128
        return _grouped_bits(float(width), group), False
    if "fp8" in method or "int8" in method or method in ("modelopt", "fbgemm-fp8", "experts-int8", "w8a8"):
        return 8.0, method == "experts-int8"
    return None, False


def _compressed_bits(raw: Config) -> float | None:
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping):
        return 8.0
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("num_bits"):
            width = float(weights["num_bits"])
            return width if width >= 8 else _grouped_bits(width, weights.get("group_size") or 128)
    return None


def _grouped_bits(width: float, group: Any) -> float:
    size = float(group) if isinstance(group, int | float) and group > 0 else math.inf
    return width + (16 + width) / size
