"""The one file that knows vLLM's internals: its v1 `Scheduler`, built and stepped without an engine round it.

Tried with vLLM 0.32.0 (the CPU wheel, on a machine without a GPU). The scheduler, KV block manager, prefix cache,
chunked prefill and preemption are vLLM's; what is replaced is the model runner (every sampled token is 0), the block
hasher (prompts of a workload are equal exactly where they share a prefix on purpose, so tokens need not be hashed)
and the payload for workers that do not exist. Async scheduling is off. All layers are one full-attention KV group,
which overstates the cache of models with sliding-window layers.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from objectives.measurement import Failure, FailureKind, Stage
from tuner.engine.twin.devices import DeviceKind, DeviceSpec
from tuner.engine.twin.steptime import StepLoad
from tuner.errors import EngineUnsupportedError

TRIED_VERSIONS = ("0.32.0",)

SCHEDULER_ARGS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_active_seqs",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "block_size",
    "scheduling_policy",
    "scheduler_reserve_full_isl",
    "watermark",
    "hf_overrides",
    "trust_remote_code",
)
"""Engine arguments that steer the scheduler. Every other one is the cost model's or the memory model's business."""

_UNPREDICTABLE_ARGS: Mapping[str, Any] = {
    "speculative_config": None,
    "kv_transfer_config": None,
    "enable_lora": False,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "cpu_offload_gb": 0,
    "kv_offloading_size": None,
}
"""Arguments whose effect the twin does not model, with the one value at which they have none."""

# vLLM's own defaults for the API server (`EngineArgs.get_batch_defaults`), which it takes from the platform that it
# runs on; here they must be those of the device that is predicted. (max_num_batched_tokens, max_num_seqs)
_LARGE_GPU_GIB, _HUGE_GPU_GIB = 70, 160
_GPU_BLOCK_TOKENS, _CPU_BLOCK_TOKENS = 16, 128


@dataclass(frozen=True, slots=True)
class Resolved:
    """An engine configuration as the scheduler sees it, defaults filled in."""

    vllm_config: Any
    vllm_version: str
    max_model_len: int
    auto_model_len: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    block_tokens: int
    prefix_caching: bool
    chunked_prefill: bool
    policy: str


class ScheduledStep(NamedTuple):
    """One step of the scheduler.

    Parameters
    ----------
    prompt_tokens:
        Tokens that vLLM's statistics count as prompt: those of requests without output yet. Recomputing after a
        preemption is not among them, though it costs what a prompt costs.
    emitted, finished:
        Requests that got a token, and those of them for which it was the last.
    started:
        Requests scheduled for the first time, each with its tokens found in the prefix cache.
    preempted:
        Requests that lost their KV blocks and wait again.
    running, waiting, kv_usage:
        State after the step; usage is a share of the pool.
    """

    load: StepLoad
    prompt_tokens: int
    emitted: Sequence[str]
    finished: Sequence[str]
    started: Sequence[tuple[str, int]]
    preempted: Sequence[str]
    running: int
    waiting: int
    kv_usage: float


def resolve(args: Mapping[str, Any], model: Path, device: DeviceSpec) -> Resolved | Failure:
    """Build vLLM's configuration for a model of which only `config.json` need exist.

    Returns a `Failure` of kind `invalid_config` where vLLM refuses the arguments.

    Raises
    ------
    EngineUnsupportedError
        vLLM is not installed, cannot be driven, or an argument is not one that the twin can predict.
    """
    for name, neutral in _UNPREDICTABLE_ARGS.items():
        if args.get(name) not in (None, neutral):
            raise EngineUnsupportedError(
                f"The twin cannot predict {name}={args[name]!r}; leave it out, or use the vllm backend for this study."
            )
    with _quiet_vllm():
        try:
            from vllm import __version__ as version
            from vllm.engine.arg_utils import EngineArgs
            from vllm.usage.usage_lib import UsageContext
        except ImportError as error:
            raise EngineUnsupportedError(f"The twin drives vLLM's scheduler and cannot import it: {error}.") from error
        known = set(EngineArgs.__dataclass_fields__)
        unknown = sorted(set(args) - known)
        if unknown:
            return _refused(f"vLLM {version} has no engine argument {unknown[0]!r}.")
        chosen = {
            **_device_defaults(device),
            **{k: v for k, v in args.items() if k in SCHEDULER_ARGS and v is not None},
        }
        try:
            config = EngineArgs(
                model=str(model),
                skip_tokenizer_init=True,
                load_format="dummy",
                async_scheduling=False,
                **chosen,
            ).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
        except ValueError as error:
            return _refused(_first_sentence(str(error)))
    return Resolved(
        vllm_config=config,
        vllm_version=version,
        max_model_len=config.model_config.max_model_len,
        auto_model_len=args.get("max_model_len") == -1,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        block_tokens=config.cache_config.block_size,
        prefix_caching=bool(config.cache_config.enable_prefix_caching),
        chunked_prefill=bool(config.scheduler_config.enable_chunked_prefill),
        policy=str(config.scheduler_config.policy),
    )


def limit_model_len(resolved: Resolved, tokens: int) -> Resolved:
    """Lower `max_model_len` to what the KV pool holds, as vLLM does where it is left to choose (-1)."""
    fitting = min(resolved.max_model_len, tokens)
    resolved.vllm_config.model_config.max_model_len = fitting
    return replace(resolved, max_model_len=fitting)


class VirtualScheduler:
    """vLLM's scheduler, fed with requests and stepped; time is the caller's.

    Parameters
    ----------
    pool_blocks:
        Blocks of the KV pool, vLLM's null block included.
    skip_ahead:
        Take steps in which nothing can happen but one token a request without running the whole of `schedule()`.
        The outcome is the same; `False` is there for the test that proves it.
    """

    def __init__(self, resolved: Resolved, pool_blocks: int, skip_ahead: bool = True) -> None:
        self._block_tokens = resolved.block_tokens
        self._caching = resolved.prefix_caching
        self._skip_ahead = skip_ahead
        self._shared: dict[str, Sequence[bytes]] = {}
        self._fresh = itertools.count()
        self._sampling: dict[int, Any] = {}
        self._run: _DecodeRun | None = None
        with _quiet_vllm(), _as_unsupported(resolved.vllm_version):
            from vllm.sampling_params import SamplingParams
            from vllm.v1.outputs import ModelRunnerOutput
            from vllm.v1.request import Request

            self._request_class = Request
            self._sampling_class = SamplingParams
            self._output_class = ModelRunnerOutput
            self._scheduler = _build_scheduler(resolved, pool_blocks)
            self._prove()

    @property
    def unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._scheduler.requests)

    def add(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        arrival_s: float,
        shared_blocks: Sequence[bytes] = (),
    ) -> None:
        """Queue a request. `shared_blocks` identify the leading blocks of the prompt that others may share."""
        self._leave_run()
        if self._caching:
            self._shared[request_id] = shared_blocks
        self._scheduler.add_request(
            self._request_class(
                request_id=request_id,
                prompt_token_ids=[0] * prompt_tokens,
                sampling_params=self._sampling_params(output_tokens),
                pooling_params=None,
                arrival_time=arrival_s,
                block_hasher=self._hash_blocks if self._caching else None,
            )
        )

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; nothing may be unfinished."""
        self._scheduler.reset_prefix_cache()

    def step(self) -> ScheduledStep:
        """Schedule one step and give every request that completed its prompt a token."""
        run = self._run
        if run is not None:
            if run.advance():
                return self._decode_step(run)
            self._leave_run()
        return self._full_step()

    def _prove(self) -> None:
        """Drive one small request to its end, so that a vLLM that has changed says so here and not in a run."""
        self.add("proof", prompt_tokens=1, output_tokens=2, arrival_s=0.0)
        emitted = [len(self.step().emitted) for _ in range(2)]
        if emitted != [1, 1] or self.unfinished:
            raise TypeError("a request of two tokens does not end after two steps")
        self.forget_prefixes()

    def _full_step(self) -> ScheduledStep:
        scheduler = self._scheduler
        output = scheduler.schedule()
        new = {r.req_id for r in output.scheduled_new_reqs}
        load, prompt_tokens, emitted = self._load(output.num_scheduled_tokens, new)
        started = [
            (r.req_id, r.num_computed_tokens)
            for r in output.scheduled_new_reqs
            if scheduler.requests[r.req_id].num_preemptions == 0
        ]
        preempted = sorted(output.preempted_req_ids or ())
        ids = list(output.num_scheduled_tokens)
        finished: list[str] = []
        if ids:
            emits = set(emitted)
            before = len(scheduler.requests)
            scheduler.update_from_output(
                output,
                self._output_class(
                    req_ids=ids,
                    req_id_to_index={name: i for i, name in enumerate(ids)},
                    sampled_token_ids=[[0] if name in emits else [] for name in ids],
                ),
            )
            if len(scheduler.requests) < before:
                finished = [name for name in emitted if name not in scheduler.requests]
                for name in finished:
                    self._shared.pop(name, None)
        running, waiting = scheduler.get_request_counts()
        undisturbed = 0 < load.decodes == running and not (load.prefill_tokens or preempted or finished or new)
        if self._skip_ahead and undisturbed:
            self._run = _DecodeRun(scheduler, self._block_tokens, self._caching)
        usage = scheduler.kv_cache_manager.usage
        return ScheduledStep(load, prompt_tokens, emitted, finished, started, preempted, running, waiting, usage)

    def _load(self, scheduled: Mapping[str, int], new: set[str]) -> tuple[StepLoad, int, list[str]]:
        """Return what the scheduled tokens cost, which of them vLLM counts as prompt, and which requests sample."""
        prefill = prefill_context = decodes = decode_context = prompt_tokens = 0
        pairs = 0.0
        emitted: list[str] = []
        requests = self._scheduler.requests
        for name, count in scheduled.items():
            request = requests[name]
            computed = request.num_computed_tokens  # this step's tokens included, as after `schedule()`
            if computed >= request.num_tokens:
                emitted.append(name)
            if count == 1 and computed > request.num_prompt_tokens:
                decodes += 1
                decode_context += computed
                continue
            prefill += count
            pairs += count * (computed - count + (count + 1) / 2)
            prefill_context += computed
            if name in new or not request.num_output_tokens:
                prompt_tokens += count
        load = StepLoad(prefill, pairs, prefill_context, decodes, decode_context, len(emitted))
        return load, prompt_tokens, emitted

    def _decode_step(self, run: _DecodeRun) -> ScheduledStep:
        count = len(run.ids)
        load = StepLoad(0, 0.0, 0, count, run.context, count)
        run.context += count
        return ScheduledStep(load, 0, run.ids, (), (), (), count, run.waiting, self._scheduler.kv_cache_manager.usage)

    def _leave_run(self) -> None:
        if self._run is not None:
            self._run.settle()
            self._run = None

    def _sampling_params(self, output_tokens: int) -> Any:
        params = self._sampling.get(output_tokens)
        if params is None:
            params = self._sampling_class(max_tokens=output_tokens, ignore_eos=True, detokenize=False)
            self._sampling[output_tokens] = params
        return params

    def _hash_blocks(self, request: Any) -> list[bytes]:
        """Identify the full blocks that have no hash yet: as shared ones where stated, else as ones never seen."""
        have = len(request.block_hashes)
        full = request.num_tokens // self._block_tokens
        if full <= have:
            return []
        shared = self._shared.get(request.request_id, ())
        return [
            shared[i] if i < len(shared) else b"private:" + next(self._fresh).to_bytes(8, "big")
            for i in range(have, full)
        ]


