"""`TwinEngine`: predicts a measurement by stepping vLLM's scheduler on a clock that the cost model advances."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from objectives.measurement import (
    EngineFacts,
    Failure,
    Measurement,
    RequestRecord,
    SpeedProbe,
    StepRecord,
)
from tuner.config import EngineConfig
from tuner.engine.protocol import MeasurePlan, Progress
from tuner.engine.race import Race
from tuner.engine.twin.coefficient_sets import CoefficientSets, calibration_key
from tuner.engine.twin.devices import DeviceKind, DeviceSpec
from tuner.engine.twin.memory import KvPool, MemoryOracle, exact_pool, known_pool, pool_too_small, token_bytes
from tuner.engine.twin.play import Prepared, VirtualRun
from tuner.engine.twin.shape import ModelShape, kv_dtype_bytes, model_shape, read_model_config
from tuner.engine.twin.steptime import Coefficients, KernelChoice, StepCost, StepLoad
from tuner.engine.twin.vllm_scheduler import SCHEDULER_ARGS, Resolved, VirtualScheduler, limit_model_len, resolve
from tuner.errors import UsageError
from tuner.probe import PROBE_PROMPT_TOKENS
from tuner.workload.model import Workload

PREDICTED_ARGS = frozenset(SCHEDULER_ARGS) | {
    "dtype",
    "enforce_eager",
    "env.VLLM_CPU_KVCACHE_SPACE",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "kv_cache_memory_bytes",
    "max_cudagraph_capture_size",
    "num_gpu_blocks_override",
    "quantization",
    "tensor_parallel_size",
}
"""Arguments whose effect on time or memory is predicted; any other leaves the twin's figures as they are."""

_CAPTURE_LIMIT_TOKENS = 512
"""vLLM captures graphs for up to min(2 x max_num_seqs, 512) tokens unless told otherwise."""


