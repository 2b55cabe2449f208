"""Builds logs as vLLM writes them: a normal start up to a stage, a failure in the middle of it, wrappers round it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from objectives.measurement import Stage

CONFIG_LINE = (
    "Initializing a V1 LLM engine (v0.32.0) with config: model='org/model-32b', speculative_config=None, "
    "tokenizer='org/model-32b', trust_remote_code=False, dtype=torch.bfloat16, max_seq_len=32768, "
    "tensor_parallel_size=2, disable_custom_all_reduce=False, quantization=None, enforce_eager={eager}, "
    "kv_cache_dtype=auto, device_config=cuda, seed=0, enable_prefix_caching=True"
)

WORKER_STEPS: tuple[tuple[Stage, str, str], ...] = (
    (Stage.CONFIG, "pynccl.py:111", "vLLM is using nccl==2.27.5"),
    (Stage.WEIGHTS, "gpu_model_runner.py:4100", "Starting to load model org/model-32b..."),
    (Stage.WEIGHTS, "default_loader.py:308", "Loading weights took 12.31 seconds"),
    (Stage.PROFILE, "gpu_model_runner.py:4180", "Model loading took 30.6 GiB memory and 14.1 seconds"),
    (Stage.PROFILE, "backends.py:703", "Dynamo bytecode transform time: 8.11 s"),
    (Stage.KV_CACHE, "gpu_worker.py:760", "Available KV cache memory: 10.25 GiB"),
    (Stage.GRAPH_CAPTURE, "", "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  12%|█▏        | 8/67"),
    (Stage.WARMUP, "gpu_model_runner.py:6582", "Graph capturing finished in 21 secs, took 0.71 GiB"),
)
CORE_STEPS: tuple[tuple[Stage, str, str], ...] = (
    (Stage.KV_CACHE, "kv_cache_utils.py:2327", "GPU KV cache size: 83,968 tokens, Maximum concurrency: 2.56x"),
    (Stage.WARMUP, "core.py:395", "init engine (profile, create kv cache, warmup model) took 48.12 s"),
)
SERVER_RUN = (
    "(APIServer pid=1) INFO:     Application startup complete.",
    '(APIServer pid=1) INFO:     127.0.0.1:51234 - "POST /v1/completions HTTP/1.1" 200 OK',
    "(APIServer pid=1) INFO 11-30 02:14:09 [loggers.py:257] Engine 000: Avg prompt throughput: 812.0 tokens/s, "
    "Avg generation throughput: 95.1 tokens/s, Running: 8 reqs, Waiting: 0 reqs, GPU KV cache usage: 31.2%",
)
REACHED = (Stage.CONFIG, Stage.WEIGHTS, Stage.PROFILE, Stage.KV_CACHE, Stage.GRAPH_CAPTURE, Stage.WARMUP, Stage.RUN)
"""Stages that `start` can come to, in order."""

NOISE = (
    "(APIServer pid=1) INFO 11-30 02:12:01 [utils.py:233] non-default args: {'model': 'org/model-32b', 'port': 8000}",
    "(APIServer pid=1) WARNING 11-30 02:12:01 [arg_utils.py:1912] Prefix caching is not supported, disabling.",
    "(EngineCore pid=90) INFO 11-30 02:12:02 [memory.py:11] If you run out of memory, decrease gpu_memory_utilization.",
    "(Worker_TP0 pid=101) WARNING 11-30 02:12:05 [custom_all_reduce.py:154] Custom allreduce is disabled because your "
    "platform lacks GPU P2P capability or P2P test failed.",
    "(EngineCore pid=90) INFO 11-30 02:13:05 [shm_broadcast.py:466] No available shared memory broadcast block found "
    "in 60 seconds. This typically happens when some processes are hanging or doing some time-consuming work.",
    "[W1130 02:12:03.1 socket.cpp:767] [c10d] The client socket has failed to connect to [::ffff:127.0.0.1]:29500 "
    "(errno: 97 - Address family not supported by protocol).",
    "/usr/lib/python3.12/site-packages/torch/cuda/__init__.py:61: FutureWarning: The pynvml package is deprecated.",
    "(APIServer pid=1) ERROR 11-30 02:12:01 [repo_utils.py:65] Error retrieving safetensors: Repo id must be in the "
    "form 'repo_name' or 'namespace/repo_name': '/models/m'. Use `repo_type` argument if needed., retrying 1 of 2",
    "(APIServer pid=1) INFO 11-30 02:12:00 [api_server.py:99] Port 8000 is already in use, trying port 8001",
    "Fetching 4 files:   0%|          | 0/4 [00:00<?, ?it/s]\rFetching 4 files: 100%|██████████| 4/4 [00:00<00:00]",
    "node7:812:812 [0] NCCL INFO NET/Plugin: Failed to find ncclNetPlugin symbol, error ignored, out of memory no",
    "\x1b[0;36m(EngineCore pid=90)\x1b[0;0m \x1b[33mWARNING\x1b[0m 11-30 02:12:00 [scheduler.py:9] chunked prefill",
    "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1",
    "Skipping import of cpp extensions due to incompatible torch version 2.9.0 for torchao version 0.14",
    "You are using a model of type a to instantiate a model of type b. This is not supported for all configurations of "
    "models and can yield errors.",
    "2026-11-30 02:13:01,777 - INFO - autotuner.py:256 - flashinfer.jit: unsupported tactic must be skipped",
    "\x00\x7f\x1b[K\ufffd\u2588 \ud83d",
)
"""Lines that a healthy engine writes and that must never decide. The last one is no text at all."""

AFTERMATH = (
    "(EngineCore pid=90) ERROR 11-30 02:20:00 [core.py:1510] EngineCore failed to start.",
    "(EngineCore pid=90) ERROR 11-30 02:20:00 [core.py:1510] Traceback (most recent call last):",
    '(EngineCore pid=90) ERROR 11-30 02:20:00 [core.py:1510]   File "vllm/v1/executor/multiproc_executor.py", line 8, '
    "in wait_for_ready",
    "(EngineCore pid=90) ERROR 11-30 02:20:00 [core.py:1510]     raise e from None",
    "(EngineCore pid=90) ERROR 11-30 02:20:00 [core.py:1510] Exception: WorkerProc initialization failed due to an "
    "exception in a background process. See stack trace for root cause.",
    "[rank0]:[W1130 02:20:01.5 ProcessGroupNCCL.cpp:1538] Warning: WARNING: destroy_process_group() was not called "
    "before program exit, which can leak resources.",
    "(APIServer pid=1) Traceback (most recent call last):",
    '(APIServer pid=1)   File "vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup',
    "(APIServer pid=1)     raise RuntimeError(",
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. "
    "Failed core proc(s): {'EngineCore': 1}",
    "/usr/lib/python3.12/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 "
    "leaked shared_memory objects to clean up at shutdown",
)
DEATH_AT_RUN = (
    "(EngineCore pid=90) ERROR 11-30 02:20:00 [core.py:1512] EngineCore encountered a fatal error.",
    "(APIServer pid=1) ERROR 11-30 02:20:00 [async_llm.py:906] AsyncLLM output_handler failed.",
    "(APIServer pid=1) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace "
    "(above) for the root cause.",
    "(APIServer pid=1) ERROR 11-30 02:20:01 [core_client.py:600] Engine core proc EngineCore died unexpectedly, "
    "shutting down client.",
)


@dataclass(frozen=True, slots=True)
class Writer:
    """A process that writes with vLLM's prefix."""

    name: str

    def info(self, source: str, text: str) -> str:
        return f"({self.name}) INFO 11-30 02:13:00 [{source}] {text}" if source else f"({self.name}) {text}"

    def error(self, text: str) -> str:
        return f"({self.name}) ERROR 11-30 02:19:58 [multiproc_executor.py:1063] {text}"