class _DecodeRun:
    """A run of steps in which every running request gets one token and nothing else can happen.

    Entered after a step in which that was so; it holds until a request is added, finishes, or finds no free block.
    A request still waiting then waits for a slot or for blocks, and neither comes free in such steps. Only requests
    at the edge of a block touch the KV manager, through vLLM's `allocate_slots` and in the scheduler's order; the
    others' counters are brought up to date when they next matter.
    """

    def __init__(self, scheduler: Any, block_tokens: int, caching: bool) -> None:
        running = scheduler.running
        self._scheduler = scheduler
        self._block_tokens = block_tokens
        self._steps = 0
        self._settled = [0] * len(running)
        self._left = min(
            min(r.max_tokens - r.num_output_tokens, scheduler.max_model_len - r.num_tokens) - 1 for r in running
        )
        self._allocates = [0] * block_tokens
        self._due: list[list[int]] = [[] for _ in range(block_tokens)]
        for index, request in enumerate(running):
            phase = -request.num_computed_tokens % block_tokens  # step at which the next token opens a block
            self._allocates[phase] += 1
            self._due[phase].append(index)
            if caching and block_tokens > 1:
                self._due[(phase - 1) % block_tokens].append(index)  # step that fills a block, which is then cached
        for due in self._due:
            due.sort()
        self.ids = [r.request_id for r in running]
        self.context = sum(r.num_computed_tokens + 1 for r in running)
        self.waiting = scheduler.get_request_counts()[1]

    def advance(self) -> bool:
        """Take one step; `False` (and nothing changed) if it must be left to the whole of `schedule()`."""
        if self._steps >= self._left:
            return False
        phase = self._steps % self._block_tokens
        due = self._due[phase]
        if due:
            manager = self._scheduler.kv_cache_manager
            if self._allocates[phase] > manager.block_pool.get_num_free_blocks():
                return False
            for index in due:
                manager.allocate_slots(self._settle(index), 1)
        self._steps += 1
        return True

    def settle(self) -> None:
        """Bring every request's counters up to date."""
        for index in range(len(self.ids)):
            self._settle(index)

    def _settle(self, index: int) -> Any:
        request = self._scheduler.running[index]
        behind = self._steps - self._settled[index]
        if behind:
            request.num_computed_tokens += behind
            request.append_output_token_ids([0] * behind)
            self._settled[index] = self._steps
        return request