class TwinEngine:
    """Predicts what `config` would measure on `device`, without a device.

    Parameters
    ----------
    device:
        What the engine is predicted on; `tensor_parallel_size` of them.
    model:
        A folder with the model's `config.json`; nothing else of the model is read.
    memory:
        Says how large the KV pool of a configuration is. Not asked where `kv_cache_memory_bytes` states it; needed
        everywhere else (`UsageError`).
    coefficients:
        A calibrated set for every configuration, or sets by what they hold for; the catalogue's where `None`.
    """

    def __init__(
        self,
        device: DeviceSpec,
        model: Path,
        memory: MemoryOracle | None = None,
        coefficients: Coefficients | CoefficientSets | None = None,
    ) -> None:
        self._device = device
        self._model = model
        self._memory = memory
        if isinstance(coefficients, CoefficientSets):
            self._sets = coefficients
        else:
            self._sets = CoefficientSets(coefficients or Coefficients())
        self._config_json = read_model_config(model)

    def run(
        self, config: EngineConfig, workload: Workload, plan: MeasurePlan, progress: Progress
    ) -> Measurement | Failure:
        """Predict `config`, or say how it would fail.

        Raises
        ------
        EngineUnsupportedError
            The installed vLLM, the model or an argument is one that the twin cannot predict.
        """
        progress("predict memory")
        prepared = self.prepare(config)
        if isinstance(prepared, Failure):
            return prepared
        with _frozen_heap():
            played = _play(prepared, workload, plan, progress)
        if isinstance(played, Failure):
            return played
        requests, steps, durations = played
        probe = self._machine_probe() if plan.speed_probe else None
        return Measurement(
            engine=self._facts(config, prepared),
            workload_fingerprint=workload.fingerprint(),
            requests=tuple(requests),
            steps=tuple(steps),
            device=(),
            duration_s=tuple(durations),
            speed_before=probe,
            speed_after=probe,
            predicted=True,
            notes=_interval_notes(self._coefficients(config)),
        )

    def close(self) -> None:
        """Nothing outlives a run."""

    @property
    def device(self) -> DeviceSpec:
        """What is predicted."""
        return self._device

    def with_coefficients(self, coefficients: Coefficients | CoefficientSets) -> TwinEngine:
        """Return an engine for the same model and device that uses this set, or these."""
        return TwinEngine(self._device, self._model, self._memory, coefficients)

    def key(self, config: EngineConfig) -> str:
        """Name what a set of coefficients for this configuration holds for."""
        return calibration_key(self._config_json, self._device, config)

    def probe(self, config: EngineConfig, kv_tokens: int | None = None) -> SpeedProbe | Failure:
        """Predict the speed probe of one configuration.

        A measured probe over this one is the machine's speed alone: the probe depends on the configuration too, since
        a small `max_num_batched_tokens` cuts its prompt into more steps.
        """
        prepared = self.prepare(config, kv_tokens)
        if isinstance(prepared, Failure):
            return prepared
        return _probe(prepared.cost, prepared.resolved.max_num_batched_tokens)

    def prepare(self, config: EngineConfig, kv_tokens: int | None = None) -> Prepared | Failure:
        """Resolve the configuration, size its KV pool (unless it is known) and set up its step costs."""
        resolved = resolve(config.args, self._model, self._device)
        if isinstance(resolved, Failure):
            return resolved
        shape = model_shape(self._config_json, str(config.args.get("dtype") or "auto"), config.args.get("quantization"))
        if kv_tokens is not None:
            pool: KvPool | Failure = known_pool(kv_tokens, config, shape)
        else:
            pool = exact_pool(config, shape, resolved.block_tokens) or self._ask_memory(config)
        if isinstance(pool, Failure):
            return pool
        kernels = _kernels(config, shape, resolved, self._device)
        blocks = int(config.args.get("num_gpu_blocks_override") or pool.tokens // resolved.block_tokens)
        if resolved.auto_model_len:
            resolved = limit_model_len(resolved, max(1, blocks - 1) * resolved.block_tokens)
        failure = pool_too_small(blocks, resolved.block_tokens, resolved.max_model_len, token_bytes(config, shape))
        if failure is not None:
            return failure
        cost = StepCost(shape, self._device, kernels, self._coefficients(config))
        return Prepared(resolved, pool, blocks, kernels, cost)

    def _machine_probe(self) -> SpeedProbe:
        """Return one probe for every configuration: this machine does not drift, so its speed index is 1."""
        cost = StepCost(model_shape(self._config_json), self._device, KernelChoice(), self._sets.shared)
        return _probe(cost, PROBE_PROMPT_TOKENS)

    def _coefficients(self, config: EngineConfig) -> Coefficients:
        return self._sets.of(self.key(config))

    def _ask_memory(self, config: EngineConfig) -> KvPool | Failure:
        if self._memory is None:
            raise UsageError(
                f"The twin has no memory model for {self._device.name}; set the engine argument kv_cache_memory_bytes."
            )
        return self._memory(config)

    def _facts(self, config: EngineConfig, prepared: Prepared) -> EngineFacts:
        resolved = prepared.resolved
        effective: dict[str, Any] = {
            **config.args,
            "max_model_len": resolved.max_model_len,
            "max_num_seqs": resolved.max_num_seqs,
            "max_num_batched_tokens": resolved.max_num_batched_tokens,
            "block_size": resolved.block_tokens,
            "enable_prefix_caching": resolved.prefix_caching,
            "enable_chunked_prefill": resolved.chunked_prefill,
            "scheduling_policy": resolved.policy,
        }
        return EngineFacts(
            engine="twin",
            vllm_version=resolved.vllm_version,
            device_name=self._device.name,
            device_count=prepared.kernels.tensor_parallel,
            model=str(config.args.get("model") or self._model.name),
            start_s=0.0,
            kv_tokens=prepared.pool_blocks * resolved.block_tokens,
            kv_gib=prepared.pool.gib,
            kv_tokens_needed=-(-resolved.max_model_len // resolved.block_tokens) * resolved.block_tokens,
            weights_gib=prepared.pool.weights_gib,
            max_model_len=resolved.max_model_len,
            effective_args=effective,
        )


def _play(
    prepared: Prepared, workload: Workload, plan: MeasurePlan, progress: Progress
) -> tuple[list[RequestRecord], list[StepRecord], list[float]] | Failure:
    """Play every repeat, each with an empty prefix cache; also returns each repeat's duration."""
    scheduler = VirtualScheduler(prepared.resolved, prepared.pool_blocks)
    requests: list[RequestRecord] = []
    steps: list[StepRecord] = []
    durations: list[float] = []
    left_s = plan.run_budget_s
    race = Race(plan.bars, len(workload.requests) * plan.repeats)
    for repeat in range(plan.repeats):
        progress(f"predict run {repeat + 1}/{plan.repeats}")
        scheduler.forget_prefixes()
        run = VirtualRun(scheduler, prepared, workload, repeat)
        failure = run.play(left_s)
        if failure is not None:
            return failure
        records = run.records()
        if plan.bars and any(race.is_lost_after(r) for r in sorted(records, key=lambda r: r.last_token_s or 0.0)):
            break
        requests += records
        steps += run.steps
        durations.append(run.duration_s)
        left_s -= run.duration_s
    return race.lost or (requests, steps, durations)


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Keep full passes of the garbage collector off what was there before: vLLM's imports are 0.7 million objects."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _kernels(config: EngineConfig, shape: ModelShape, resolved: Resolved, device: DeviceSpec) -> KernelChoice:
    args = config.args
    if args.get("enforce_eager"):
        captured = 0
    elif device.kind is DeviceKind.CPU:
        captured = resolved.max_num_batched_tokens  # compiled code, no graphs: it runs for every size
    else:
        captured = int(args.get("max_cudagraph_capture_size") or min(2 * resolved.max_num_seqs, _CAPTURE_LIMIT_TOKENS))
    return KernelChoice(
        tensor_parallel=int(args.get("tensor_parallel_size") or 1),
        kv_dtype_bytes=kv_dtype_bytes(str(args.get("kv_cache_dtype") or "auto"), shape),
        captured_tokens=captured,
    )


def _probe(cost: StepCost, chunk_tokens: int) -> SpeedProbe:
    """Predict the speed probe: a 512-token prompt alone, in chunks, then single tokens after it."""
    prefill_s = 0.0
    for done in range(0, PROBE_PROMPT_TOKENS, chunk_tokens):
        count = min(chunk_tokens, PROBE_PROMPT_TOKENS - done)
        end = done + count
        prefill_s += cost(StepLoad(count, count * (done + (count + 1) / 2), end, 0, 0, int(end == PROBE_PROMPT_TOKENS)))
    return SpeedProbe(prefill_s, cost(StepLoad(0, 0.0, 0, 1, PROBE_PROMPT_TOKENS + 1, 1)))


def _interval_notes(coefficients: Coefficients) -> dict[str, float]:
    """Evidence for a reader of the numbers: how far measured times were from predicted ones when calibrated."""
    if coefficients.ratio_interval is None:
        return {"calibrated_steps": 0.0}
    low, high = coefficients.ratio_interval
    return {"calibrated_steps": float(coefficients.steps), "time_ratio_low": low, "time_ratio_high": high}
