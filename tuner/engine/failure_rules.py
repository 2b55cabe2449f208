"""What `failures.classify` knows of logs besides the causes: ranks, harmless lines, progress, functions, figures.

Data only, from the texts of vLLM 0.10 to 0.32; the causes are put together in `failure_causes`. Nothing here reads a
log.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from objectives.measurement import FailureKind, Stage

STAGE_MARK = "tuner: stage"
WATCHDOG_MARK = "tuner: watchdog ended"
"""What the tuner itself writes into an engine's log."""


class Rank(IntEnum):
    """How much a text explains. The highest rank found in a log decides; within a rank the earliest line does."""

    DEATH = 1
    """A process is gone; nothing is said about why."""
    HINT = 2
    """Wording of a refusal, in a line that nobody calls an error."""
    EXCEPTION = 3
    """Some exception was raised that no other rule knows."""
    ECHO = 4
    """A peer noticed that a connection broke: usually because the other side died of something else."""
    KILLED = 5
    """A process was ended from outside or by a fault of its own code."""
    SILENCE = 6
    """Somebody waited in vain."""
    REFUSAL = 7
    """An exception of the type, or with the wording, that is used to refuse arguments."""
    FABRIC = 8
    """A collective operation failed; below `CAUSE` since the other ranks report so when one of them fails."""
    CAUSE = 9
    """The text itself names the reason."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One family of texts.

    Parameters
    ----------
    kind:
        What the text means; `None` for device memory, where the stage decides which `oom_*` kind it is.
    phrases:
        Lower-case literals, any of which makes a line a candidate.
    pattern:
        Must match in the lower-cased line as well.
    earliest:
        The engine had come at least this far when it wrote such a text.
    start_only:
        The text explains a failure only before requests run.
    as_error:
        Only in a line that its writer calls an error, or that ends a traceback.
    """

    kind: FailureKind | None
    rank: Rank
    phrases: tuple[str, ...]
    pattern: re.Pattern[str] | None = None
    earliest: Stage = Stage.CONFIG
    start_only: bool = False
    as_error: bool = False


def any_of(phrases: str) -> tuple[str, ...]:
    """Split literals that are separated by bars."""
    return tuple(phrase.strip() for phrase in phrases.split("|"))


EXCEPTION = r"(?:^|[\s:'\"(])(?:[a-z_][\w.]*\.)?"
"""Before the name of an exception in a lower-cased line: where a word may begin, and the module's name."""

BENIGN: tuple[str, ...] = (
    # Written by healthy engines, or advice inside another text: a line with one of these never decides.
    "retrying",
    "error retrieving safetensors",
    "error retrieving file list",
    "falling back",
    "fall back to",
    "no available shared memory broadcast block",
    "no available block found in",
    "custom allreduce is disabled",
    "engine core process died unexpectedly, shutting down client",
    "enginecore died unexpectedly, shutting down client",
    "destroy_process_group() was not called",
    "appear to be 1 leaked",
    "leaked shared_memory objects",
    "leaked semaphore objects",
    "address family not supported by protocol",
    "could not load dynamic library",
    "unable to register cu",
    "no cuda runtime is found, using",
    "exception ignored in",
    "duplicated timeseries in collectorregistry",
    "usage_stats",
    "skipping import of",
    "not supported for all configurations of models",
    "factor field must be",
    "there are some potential root causes",
    "some common causes include",
    "how to address the out of memory issue",
    "oom score",
    "killed by the os (e.g.",
    "kernel oom killer (verifiable",
    "set max_restarts",
    "is less than the minimum recommended",
    "libnccl-net.so",
    "no plugin found",
    "fatal: not a git repository",
    "/dev/shm is small",
)

WRAPPERS: tuple[str, ...] = (
    # Say that something above went wrong: never the cause, unless the same line also quotes it.
    "see root cause above",
    "see stack trace (above) for the root cause",
    "see stack trace for root cause",
    "check the stack trace above for the root cause",
    "engine core initialization failed",
    "enginecore failed to start",
    "enginecore encountered",
    "workerproc initialization failed",
    "workerproc failed to start",
    "workerproc hit an exception",
    "worker failed with error",
    "failed core proc(s)",
    "enginedeaderror",
    "asyncllm output_handler failed",
    "executor failed",
    "progressdeadlineexceeded",
    "application startup failed",
    "the actor died because of an error raised in its creation task",
)

