"""The facts of one trial, as plain frozen data: what was measured, or how it failed.

Facts only, no opinions: what they are worth is decided in `latency`, `throughput`, `memory`, `validity` and `score`.
Every time is in seconds on the run's own clock, which reads 0 when the first request of a repeat may arrive; a
number that was not observed is `None`, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FailureKind(StrEnum):
    """Why a configuration could not be measured. `is_configuration_fault` says who is to blame."""

    OOM_WEIGHTS = "oom_weights"
    """The weights do not fit on the device."""
    OOM_PROFILE = "oom_profile"
    """Out of memory in the profiling forward pass or while the KV pool itself was allocated."""
    OOM_KV_CACHE = "oom_kv_cache"
    """What is left for the KV cache cannot hold one request of `max_model_len`, or nothing is left."""
    OOM_GRAPH_CAPTURE = "oom_graph_capture"
    """Out of memory while CUDA graphs were captured."""
    OOM_WARMUP = "oom_warmup"
    """Out of memory after start-up, in the sampler's or our own warm-up."""
    OOM_RUNTIME = "oom_runtime"
    """Out of device memory while the workload ran."""
    INVALID_CONFIG = "invalid_config"
    """vLLM refuses this combination of arguments, model and device."""

    MEMORY_NOT_FREE = "memory_not_free"
    """Someone else, or a remnant of an earlier engine, holds the device's memory."""
    MODEL_UNAVAILABLE = "model_unavailable"
    """The model's files cannot be found, read or downloaded."""
    COMMUNICATION = "communication"
    """NCCL, Gloo or another collective failed or timed out."""
    DEVICE_LOST = "device_lost"
    """The device vanished or faulted (Xid, illegal access)."""
    HOST_MEMORY = "host_memory"
    """The host ran out of RAM, or something killed a process for it."""
    HOST_DISK = "host_disk"
    """A file system is full or not writable."""
    PORT_IN_USE = "port_in_use"
    """A port that the engine wanted is taken."""
    HUNG = "hung"
    """A start or a run made no progress within its budget and was ended by the watchdog."""
    NODE_LOST = "node_lost"
    """The machine that the engine ran on left the cluster."""
    CRASHED = "crashed"
    """The engine died and nothing in its log says why."""
    INTERRUPTED = "interrupted"
    """The tuner itself was ended in the middle of the trial; the configuration is queued again."""

    DOMINATED = "dominated"
    """Nobody's fault: the run was ended early, since it could only have been worse in every objective than another."""

    @property
    def is_oom(self) -> bool:
        """Whether memory of the device is what was missing."""
        return self.value.startswith("oom_")

    @property
    def is_configuration_fault(self) -> bool:
        """True: told to the optimiser as a violation and never tried again. False: the machine's fault, retried."""
        return self.is_oom or self is FailureKind.INVALID_CONFIG


class Stage(StrEnum):
    """How far an engine had come. Ordered as they happen; `GATE` means no engine was started."""

    GATE = "gate"
    CONFIG = "config"
    WEIGHTS = "weights"
    PROFILE = "profile"
    KV_CACHE = "kv_cache"
    GRAPH_CAPTURE = "graph_capture"
    WARMUP = "warmup"
    RUN = "run"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt: its kind, the stage it happened in, the line of evidence, and the memory figures if known.

    Parameters
    ----------
    message:
        The one line that shows the cause, as the operator should read it.
    needed_gib, available_gib:
        Memory that was needed and that was there, in GiB, where the evidence states them.
    fitting_tokens:
        The `max_model_len` that would fit, where vLLM's text states it.
    at_least:
        Objective -> lower bound, for a run that was ended because it was `dominated`.
    """

    kind: FailureKind
    stage: Stage
    message: str
    needed_gib: float | None = None
    available_gib: float | None = None
    fitting_tokens: int | None = None
    at_least: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What happened to one request. Times in seconds on the run's clock.

    Parameters
    ----------
    scheduled_s, sent_s:
        When the request should have arrived and when the driver really handed it to the engine.
    queued_s, first_scheduled_s:
        The engine's own stamps, shifted onto the run's clock; `None` where the engine does not report them.
    first_token_s, last_token_s:
        Arrival at the client of the first and last non-empty output token.
    token_times_s:
        Arrival of each output token, one entry a token: tokens that arrived together share a time.
    repeat:
        Which repeat of the workload this request belongs to, from 0.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    scheduled_s: float
    sent_s: float
    queued_s: float | None = None
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    preemptions: int = 0
    token_times_s: tuple[float, ...] = ()
    repeat: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the engine's scheduler, as vLLM's statistics interface reports it.

    `kv_usage` is a share of the pool (0 to 1); `prefill_tokens` and `decode_tokens` are those computed in this step;
    `prefix_queries` and `prefix_hits` are tokens looked up and found in the prefix cache in this step.
    """

    start_s: float
    duration_s: float
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    kv_usage: float
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    repeat: int = 0


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One reading of one device. Fields that the device does not offer are `None`.

    `device` is the NVML UUID, or "host" for CPU and RAM through psutil.
    """

    at_s: float
    device: str
    memory_used_gib: float | None = None
    memory_total_gib: float | None = None
    utilisation: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    throttle_reasons: int | None = None


@dataclass(frozen=True, slots=True)
class SpeedProbe:
    """How fast the machine is now: one 512-token prefill and 32 decode steps, alone, with fresh token ids.

    `prefill_s` is the time to the first token; `decode_step_s` the median gap between the tokens after it.
    """

    prefill_s: float
    decode_step_s: float


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine says about itself once it runs, and what its start cost.

    Parameters
    ----------
    engine:
        `"vllm"` for a real engine, `"twin"` for the predicting one.
    start_s, warmup_s, stop_s:
        Seconds from the call to a ready engine, of the warm-up, and of the stop with its proof; 0 while unknown.
    kv_tokens, kv_gib:
        Size of the KV pool of one device, in tokens and GiB.
    kv_tokens_needed:
        Tokens that the pool must hold for one request of `max_model_len`.
    effective_args:
        The engine arguments that vLLM really used, defaults and clamps resolved; JSON values only.
    """

    engine: str
    vllm_version: str
    device_name: str
    device_count: int
    model: str
    start_s: float
    kv_tokens: int | None = None
    kv_gib: float | None = None
    kv_tokens_needed: int | None = None
    weights_gib: float | None = None
    max_model_len: int | None = None
    warmup_s: float = 0.0
    stop_s: float = 0.0
    effective_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The facts of one run of a workload on one engine.

    Parameters
    ----------
    requests:
        One record a request, over all repeats. Requests that got lost are there, with `error` set.
    duration_s:
        Length of each repeat, from its first scheduled arrival to its last token.
    speed_before, speed_after:
        The speed probe around the workload; `None` where it was switched off.
    predicted:
        True for everything that comes from the twin. A predicted value is never ranked with measured ones.
    notes:
        Evidence gathered beside the rows that validity looks at, such as `{"foreign_processes": 1}`.
    """

    engine: EngineFacts
    workload_fingerprint: str
    requests: tuple[RequestRecord, ...]
    steps: tuple[StepRecord, ...]
    device: tuple[DeviceSample, ...]
    duration_s: tuple[float, ...]
    speed_before: SpeedProbe | None = None
    speed_after: SpeedProbe | None = None
    predicted: bool = False
    notes: Mapping[str, float] = field(default_factory=dict)
