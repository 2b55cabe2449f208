"""Predicted memory of one configuration on one device: does it fit, with what headroom, and how sure is that.

    KV pool = utilisation × total − weights − activation peak − non-torch (− graph estimate from vLLM 0.21)

Pure logic on a model's `config.json` and engine arguments; starts nothing and imports no vLLM. Estimated numbers carry
an interval, and what earlier trials measured on this model and machine replaces the estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuner import memory_terms as terms
from tuner.engine_settings import GIB, Device, EngineSettings, Usage, parse_version, resolve_settings
from tuner.errors import UsageError
from tuner.kv_cache import CachePlan, plan_cache
from tuner.memory_parts import MeasuredMemory, Parts, correct_parts, estimate_parts, layout_of
from tuner.memory_terms import Estimate
from tuner.model_arch import ModelArch
from tuner.model_config import read_arch
from tuner.model_weights import Stage, stages_of

__all__ = ["MeasuredMemory", "MemoryPrediction", "as_document", "predict"]


@dataclass(frozen=True, slots=True)
class MemoryPrediction:
    """Memory of the tightest device, in GiB unless a name says otherwise.

    Parameters
    ----------
    violation:
        (needed − available) / available: at most 0 fits. The larger of two: KV cache for one request of
        `max_model_len` within the budget, and everything that lives after start-up within the device.
    violation_interval:
        Its favourable and its unfavourable end; refuse only what is above 0 at the first.
    kv_tokens, kv_tokens_needed:
        Tokens that the pool holds, and that it must hold for one request of `max_model_len`.
    longest_fitting_tokens:
        Longest request the pool holds, up to the longest the model or the arguments allow.
    intervals:
        (low, high) of every number that is not exact.
    exact:
        Names of the numbers that are known, not estimated.
    measured:
        Names of the numbers taken over from earlier trials.
    graphs_charged:
        Whether the graphs are taken off the KV pool (else they need what `gpu_memory_utilization` leaves free).
    """

    total_gib: float
    budget_gib: float
    weights_gib: float
    activation_gib: float
    non_torch_gib: float
    graphs_gib: float
    kv_gib: float
    kv_tokens: int
    kv_tokens_needed: int
    kv_bytes_per_token: float
    longest_fitting_tokens: int
    fits: bool
    violation: float
    violation_interval: tuple[float, float]
    intervals: Mapping[str, tuple[float, float]]
    exact: frozenset[str]
    measured: frozenset[str]
    graphs_charged: bool


def predict(
    config_json: dict[str, Any],
    engine_args: dict[str, Any],
    gpu_total_gib: float,
    vllm_version: str,
    *,
    weight_bytes: int | None = None,
    measured: Sequence[MeasuredMemory] | MeasuredMemory | None = None,
    device: Device = "cuda",
    usage: Usage = "api_server",
    gpu_name: str = "",
) -> MemoryPrediction:
    """Predict the memory of one configuration.

    Parameters
    ----------
    config_json:
        The model's `config.json`.
    engine_args:
        Engine arguments by vLLM's names; missing ones take the defaults of that version. `env.NAME` keys are
        environment variables.
    gpu_total_gib:
        Memory of one device as the driver reports it, in GiB; RAM of one NUMA node for `device="cpu"`.
    vllm_version:
        Such as `0.22.0`.
    weight_bytes:
        Exact bytes of the checkpoint's tensors, where it is at hand (`tuner.model_weights.checkpoint_bytes`).
    measured:
        Earlier trials on this model and machine; taken over where their layout (TP, PP, EP, dtype) is the same.
    usage:
        Who builds the engine; vLLM's default batch sizes depend on it.
    gpu_name:
        Name of the device, where known; it decides vLLM's default batch sizes on an A100.

    Returns
    -------
    MemoryPrediction
        For the device with the least room, if pipeline stages differ.

    Raises
    ------
    UsageError
        Something essential is missing from `config.json`, or an argument is not usable.
    """
    if not math.isfinite(gpu_total_gib) or gpu_total_gib <= 0:
        raise UsageError(f"device memory: {gpu_total_gib} GiB is not above 0; pass what the driver reports as total.")
    arch = read_arch(config_json)
    version = parse_version(vllm_version)

    def settings_of(args: Mapping[str, Any]) -> EngineSettings:
        return resolve_settings(arch, args, gpu_total_gib, version, device=device, usage=usage, gpu_name=gpu_name)

    settings = settings_of(engine_args)
    if settings.pipeline_parallel > len(arch.layers):
        raise UsageError(
            f"engine arguments: pipeline_parallel_size: {settings.pipeline_parallel} stages for {len(arch.layers)} "
            "layers; lower it."
        )
    trials = [measured] if isinstance(measured, MeasuredMemory) else list(measured or ())
    resolved = [(trial, settings_of(trial.engine_args)) for trial in trials]
    alike = [(trial, other) for trial, other in resolved if layout_of(other) == layout_of(settings)]
    predictions = [
        _predict_stage(arch, stage, settings, gpu_total_gib, weight_bytes, alike)
        for stage in stages_of(arch, settings.pipeline_parallel)
    ]
    return _tightest(predictions)


def as_document(prediction: MemoryPrediction) -> dict[str, Any]:
    """Return the document that `tuner memory --json` prints; `basis` says for each number how it is known."""
    basis: dict[str, Any] = {}
    for name in ("weights", "activation", "non_torch", "graphs", "kv"):
        field = f"{name}_gib"
        how = "exact" if field in prediction.exact else "measured" if field in prediction.measured else "estimated"
        basis[name] = {"known": how, "interval": [round(end, 3) for end in prediction.intervals[field]]}
    return {
        "fits": prediction.fits,
        "violation": round(prediction.violation, 6),
        "per_gpu_gib": {
            "total": round(prediction.total_gib, 3),
            "budget": round(prediction.budget_gib, 3),
            "weights": round(prediction.weights_gib, 3),
            "activation": round(prediction.activation_gib, 3),
            "non_torch": round(prediction.non_torch_gib, 3),
            "graphs": round(prediction.graphs_gib, 3),
            "kv": round(prediction.kv_gib, 3),
        },
        "kv_tokens": prediction.kv_tokens,
        "kv_tokens_needed": prediction.kv_tokens_needed,
        "basis": basis,
    }


def _tightest(stages: Sequence[MemoryPrediction]) -> MemoryPrediction:
    """Return the stage with the fewest tokens, which vLLM cuts all others down to, with the worst violation of all."""
    worst = max(stages, key=lambda stage: stage.violation)
    return replace(
        min(stages, key=lambda stage: (stage.kv_tokens, stage.kv_gib)),
        fits=worst.fits,
        violation=worst.violation,
        violation_interval=(
            max(stage.violation_interval[0] for stage in stages),
            max(stage.violation_interval[1] for stage in stages),
        ),
    )


def _predict_stage(
    arch: ModelArch,
    stage: Stage,
    settings: EngineSettings,
    total_gib: float,
    weight_bytes: int | None,
    alike: Sequence[tuple[MeasuredMemory, EngineSettings]],
) -> MemoryPrediction:
    estimated = estimate_parts(arch, stage, settings, total_gib, weight_bytes)
    parts, measured = correct_parts(arch, stage, settings, total_gib, estimated, alike)
    plan = plan_cache(arch, stage, settings)
    budget = settings.utilisation * total_gib
    pool = _pool(parts, settings, plan, budget)
    violation, ends = _violation(parts, settings, plan, total_gib, budget, pool)
    limit = max(settings.max_model_len, arch.max_positions or 0)
    exact = {"total_gib", "budget_gib", "kv_tokens_needed"} | ({"kv_bytes_per_token"} if plan.exact else set())
    if pool.low == pool.high:
        exact.add("kv_gib")
    return MemoryPrediction(
        total_gib=total_gib,
        budget_gib=budget,
        weights_gib=parts.weights.value,
        activation_gib=parts.activation.value,
        non_torch_gib=parts.non_torch.value,
        graphs_gib=parts.graphs.value,
        kv_gib=pool.value,
        kv_tokens=plan.tokens_in(pool.value * GIB, settings.max_model_len),
        kv_tokens_needed=settings.max_model_len if plan.groups else 0,
        kv_bytes_per_token=plan.token_bytes,
        longest_fitting_tokens=plan.longest_in(max(pool.value, 0.0) * GIB, limit),
        fits=violation <= 0,
        violation=violation,
        violation_interval=ends,
        intervals=_intervals(parts, pool, plan, settings),
        exact=frozenset(exact),
        measured=measured,
        graphs_charged=settings.charges_graphs,
    )


def _pool(parts: Parts, settings: EngineSettings, plan: CachePlan, budget: float) -> Estimate:
    if settings.blocks_override is not None and plan.block_bytes:
        size = settings.blocks_override * plan.block_bytes / GIB
        return Estimate(size, size, size)
    if settings.kv_pool_bytes is not None:
        size = settings.kv_pool_bytes / GIB
        return Estimate(size, size, size)
    charged = parts.charged(settings)
    value = budget - sum(part.value for part in charged)
    return Estimate(value, value - _spread(charged, "high"), value + _spread(charged, "low"))


def _spread(parts: Sequence[Estimate], end: str) -> float:
    """Independent errors add as squares."""
    return math.sqrt(sum((getattr(part, end) - part.value) ** 2 for part in parts))


def _violation(
    parts: Parts, settings: EngineSettings, plan: CachePlan, total_gib: float, budget: float, pool: Estimate
) -> tuple[float, tuple[float, float]]:
    needed_kv = plan.bytes_for(settings.max_model_len) / GIB
    within_pool = Estimate(*((needed_kv - kv) / budget for kv in (pool.value, pool.high, pool.low)))
    on_device = _device_violation(parts, settings, total_gib, pool)
    ends = max(within_pool.low, on_device.low), max(within_pool.high, on_device.high)
    return max(within_pool.value, on_device.value), ends


def _device_violation(parts: Parts, settings: EngineSettings, total_gib: float, pool: Estimate) -> Estimate:
    """Everything that lives once the engine has started, against the whole device."""
    after = terms.fragmentation(parts.activation)
    living = [parts.weights, parts.activation, parts.non_torch, parts.graphs, terms.context(settings), after]
    need = sum(part.value for part in living)
    low, high = _spread(living, "low"), _spread(living, "high")
    if pool.low == pool.high:
        need += pool.value
    else:
        # The pool takes what weights, activation and non-torch memory leave of the budget: their errors cancel.
        fixed = [p for p in living if p not in parts.charged(settings)]
        need = settings.utilisation * total_gib + sum(part.value for part in fixed)
        low, high = _spread(fixed, "low"), _spread(fixed, "high")
        if settings.charges_graphs:
            low = math.hypot(low, parts.graphs.value - parts.graphs.low)
            high = math.hypot(high, parts.graphs.high - parts.graphs.value)
    return Estimate(*((x - total_gib) / total_gib for x in (need, need - low, need + high)))


def _intervals(
    parts: Parts, pool: Estimate, plan: CachePlan, settings: EngineSettings
) -> dict[str, tuple[float, float]]:
    named = {
        "weights_gib": parts.weights,
        "activation_gib": parts.activation,
        "non_torch_gib": parts.non_torch,
        "graphs_gib": parts.graphs,
        "kv_gib": pool,
    }
    intervals: dict[str, tuple[float, float]] = {name: (part.low, part.high) for name, part in named.items()}
    intervals["kv_tokens"] = (
        plan.tokens_in(pool.low * GIB, settings.max_model_len),
        plan.tokens_in(pool.high * GIB, settings.max_model_len),
    )
    return intervals