PROGRESS: tuple[tuple[str, Stage], ...] = (
    # Lines of a normal start. The stage is the one that is under way once the line is written.
    ("starting to load model", Stage.WEIGHTS),
    ("loading model from scratch", Stage.WEIGHTS),
    ("loading model weights", Stage.WEIGHTS),
    ("loading safetensors checkpoint shards", Stage.WEIGHTS),
    ("loading pt checkpoint shards", Stage.WEIGHTS),
    ("loading weights took", Stage.WEIGHTS),
    ("loading drafter model", Stage.WEIGHTS),
    ("model loading took", Stage.PROFILE),
    ("loading model weights took", Stage.PROFILE),
    ("compiling a graph for", Stage.PROFILE),
    ("encoder cache will be initialized", Stage.PROFILE),
    ("dynamo bytecode transform time", Stage.PROFILE),
    ("torch.compile takes", Stage.PROFILE),
    ("warming up model for the compilation", Stage.PROFILE),
    ("profiling cuda graph memory", Stage.PROFILE),
    ("memory profiling takes", Stage.KV_CACHE),
    ("available kv cache memory:", Stage.KV_CACHE),
    ("gib for kv cache on node", Stage.KV_CACHE),
    ("kv cache size:", Stage.KV_CACHE),
    ("# gpu blocks:", Stage.KV_CACHE),
    ("maximum concurrency for", Stage.KV_CACHE),
    ("capturing cuda graph", Stage.GRAPH_CAPTURE),
    ("capturing cudagraphs", Stage.GRAPH_CAPTURE),
    ("capturing the model for cuda graphs", Stage.GRAPH_CAPTURE),
    ("graph capturing finished", Stage.WARMUP),
    ("init engine (profile", Stage.WARMUP),
    ("starting vllm api server", Stage.WARMUP),
    ("application startup complete", Stage.RUN),
    ("uvicorn running on", Stage.RUN),
    ("avg prompt throughput:", Stage.RUN),
    ("/v1/completions http", Stage.RUN),
    ("/v1/chat/completions http", Stage.RUN),
)

FRAMES: dict[str, Stage] = {
    # Functions of vLLM that tell the stage when they stand in a traceback.
    "profile_cudagraph_memory": Stage.GRAPH_CAPTURE,
    "capture_model": Stage.GRAPH_CAPTURE,
    "_capture_cudagraphs": Stage.GRAPH_CAPTURE,
    "capture_graphs": Stage.GRAPH_CAPTURE,
    "_allocate_kv_cache_tensors": Stage.KV_CACHE,
    "_allocate_kv_cache": Stage.KV_CACHE,
    "allocate_kv_cache": Stage.KV_CACHE,
    "initialize_kv_cache_tensors": Stage.KV_CACHE,
    "initialize_kv_cache": Stage.KV_CACHE,
    "initialize_from_config": Stage.KV_CACHE,
    "profile_run": Stage.PROFILE,
    "determine_available_memory": Stage.PROFILE,
    "determine_num_available_blocks": Stage.PROFILE,
    "load_model": Stage.WEIGHTS,
    "load_weights": Stage.WEIGHTS,
    "process_weights_after_loading": Stage.WEIGHTS,
    "compile_or_warm_up_model": Stage.WARMUP,
    "kernel_warmup": Stage.WARMUP,
    "_process_engine_step": Stage.RUN,
    "run_busy_loop": Stage.RUN,
    "execute_model": Stage.RUN,
    "sample_tokens": Stage.RUN,
}

_AMOUNT = r"(-?\d[\d,]{0,20}(?:\.\d+)?) ?((?:[kmgt]i?)?b(?:ytes)?)\b"
NEEDED: tuple[re.Pattern[str], ...] = tuple(
    re.compile(text)
    for text in (
        rf"(?<!already )allocat(?:e|ing|ion of) {_AMOUNT}",
        rf"requested ?: {_AMOUNT}",
        rf"{_AMOUNT} kv\s+cache is needed",
        rf"requested memory for kv \({_AMOUNT}",
        r"requested memory for kv \((-?\d+(?:\.\d+)?)/\d+(?:\.\d+)? (gib)",
        rf"\(\d*\.?\d+, {_AMOUNT}\)",
        rf"(?:needs?|requires?|requested|requesting)(?: about| at least)? {_AMOUNT}",
        rf"{_AMOUNT} (?:is |are )?(?:required|needed|requested)",
    )
)
AVAILABLE: tuple[re.Pattern[str], ...] = tuple(
    re.compile(text)
    for text in (
        rf"of which {_AMOUNT} is free",
        rf"free \(according to cuda\): {_AMOUNT}",
        rf"available kv cache\s+memory \({_AMOUNT}",
        rf"{_AMOUNT} free\b",
        rf"(?:only )?{_AMOUNT} (?:is |are )?(?:available|free)\b",
        r"\((-?\d+(?:\.\d+)?)/\d+(?:\.\d+)? (gib)\) on (?:startup|kv cache)",
    )
)
FITTING_TOKENS: tuple[re.Pattern[str], ...] = (
    re.compile(r"estimated maximum model length is (\d[\d,]*)"),
    re.compile(r"stored in kv\s+cache \((\d[\d,]*)\)"),
)
KV_LEFT = re.compile(rf"available kv cache memory: {_AMOUNT}")
KV_OVERDRAWN = re.compile(r"requested memory for kv \((-?\d+(?:\.\d+)?)/(\d+(?:\.\d+)?) (gib)\)")
"""vLLM's CPU backend: what is left for the cache, of how much was asked for; the first is negative when none is."""