def _build_scheduler(resolved: Resolved, pool_blocks: int) -> Any:
    import torch
    from vllm.v1.core.sched.output import CachedRequestData
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    class WorkerlessScheduler(Scheduler):  # type: ignore[misc]  # vLLM is untyped here
        """vLLM's scheduler without the messages to workers."""

        def _make_cached_request_data(self, *_args: Any, **_kwargs: Any) -> Any:
            return CachedRequestData.make_empty()

    config = resolved.vllm_config
    config.cache_config.num_gpu_blocks = pool_blocks
    # Head count, size and type only matter for bytes, which the memory model has counted already.
    spec = FullAttentionSpec(block_size=resolved.block_tokens, num_kv_heads=1, head_size=1, dtype=torch.bfloat16)
    pool = KVCacheConfig(
        num_blocks=pool_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["decoder"], spec)]
    )
    return WorkerlessScheduler(
        vllm_config=config,
        kv_cache_config=pool,
        structured_output_manager=StructuredOutputManager(config),
        block_size=resolved.block_tokens,
        hash_block_size=resolved.block_tokens,
        log_stats=False,
    )


def _device_defaults(device: DeviceSpec) -> dict[str, Any]:
    if device.kind is DeviceKind.CPU:
        return {"block_size": _CPU_BLOCK_TOKENS, "max_num_batched_tokens": 2048, "max_num_seqs": 128}
    defaults: dict[str, Any] = {"block_size": _GPU_BLOCK_TOKENS}
    if device.memory_gib >= _HUGE_GPU_GIB:
        return {**defaults, "max_num_batched_tokens": 16384, "max_num_seqs": 1024}
    if device.memory_gib >= _LARGE_GPU_GIB and "A100" not in device.name:
        return {**defaults, "max_num_batched_tokens": 8192, "max_num_seqs": 1024}
    return {**defaults, "max_num_batched_tokens": 2048, "max_num_seqs": 256}


def _refused(message: str) -> Failure:
    return Failure(FailureKind.INVALID_CONFIG, Stage.CONFIG, message)


def _first_sentence(text: str) -> str:
    """Pick the line of a pydantic or vLLM error that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("Value error")), lines[0] if lines else "refused by vLLM")


@contextlib.contextmanager
def _as_unsupported(version: str) -> Iterator[None]:
    """Turn a missing or changed internal into one sentence."""
    try:
        yield
    except (ImportError, AttributeError, TypeError, AssertionError) as error:
        raise EngineUnsupportedError(
            f"The twin cannot drive the scheduler of vLLM {version} ({error}); it was tried with "
            f"{', '.join(TRIED_VERSIONS)}."
        ) from error


@contextlib.contextmanager
def _quiet_vllm() -> Iterator[None]:
    """Keep vLLM's log lines off stdout and its changes to the environment out of engines started later."""
    before = dict(os.environ)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({k: v for k, v in before.items() if os.environ.get(k) != v})
