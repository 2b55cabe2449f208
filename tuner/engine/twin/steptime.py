"""The time of one scheduler step: seconds of each component from shapes and peaks, times a coefficient each.

A component's seconds are a roofline over what the step really computes; its coefficient (dimensionless, 1 in the
catalogue) says how far the machine at hand is from that. Calibration fits coefficients, nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tuner.engine.twin.devices import EFFICIENCY, DeviceKind, DeviceSpec
from tuner.engine.twin.shape import ModelShape
from tuner.errors import StoreError

COMPONENTS = (
    "step",
    "eager",
    "linear",
    "token",
    "prefill_attention",
    "decode_attention",
    "request",
    "communication",
)
"""`step`: fixed cost of any step. `eager`: launches of layers that no graph replays, and traffic that a compiler would
have fused. `linear`: matrix products, their arithmetic and reading the weights. `token`: memory traffic of
activations. `prefill_attention`, `decode_attention`: attention of prompt chunks and of single tokens, its arithmetic
and reading keys and values. Where a device hides reading behind arithmetic (`Efficiency.overlaps`), the larger of the
two counts, otherwise both. `request`: host work and sampling a request. `communication`: all-reduces of tensor
parallelism."""

# Activation bytes that norms, rotary embedding, activation function and residuals move a token and layer, in units
# of (hidden + intermediate) values: each of about six element-wise passes reads and writes its operand once.
_ACTIVATION_PASSES = 6
# Logits are float32 and read and written about four times by the sampler (scale, softmax, top-k/p, draw).
_SAMPLER_BYTES_PER_LOGIT = 16


class StepLoad(NamedTuple):
    """What one step computes.

    Parameters
    ----------
    prefill_tokens:
        Prompt tokens computed, those recomputed after a preemption included.
    prefill_pairs:
        Query-key pairs of the prompt chunks: sum over chunks of q x (context before + (q + 1) / 2).
    prefill_context:
        Tokens whose keys and values the prompt chunks read: sum of context before + q.
    decodes:
        Requests that compute one token after their prompt.
    decode_context:
        Tokens whose keys and values they read.
    sampled:
        Requests that sample a token in this step.
    """

    prefill_tokens: int
    prefill_pairs: float
    prefill_context: int
    decodes: int
    decode_context: int
    sampled: int


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The engine arguments that change what a step costs without changing what is scheduled.

    Parameters
    ----------
    captured_tokens:
        Steps of at most this many tokens are replayed from a graph; 0 with `enforce_eager`.
    """

    tensor_parallel: int = 1
    kv_dtype_bytes: int = 2
    captured_tokens: int = 512


