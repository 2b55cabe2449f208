"""Measurements for the tests of `objectives`: small, whole, and easy to bend out of shape."""

import dataclasses
from typing import Any

from objectives.measurement import (
    DeviceSample,
    EngineFacts,
    Measurement,
    RequestRecord,
    SpeedProbe,
    StepRecord,
)
from objectives.validity import Expectations

GPU = "GPU-1"
PROBE = SpeedProbe(prefill_s=0.4, decode_step_s=0.05)


def record(index: int = 0, **changes: Any) -> RequestRecord:
    """One served request: scheduled at `index` s, first token 1 s later, then one every 0.1 s."""
    at = float(index)
    tokens = changes.get("output_tokens", 5)
    times = changes.get("token_times_s", tuple(at + 1.0 + 0.1 * k for k in range(tokens)))
    facts: dict[str, Any] = {
        "request_id": f"r{changes.get('repeat', 0)}-{index}",
        "prompt_tokens": 2000,
        "output_tokens": tokens,
        "scheduled_s": at,
        "sent_s": at + 0.001,
        "queued_s": at + 0.002,
        "first_scheduled_s": at + 0.25,
        "first_token_s": times[0] if times else None,
        "last_token_s": times[-1] if times else None,
        "cached_tokens": 0,
        "finish_reason": "length",
        "token_times_s": times,
    }
    return RequestRecord(**(facts | changes))


def step(start_s: float = 0.0, **changes: Any) -> StepRecord:
    facts: dict[str, Any] = {
        "start_s": start_s,
        "duration_s": 0.1,
        "prefill_tokens": 256,
        "decode_tokens": 4,
        "running": 4,
        "waiting": 2,
        "kv_usage": 0.5,
        "preemptions": 0,
        "prefix_queries": 2000,
        "prefix_hits": 0,
    }
    return StepRecord(**(facts | changes))


def device_sample(at_s: float = 0.0, **changes: Any) -> DeviceSample:
    facts: dict[str, Any] = {
        "at_s": at_s,
        "device": GPU,
        "memory_used_gib": 36.0,
        "memory_total_gib": 40.0,
        "utilisation": 0.9,
        "power_w": 250.0,
        "temperature_c": 70.0,
        "sm_clock_mhz": 1800.0,
        "throttle_reasons": 0x04,
    }
    return DeviceSample(**(facts | changes))


ENGINE = EngineFacts(
    engine="vllm",
    vllm_version="0.32.0",
    device_name="test device",
    device_count=1,
    model="test model",
    start_s=20.0,
    kv_tokens=10_000,
    kv_gib=2.0,
    kv_tokens_needed=4_000,
    warmup_s=5.0,
    stop_s=3.0,
)


def measurement(**changes: Any) -> Measurement:
    """Twenty served requests of five tokens, three steps, three readings of a GPU and of the host; all valid."""
    facts: dict[str, Any] = {
        "engine": ENGINE,
        "workload_fingerprint": "0123456789abcdef",
        "requests": tuple(record(i) for i in range(20)),
        "steps": tuple(step(0.1 * i) for i in range(3)),
        "device": (
            *(device_sample(10.0 * i) for i in range(3)),
            *(device_sample(10.0 * i, device="host", power_w=None, throttle_reasons=None) for i in range(3)),
        ),
        "duration_s": (20.4,),
        "speed_before": PROBE,
        "speed_after": PROBE,
    }
    return Measurement(**(facts | changes))


def with_requests(**changes: Any) -> Measurement:
    """A measurement in which the first request is changed."""
    whole = measurement()
    first = dataclasses.replace(whole.requests[0], **changes)
    return dataclasses.replace(whole, requests=(first, *whole.requests[1:]))


EXPECTED = Expectations(requests=20, output_tokens=100, objectives=("ttft_p95_s", "tpot_p95_s"))
