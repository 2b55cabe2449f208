"""Reads a model's `config.json` into a `ModelArch`."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.config_keys import Config, first_int, required, text_config
from tuner.errors import UsageError
from tuner.model_arch import DTYPE_BYTES, AttentionKind, Layer, ModelArch, Vision
from tuner.model_layers import feed_forwards, mixers_of
from tuner.model_quantisation import quantisation_in
from tuner.model_weights import parameters

_TIED_FAMILIES = ("gemma", "cohere", "gpt2", "opt", "falcon", "bloom", "mpt", "gpt_bigcode", "starcoder2")
_MOST_LAYERS = 2000
_MOST_PARAMETERS = 1e15


def read_arch(config_json: Config) -> ModelArch:
    """Read a model's `config.json`.

    Parameters
    ----------
    config_json:
        The file as a dict; a multimodal model's nested text configuration is found.

    Returns
    -------
    ModelArch

    Raises
    ------
    UsageError
        A number without which nothing can be said is missing (layers, hidden size, heads, vocabulary), or a value has
        a form that no model uses.
    """
    if not isinstance(config_json, Mapping):
        raise UsageError("config.json: the top level must be an object; pass the model's config.json as a dict.")
    try:
        arch = _read(config_json)
        size = parameters(arch)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise UsageError(
            f"config.json: a value has a form that no known model uses ({error}); pass the model's own file."
        ) from error
    if not 0 < size < _MOST_PARAMETERS:
        raise UsageError(f"config.json: {size:.3g} parameters is no model's size; pass the model's own file.")
    return arch


def _read(config_json: Config) -> ModelArch:
    text = text_config(config_json)
    model_type = str(text.get("model_type") or config_json.get("model_type") or "")
    hidden = required(text, "hidden")
    count = required(text, "layers")
    if count > _MOST_LAYERS:
        raise UsageError(f"config.json: num_hidden_layers: {count} is no model's; pass the model's own file.")
    heads = first_int(text, "heads") or 0
    mixers = mixers_of(text, model_type, count, hidden, heads)
    head_dim = next((m.key_dim for m in mixers if m.kind is not AttentionKind.STATE and m.key_dim), 0)
    positions = first_int(text, "max_positions")
    latent_rope = int(text.get("qk_rope_head_dim") or 0)
    rotates = any(mixer.kind is not AttentionKind.STATE for mixer in mixers)
    return ModelArch(
        model_type=model_type,
        hidden=hidden,
        vocabulary=required(text, "vocabulary"),
        tied=_is_tied(config_json, text, model_type),
        dtype_bytes=_dtype_bytes(config_json, text),
        layers=tuple(
            Layer(mixer, feed_forward)
            for mixer, feed_forward in zip(mixers, feed_forwards(text, model_type, count, hidden), strict=True)
        ),
        quantisation=quantisation_in(config_json, text),
        vision=_vision(config_json),
        max_positions=positions,
        rotary_elements=(positions or 0) * (latent_rope or head_dim) if rotates else 0,
        layer_embedding=int(text.get("hidden_size_per_layer_input") or 0)
        * int(text.get("vocab_size_per_layer_input") or 0)
        * count,
        index_dim=int(text.get("index_head_dim") or 0) if text.get("index_topk") else 0,
    )


def _is_tied(config: Config, text: Config, model_type: str) -> bool:
    for source in (config, text):
        if isinstance(source.get("tie_word_embeddings"), bool):
            return bool(source["tie_word_embeddings"])
    return model_type.startswith(_TIED_FAMILIES)


def _dtype_bytes(config: Config, text: Config) -> int:
    for source in (config, text):
        name = str(source.get("torch_dtype") or source.get("dtype") or "").removeprefix("torch.")
        if name in DTYPE_BYTES:
            # vLLM serves a float32 checkpoint in 16 bits unless it is told otherwise.
            return min(DTYPE_BYTES[name], 2)
    return 2


def _vision(config: Config) -> Vision | None:
    raw = config.get("vision_config")
    if not isinstance(raw, Mapping):
        return None
    hidden = int(raw.get("hidden_size") or raw.get("embed_dim") or raw.get("width") or 1024)
    depth = int(raw.get("num_hidden_layers") or raw.get("depth") or raw.get("layers") or 24)
    width = int(raw.get("intermediate_size") or hidden * float(raw.get("mlp_ratio") or 4))
    patch = raw.get("patch_size")
    patch = int(patch) if isinstance(patch, int) and patch > 0 else 14
    merge = int(raw.get("spatial_merge_size") or config.get("spatial_merge_size") or 1)
    image = raw.get("image_size")
    tokens = config.get("mm_tokens_per_image")
    if isinstance(image, int) and image > 0 and isinstance(tokens, int) and tokens > 0:
        pixels, patches = 3 * image**2 / tokens, (image // patch) ** 2 / tokens
    else:
        pixels, patches = 3.0 * (patch * merge) ** 2, float(merge**2)
    return Vision(
        parameters=depth * (4 * hidden**2 + (3 if raw.get("hidden_act") == "silu" else 2) * hidden * width),
        hidden=hidden,
        width=width,
        pixels_per_token=pixels,
        patches_per_token=patches,
    )
