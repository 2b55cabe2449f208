"""Texts of memory that is missing: the host's, the device's, the KV cache's; or that somebody else holds."""

from __future__ import annotations

import re

from objectives.measurement import FailureKind, Stage
from tuner.engine.failure_rules import Rank, Rule, any_of

_DEVICE = r"(?:cuda|hip|rocm|npu|xpu|mps|musa|mlu|hpu|gpu|tpu|device|hbm|vram|triton|sycl|level.zero)"

HOST_MEMORY = (
    Rule(
        FailureKind.HOST_MEMORY,
        Rank.CAUSE,
        any_of(
            "oomkilled | oom-kill | oom_kill | oom_reaper | oom-killer | node_out_of_memory | "
            "ray.exceptions.outofmemoryerror | node running low on memory | killed due to memory pressure | "
            "killed due to high memory usage | exceeds the memory usage threshold | ray killed this worker | "
            "memory cgroup out of memory | low on resource: memory | cpuallocator | cannot allocate memory | "
            "can't allocate memory | std::bad_alloc | bad_alloc | enomem | [errno 12] | (os error 12) | "
            "_arraymemoryerror | cudahostalloc failed | "
            "cudahostregister failed: out of memory | not enough host memory | insufficient host memory | "
            "not enough cpu memory | out of host memory | host out of memory | exceeded memory limit | "
            "memory limit exceeded | systemd-oomd | cpu out of memory"
        ),
    ),
    Rule(
        FailureKind.HOST_MEMORY,
        Rank.CAUSE,
        ("out of memory: kill", "unable to allocate", "memoryerror", "memory allocation of"),
        re.compile(
            r"out of memory: kill|unable to allocate .{1,40} for an array|^memoryerror\b|[\s:(']memoryerror\b"
            r"|^memory allocation of \d+ bytes failed"
        ),
    ),
    # Ray lists the memory killer as cause (1) of several that may be.
    Rule(
        FailureKind.HOST_MEMORY, Rank.CAUSE, ("oom killer",), re.compile(r"^(?!.*(?:\(1\)|by sigkill by)).*oom killer")
    ),
    # "137" is how shells and container runtimes write SIGKILL; there it is nearly always the memory killer.
    Rule(
        FailureKind.HOST_MEMORY,
        Rank.KILLED,
        ("killed", "137"),
        re.compile(
            r"^(?:.{0,200}\s\d+\s+)?killed(?:$|\s{2,}|\s+\()"
            r"|exit(?:ed with)?[ _-]?(?:code|status(?: code)?)[\":=\s(]*137\b"
        ),
    ),
)

MEMORY_NOT_FREE = (
    Rule(
        FailureKind.MEMORY_NOT_FREE,
        Rank.CAUSE,
        any_of(
            "less than desired gpu memory utilization | less than desired cpu memory utilization | "
            "less than desired memory utilization | less than the engine's budget | "
            "error in memory profiling | release gpu memory while vllm is profiling | "
            "another process is using the gpu | memory used by other processes"
        ),
        re.compile(r"^(?!.*on kv cache allocation)"),
    ),
    Rule(
        FailureKind.MEMORY_NOT_FREE,
        Rank.CAUSE,
        ("free memory on device", "free memory on"),
        re.compile(r"free memory on (?:device|gpu|cuda|node).{0,120}(?:less than|insufficient|not enough)"),
    ),
    # vLLM's CPU backend: a positive share was left for the cache, and somebody else uses it.
    Rule(
        FailureKind.MEMORY_NOT_FREE,
        Rank.CAUSE,
        ("less than requested memory for kv",),
        re.compile(r"memory for kv \((?!-|0?\.?0+ ?/)[\d.]+/"),
        earliest=Stage.PROFILE,
    ),
)

KV_CACHE = (
    Rule(
        FailureKind.OOM_KV_CACHE,
        Rank.CAUSE,
        any_of(
            "no available memory for the cache block | estimated maximum model length is | "
            "tokens that can be stored in kv cache | larger than the available kv cache memory | "
            "larger than available kv cache memory | exceeds available mamba cache blocks | "
            "less than requested memory for kv | cannot auto-fit max_model_len | "
            "to serve at least one request | to serve even a single token | kv cache is needed | "
            "kv cache is too small | not enough kv cache | insufficient kv cache | "
            "no memory left for kv cache | no memory for kv cache | num_gpu_blocks must be"
        ),
        earliest=Stage.KV_CACHE,
    ),
    Rule(
        FailureKind.OOM_KV_CACHE,
        Rank.CAUSE,
        any_of("kv cache | kv-cache | kv_cache | cache blocks"),
        re.compile(
            r"(?:not enough|insufficient|no) (?:available |free |gpu |device )*(?:memory|space|blocks?)"
            r".{0,80}(?:kv.?cache|cache blocks)|(?:kv.?cache|cache blocks).{0,80}"
            r"(?:too small|not (?:large|big) enough|cannot (?:hold|fit)|insufficient|not enough|not fit)"
        ),
        earliest=Stage.KV_CACHE,
    ),
)

DEVICE_MEMORY = (
    Rule(
        None,
        Rank.CAUSE,
        ("out of memory occurred when warming up", "out of memory during warm"),
        earliest=Stage.PROFILE,
    ),
    Rule(
        None,
        Rank.CAUSE,
        any_of(
            "outofmemoryerror | cuda_error_out_of_memory | cudaerrormemoryallocation | hiperroroutofmemory | "
            "hiperrormemoryallocation | status_alloc_failed | out_of_device_memory | resource_exhausted | "
            "not enough gpu memory | not enough device memory | insufficient gpu memory | "
            "insufficient device memory | out of gpu memory | out of device memory | tried to allocate | "
            "not enough memory | insufficient memory | insufficient_memory | pi_error_out_of_resources | "
            "ur_result_error_out_of_resources"
        ),
    ),
    Rule(
        None,
        Rank.CAUSE,
        ("out of memory", "out-of-memory", "outofmemory"),
        re.compile(
            rf"{_DEVICE}.{{0,80}}out.?of.?memory|out.?of.?memory.{{0,80}}{_DEVICE}"
            r"|(?:error|exception|failure|failed)\b.{0,60}out.?of.?memory|^out of memory\b"
        ),
    ),
    Rule(
        None,
        Rank.CAUSE,
        any_of("failed to allocate | allocation failed | failed to alloc | unable to allocate"),
        re.compile(rf"alloc.{{0,80}}{_DEVICE}|{_DEVICE}.{{0,60}}alloc"),
    ),
)