CORE = Writer("EngineCore pid=90")
WORKERS = (Writer("Worker_TP0 pid=101"), Writer("Worker_TP1 pid=102"))


def start(reached: Stage, *, eager: bool = False, workers: Sequence[Writer] = WORKERS) -> list[str]:
    """Lines of a normal start, ending while `reached` is under way; the workers' lines are interleaved."""
    lines = [CORE.info("core.py:133", CONFIG_LINE.format(eager=eager))]
    stages = REACHED[: REACHED.index(reached) + 1]
    for stage in stages:
        if eager and stage is Stage.GRAPH_CAPTURE:
            continue
        for step, source, text in WORKER_STEPS:
            if step is stage and not (eager and step is Stage.WARMUP):
                lines += [worker.info(source, text) for worker in workers]
        lines += [CORE.info(source, text) for step, source, text in CORE_STEPS if step is stage]
    return [*lines, *(SERVER_RUN if Stage.RUN in stages else ())]


def traceback(writer: Writer, evidence: str, frames: Iterable[str] = ("forward",)) -> list[str]:
    """One exception as vLLM logs it, every line with the prefix."""
    lines = ["WorkerProc hit an exception.", "Traceback (most recent call last):"]
    for name in frames:
        lines += [f'  File "vllm/v1/worker/gpu_worker.py", line 7, in {name}', "    return func(*args, **kwargs)"]
    return [writer.error(line) for line in (*lines, *evidence.splitlines())]


def interleave(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Merge two processes' lines one by one."""
    shorter = min(len(first), len(second))
    merged = [line for pair in zip(first, second, strict=False) for line in pair]
    return [*merged, *first[shorter:], *second[shorter:]]


def failed(evidence: Sequence[str], reached: Stage, *, eager: bool = False) -> str:
    """A whole log: noise, a start up to `reached`, the evidence, more noise, and the wrappers."""
    aftermath = DEATH_AT_RUN if reached is Stage.RUN else AFTERMATH
    return "\n".join([*NOISE, *start(reached, eager=eager), *evidence, *NOISE, *aftermath]) + "\n"
