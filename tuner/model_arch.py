"""A model's architecture as far as memory goes: layers, heads, experts, windows, states, quantisation.

`tuner.model_config.read_arch` makes one from a `config.json`. Knows nothing of engines, devices or versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}


class AttentionKind(StrEnum):
    """How a layer remembers the past, which decides what its cache costs."""

    FULL = "full"
    """Keys and values of every token."""
    SLIDING = "sliding"
    """Keys and values of the last `window` tokens."""
    CHUNKED = "chunked"
    """Keys and values of the current chunk of `window` tokens (Llama 4)."""
    LATENT = "latent"
    """One compressed vector a token, shared by all heads and replicated over tensor-parallel ranks (MLA)."""
    STATE = "state"
    """A state of fixed size a request (Mamba, linear attention, short convolution)."""
    NONE = "none"
    """Stores nothing: reuses another layer's cache, or has no attention."""


@dataclass(frozen=True, slots=True)
class Attention:
    """The token mixer of one layer.

    Parameters
    ----------
    key_dim, value_dim:
        Elements of one head's key and value; for `LATENT`, `key_dim` is the whole cached vector and `value_dim` 0.
    window:
        Tokens, for `SLIDING` and `CHUNKED`; 0 otherwise.
    matrices:
        Weight matrices that tensor parallelism divides, in elements; keys and values are apart as `kv_matrix`, since
        they stop dividing at one head a rank.
    replicated:
        Elements of the matrices that every rank holds whole (MLA's down-projections).
    expanded:
        Elements a token after MLA's up-projection, over all heads; 0 without one.
    state_elements:
        Elements of a `STATE` layer's state of one request.
    """

    kind: AttentionKind
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0
    matrices: tuple[int, ...] = ()
    kv_matrix: int = 0
    replicated: int = 0
    expanded: int = 0
    state_elements: int = 0


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The feed-forward part of one layer: a dense one of `width`, or experts (and then perhaps shared ones)."""

    width: int
    gated: bool = True
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0

    @property
    def projections(self) -> int:
        """Matrices of hidden × width: gate, up and down, or up and down."""
        return 3 if self.gated else 2


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    attention: Attention
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Bits a weight, scales and zero points included. Embeddings and the output head stay in the model's dtype.

    Parameters
    ----------
    linear_bits, expert_bits:
        Bits for an element of a linear layer and of an expert; `None` leaves it in the model's dtype.
    attention:
        Whether the attention's matrices are quantised too.
    kv_bits:
        Bits of a KV-cache element where the checkpoint carries scales for a quantised cache; else `None`.
    """

    method: str
    linear_bits: float | None = None
    expert_bits: float | None = None
    attention: bool = True
    kv_bits: float | None = None


@dataclass(frozen=True, slots=True)
class Vision:
    """The vision tower, as far as memory goes.

    `pixels_per_token` is input elements for one token that the language model sees; `patches_per_token` how many
    patches the tower works on for it.
    """

    parameters: int
    hidden: int
    width: int
    pixels_per_token: float
    patches_per_token: float


@dataclass(frozen=True, slots=True)
class ModelArch:
    """Everything in `config.json` that decides memory. Sizes in elements or tokens.

    Parameters
    ----------
    max_positions:
        Longest sequence the model was made for; `None` where the file does not say.
    rotary_elements:
        Elements of the table of rotary embeddings that the model keeps on the device.
    index_dim:
        Width of the sparse-attention indexer's cache a token (DeepSeek V3.2), 0 without one.
    layer_embedding:
        Elements of the embeddings that each layer has of its own (Gemma 3n), 0 without them.
    """

    model_type: str
    hidden: int
    vocabulary: int
    tied: bool
    dtype_bytes: int
    layers: tuple[Layer, ...]
    quantisation: Quantisation | None
    vision: Vision | None
    max_positions: int | None
    rotary_elements: int
    index_dim: int = 0
    layer_embedding: int = 0

    @property
    def is_mixture(self) -> bool:
        """Whether any layer has experts."""
        return any(layer.feed_forward.experts for layer in self.layers)
