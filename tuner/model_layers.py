"""The layers of a model: which kind of attention each has, how large its matrices are, and its feed-forward part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuner.config_keys import Config, first_int, required
from tuner.model_arch import Attention, AttentionKind, FeedForward

_UNGATED_FAMILIES = (
    "phi", "gpt2", "opt", "gpt_neox", "gptj", "falcon", "bloom", "mpt", "gpt_bigcode", "starcoder2", "nemotron",
)  # fmt: skip
_TYPE_NAMES = {
    "full_attention": AttentionKind.FULL,
    "attention": AttentionKind.FULL,
    "global": AttentionKind.FULL,
    "hybrid": AttentionKind.FULL,
    "sliding_attention": AttentionKind.SLIDING,
    "sliding_window": AttentionKind.SLIDING,
    "local": AttentionKind.SLIDING,
    "chunked_attention": AttentionKind.CHUNKED,
    "linear_attention": AttentionKind.STATE,
    "mamba": AttentionKind.STATE,
    "mamba2": AttentionKind.STATE,
    "conv": AttentionKind.STATE,
    "recurrent": AttentionKind.STATE,
    "mlp": AttentionKind.NONE,
    "moe": AttentionKind.NONE,
}
_STATE_MODELS = ("mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv5", "rwkv6")
# One letter a layer in Nemotron-H's `hybrid_override_pattern`.
_PATTERN_LETTERS = {"M": AttentionKind.STATE, "*": AttentionKind.FULL, "-": AttentionKind.NONE, "E": AttentionKind.NONE}
_LATENT_ROPE_DIM, _LATENT_NOPE_DIM, _LATENT_VALUE_DIM = 64, 128, 128  # DeepSeek V2 and V3, where the file is silent


def mixers_of(text: Config, model_type: str, count: int, hidden: int, heads: int) -> list[Attention]:
    """Return the token mixer of every layer."""
    kinds = _kinds(text, model_type, count)
    without_cache = int(text.get("num_kv_shared_layers") or 0)
    mixers = []
    for index, (kind, window) in enumerate(kinds):
        if kind is AttentionKind.STATE:
            mixers.append(_state_mixer(text, hidden))
        elif kind is AttentionKind.NONE:
            mixers.append(Attention(kind, 0, 0, 0, 0))
        elif heads <= 0:
            required(text, "heads")
        elif text.get("kv_lora_rank"):
            mixers.append(_latent_mixer(text, hidden, heads))
        else:
            shared = index >= count - without_cache
            stored = AttentionKind.NONE if shared else kind
            mixers.append(
                _plain_mixer(text, model_type, hidden, heads, stored, window, full=kind is AttentionKind.FULL)
            )
    return mixers


def feed_forwards(text: Config, model_type: str, count: int, hidden: int) -> list[FeedForward]:
    """Return the feed-forward part of every layer."""
    gated = not (model_type in _UNGATED_FAMILIES or model_type.startswith("nemotron"))
    width = first_int(text, "intermediate")
    if width is None:
        width = 0 if model_type.startswith(_STATE_MODELS) else 4 * hidden
    nested = text.get("ffn_config")
    source = {**text, **nested} if isinstance(nested, Mapping) else text
    experts = first_int(source, "experts") or 0
    dense = FeedForward(width=width, gated=gated)
    letters = text.get("hybrid_override_pattern")
    letters = letters if isinstance(letters, str) and len(letters) == count else ""
    if experts <= 1:
        return _by_letter(letters, dense, dense) if letters else [dense] * count
    expert_width = first_int(source, "expert_width") or width
    shared = (first_int(text, "shared_width") or 0) + (first_int(text, "shared_experts") or 0) * expert_width
    if model_type.startswith("llama4"):
        expert_width, shared = width, width
        dense = FeedForward(width=int(text.get("intermediate_size_mlp") or width))
    sparse = FeedForward(
        width=shared,
        gated=gated,
        experts=experts,
        top_k=first_int(source, "top_k") or 1,
        expert_width=expert_width,
    )
    if letters:
        return _by_letter(letters, dense, sparse)
    return [sparse if _is_sparse(text, index) else dense for index in range(count)]


def _head_dim(text: Config, hidden: int, heads: int) -> int:
    explicit = first_int(text, "head_dim")
    return explicit if explicit else hidden // heads


def _kv_heads(text: Config, model_type: str, heads: int) -> int:
    if model_type in ("falcon", "RefinedWeb", "RefinedWebModel", "gpt_bigcode") and not text.get(
        "new_decoder_architecture"
    ):
        return 1 if text.get("multi_query", True) else heads
    nested = text.get("attn_config")
    if isinstance(nested, Mapping) and isinstance(nested.get("kv_n_heads"), int):
        return int(nested["kv_n_heads"])
    return first_int(text, "kv_heads") or heads


def _plain_mixer(
    text: Config, model_type: str, hidden: int, heads: int, kind: AttentionKind, window: int, *, full: bool
) -> Attention:
    head_dim = _head_dim(text, hidden, heads)
    kv_heads = _kv_heads(text, model_type, heads)
    if full:  # Gemma 4 gives its global layers wider and fewer heads
        head_dim = int(text.get("global_head_dim") or head_dim)
        kv_heads = int(text.get("num_global_key_value_heads") or kv_heads)
    value_dim = int(text.get("v_head_dim") or head_dim)
    gate = 2 if text.get("attn_output_gate") else 1
    return Attention(
        kind=kind,
        heads=heads,
        kv_heads=kv_heads,
        key_dim=head_dim,
        value_dim=value_dim,
        window=window,
        matrices=(hidden * heads * head_dim * gate, heads * value_dim * hidden),
        kv_matrix=hidden * kv_heads * (head_dim + value_dim),
    )


def _latent_mixer(text: Config, hidden: int, heads: int) -> Attention:
    rank = int(text["kv_lora_rank"])
    rope = int(text.get("qk_rope_head_dim") or _LATENT_ROPE_DIM)
    nope = int(text.get("qk_nope_head_dim") or _LATENT_NOPE_DIM)
    value = int(text.get("v_head_dim") or _LATENT_VALUE_DIM)
    query_rank = int(text.get("q_lora_rank") or 0)
    query = (query_rank or hidden) * heads * (nope + rope)
    return Attention(
        kind=AttentionKind.LATENT,
        heads=heads,
        kv_heads=1,
        key_dim=rank + rope,
        value_dim=0,
        matrices=(query, rank * heads * (nope + value), heads * value * hidden),
        replicated=hidden * (query_rank + rank + rope),
        expanded=heads * (nope + value),
    )


def _state_mixer(text: Config, hidden: int) -> Attention:
    """Mamba 2, Mamba 1, gated delta net or short convolution, by the keys that are there. Approximate on purpose."""
    kernel = int(text.get("mamba_d_conv") or text.get("linear_conv_kernel_dim") or text.get("conv_kernel") or 4)
    if text.get("linear_num_value_heads"):
        key_width = int(text["linear_num_key_heads"]) * int(text["linear_key_head_dim"])
        value_width = int(text["linear_num_value_heads"]) * int(text["linear_value_head_dim"])
        state = value_width * int(text["linear_key_head_dim"]) + (2 * key_width + value_width) * (kernel - 1)
        return _state(hidden * (2 * key_width + 2 * value_width), value_width * hidden, state)
    size = int(text.get("mamba_d_state") or text.get("ssm_state_size") or text.get("state_size") or 16)
    heads = int(text.get("mamba_n_heads") or text.get("mamba_num_heads") or text.get("num_heads") or 0)
    per_head = text.get("mamba_d_head") or text.get("mamba_head_dim") or text.get("head_dim")
    expand = text.get("mamba_expand") or text.get("expand") or 2
    width = heads * int(per_head) if heads and isinstance(per_head, int) else int(hidden * float(expand))
    groups = int(text.get("mamba_n_groups") or text.get("n_groups") or 1) if heads else 0
    state = width * size + (width + 2 * groups * size) * (kernel - 1)
    return _state(hidden * (2 * width + 2 * groups * size + heads), width * hidden, state)


def _state(into: int, out: int, elements: int) -> Attention:
    return Attention(AttentionKind.STATE, 0, 0, 0, 0, matrices=(into, out), state_elements=elements)


def _kinds(text: Config, model_type: str, count: int) -> list[tuple[AttentionKind, int]]:
    window = text.get("sliding_window")
    window = int(window) if isinstance(window, int) and not isinstance(window, bool) and window > 0 else 0
    chunk = int(text.get("attention_chunk_size") or 0)
    kinds = _listed_kinds(text, count) or _patterned_kinds(text, model_type, count, window, chunk)
    sizes = {AttentionKind.SLIDING: window, AttentionKind.CHUNKED: chunk}
    resolved = []
    for kind in kinds:
        size = sizes.get(kind, 0)
        local = kind in sizes
        resolved.append((AttentionKind.FULL, 0) if local and not size else (kind, size))
    return resolved


def _listed_kinds(text: Config, count: int) -> list[AttentionKind] | None:
    for key in ("layer_types", "layers_block_type", "block_types"):
        names = text.get(key)
        if isinstance(names, Sequence) and not isinstance(names, str) and names:
            known = [_TYPE_NAMES.get(str(name), AttentionKind.FULL) for name in names]
            return [known[i % len(known)] for i in range(count)]
    letters = text.get("hybrid_override_pattern")
    if isinstance(letters, str) and len(letters) == count:
        return [_PATTERN_LETTERS.get(letter, AttentionKind.FULL) for letter in letters]
    flags = text.get("attn_type_list")
    if isinstance(flags, Sequence) and len(flags) == count:
        return [AttentionKind.FULL if flag else AttentionKind.STATE for flag in flags]
    return None


def _patterned_kinds(text: Config, model_type: str, count: int, window: int, chunk: int) -> list[AttentionKind]:
    full, sliding, state = AttentionKind.FULL, AttentionKind.SLIDING, AttentionKind.STATE
    every = text.get("full_attention_interval")
    linear = text.get("linear_attn_config")
    if model_type.startswith(_STATE_MODELS) and not text.get("num_attention_heads"):
        return [state] * count
    if text.get("attn_layer_period"):  # Jamba
        period, offset = int(text["attn_layer_period"]), int(text.get("attn_layer_offset") or 0)
        return [full if i % period == offset else state for i in range(count)]
    if isinstance(text.get("attn_layer_indices"), Sequence):  # Bamba
        return [full if i in text["attn_layer_indices"] else state for i in range(count)]
    if isinstance(linear, Mapping) and linear.get("full_attn_layers"):  # Kimi Linear counts layers from 1
        return [full if i + 1 in linear["full_attn_layers"] else state for i in range(count)]
    if isinstance(every, int) and every > 0 and text.get("linear_num_value_heads"):  # Qwen3-Next
        return [full if (i + 1) % every == 0 else state for i in range(count)]
    pattern = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern")
    if model_type.startswith("gemma2") or model_type == "gpt_oss":
        return [sliding if i % 2 == 0 else full for i in range(count)]
    if model_type.startswith(("gemma3", "cohere2")) or isinstance(pattern, int):
        period = pattern if isinstance(pattern, int) and pattern > 0 else (4 if model_type == "cohere2" else 6)
        return [full if (i + 1) % period == 0 else sliding for i in range(count)]
    if model_type.startswith("llama4") and chunk:
        return [full if (i + 1) % 4 == 0 else AttentionKind.CHUNKED for i in range(count)]
    if window and text.get("use_sliding_window") is not False:
        first = int(text.get("max_window_layers") or 0) if model_type.startswith("qwen") else 0
        return [sliding if i >= first else full for i in range(count)]
    return [full] * count


def _by_letter(letters: str, dense: FeedForward, sparse: FeedForward) -> list[FeedForward]:
    """Nemotron-H: a layer is a mixer, a dense part or experts, never two of them."""
    nothing = FeedForward(width=0, gated=dense.gated)
    return [{"-": dense, "E": sparse}.get(letter, nothing) for letter in letters]


def _is_sparse(text: Config, index: int) -> bool:
    if index < int(text.get("first_k_dense_replace") or 0):
        return False
    if index in (text.get("mlp_only_layers") or ()):
        return False
    if index < int(text.get("moe_layer_start_index") or 0):  # ERNIE 4.5
        return False
    listed = text.get("moe_layers")
    if isinstance(listed, Sequence) and not isinstance(listed, str):
        return index in listed
    step = text.get("decoder_sparse_step") or text.get("interleave_moe_layer_step") or text.get("moe_layer_freq")
    if isinstance(step, int) and not isinstance(step, bool) and step > 1:
        return (index + 1) % step == 0
    period = text.get("expert_layer_period")
    if isinstance(period, int) and period > 1:
        return index % period == int(text.get("expert_layer_offset") or 0)
    return True