@dataclass(frozen=True, slots=True)
class Coefficients:
    """One factor a component, and how far predictions were from what was measured.

    Parameters
    ----------
    values:
        Component -> factor on the catalogue's seconds, >= 0. A component that is absent counts 1.
    ratio_interval:
        95% interval of measured over predicted time, from the residuals; `None` for an uncalibrated set.
    fitted:
        Components that data decided; the others are the catalogue's.
    key:
        What the set holds for: model, device, tensor parallel and the arguments that change kernels.
    steps:
        Number of measured steps behind the fit.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    ratio_interval: tuple[float, float] | None = None
    fitted: tuple[str, ...] = ()
    key: str = ""
    steps: int = 0

    def vector(self) -> tuple[float, ...]:
        """Return the factors in the order of `COMPONENTS`."""
        return tuple(float(self.values.get(name, 1.0)) for name in COMPONENTS)

    def scaled(self, speed: float) -> Coefficients:
        """Return the set for a machine on which everything takes `speed` times as long."""
        values = {name: v * speed for name, v in zip(COMPONENTS, self.vector(), strict=True)}
        return Coefficients(values, self.ratio_interval, self.fitted, self.key, self.steps)

    def document(self) -> dict[str, Any]:
        """Return the set as a JSON document."""
        return {
            "values": dict(self.values),
            "ratio_interval": None if self.ratio_interval is None else list(self.ratio_interval),
            "fitted": list(self.fitted),
            "key": self.key,
            "steps": self.steps,
        }

    @staticmethod
    def from_document(document: Any) -> Coefficients:
        """Read a set that `document` returned.

        Raises
        ------
        StoreError
            It is no such set, or names a component that this version does not know.
        """
        try:
            interval = document["ratio_interval"]
            values = {str(k): float(v) for k, v in document["values"].items()}
            read = Coefficients(
                values=values,
                ratio_interval=None if interval is None else (float(interval[0]), float(interval[1])),
                fitted=tuple(document["fitted"]),
                key=str(document["key"]),
                steps=int(document["steps"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise StoreError(f"These are not the twin's coefficients ({error}); calibrate again.") from error
        unknown = sorted(set(values) - set(COMPONENTS))
        if unknown:
            raise StoreError(
                f"The twin's coefficients name unknown components ({', '.join(unknown)}); calibrate again."
            )
        return read


class StepCost:
    """Seconds of a step for one model, device and choice of kernels. Callable: `StepLoad` -> seconds."""

    def __init__(
        self, shape: ModelShape, device: DeviceSpec, kernels: KernelChoice, coefficients: Coefficients | None = None
    ) -> None:
        self._eff = EFFICIENCY[device.kind]
        self._is_gpu = device.kind is DeviceKind.GPU
        self._kernels = kernels
        self._shape = shape
        tp = kernels.tensor_parallel
        fp8 = shape.weight_bytes == 1.0 and device.fp8_tflops is not None
        linear_flops = (device.fp8_tflops if fp8 and device.fp8_tflops else device.bf16_tflops) * 1e12
        flops = device.bf16_tflops * 1e12
        bandwidth = device.bandwidth_gb_s * 1e9
        eff = self._eff

        self._step_s = eff.step_s
        self._eager_s = eff.eager_layer_s * shape.layers
        self._request_s = eff.request_s + shape.vocab * _SAMPLER_BYTES_PER_LOGIT / (bandwidth * eff.linear_memory)
        self._weight_bytes_s = shape.weight_bytes / tp / (bandwidth * eff.linear_memory)
        self._head_bytes_s = shape.dtype_bytes / tp / (bandwidth * eff.linear_memory)
        self._token_flops_s = 2 * shape.active_params / tp / (linear_flops * eff.linear_compute)
        self._logits_flops_s = 2 * shape.head_params / tp / (flops * eff.linear_compute)
        passes = _ACTIVATION_PASSES * 2 * (shape.hidden + shape.intermediate / tp) * shape.dtype_bytes
        self._token_s = shape.layers * passes / (bandwidth * eff.linear_memory)
        self._eager_token_s = eff.eager_traffic * self._token_s
        heads = shape.heads / tp
        self._pair_s = 4 * shape.layers * heads * shape.head_dim / (flops * eff.attention_compute)
        kv_share = max(1.0, shape.kv_heads / tp) / shape.kv_heads
        kv_bytes = shape.kv_bytes_per_token(kernels.kv_dtype_bytes) * kv_share
        self._context_s = kv_bytes / (bandwidth * eff.attention_memory)
        ring = 2 * (tp - 1) / tp
        self._reduce_token_s = 2 * shape.layers * ring * shape.hidden * shape.dtype_bytes / (device.link_gb_s * 1e9)
        self._reduce_s = 2 * shape.layers * device.link_latency_s if tp > 1 else 0.0
        self._together: Callable[[float, float], float] = max if eff.overlaps else operator.add
        self._dense_params = shape.layers * shape.attention_params
        self._expert_params = shape.layers * shape.mlp_params
        self._vector = (coefficients or Coefficients()).vector()

    def __call__(self, load: StepLoad) -> float:
        """Seconds of this step."""
        total = 0.0
        for factor, seconds in zip(self._vector, self.components(load), strict=True):
            total += factor * seconds
        return total

    def components(self, load: StepLoad) -> tuple[float, ...]:
        """Return the catalogue's seconds of each component, in the order of `COMPONENTS`."""
        tokens = load.prefill_tokens + load.decodes
        captured = tokens <= self._kernels.captured_tokens
        weights_s = self._params_read(tokens) * self._weight_bytes_s + self._shape.head_params * self._head_bytes_s
        arithmetic_s = tokens * self._token_flops_s + load.sampled * self._logits_flops_s
        return (
            self._step_s,
            0.0 if captured else self._eager_s + tokens * self._eager_token_s,
            self._together(weights_s, arithmetic_s),
            tokens * self._token_s,
            self._together(load.prefill_context * self._context_s, load.prefill_pairs * self._pair_s),
            self._together(load.decode_context * self._context_s, load.decode_context * self._pair_s),
            (load.decodes + load.sampled) / 2 * self._request_s,
            self._reduce_s + tokens * self._reduce_token_s if self._reduce_s else 0.0,
        )

    def _params_read(self, tokens: int) -> float:
        """Weights that this many tokens touch: every dense one, and the experts that at least one token is sent to."""
        shape = self._shape
        if not shape.experts:
            return self._dense_params + self._expert_params
        untouched = (1 - shape.experts_per_token / shape.experts) ** tokens
        return self._dense_params + self._expert_params * shape.experts * (1 - untouched)
