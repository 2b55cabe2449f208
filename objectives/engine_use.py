"""How the engine and its devices were used: KV pool, queue, prefix cache, memory, utilisation, energy.

Means over steps are weighted by the length of a step. What was not observed is absent, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from objectives.intervals import FloatArray
from objectives.latency import is_served
from objectives.measurement import DeviceSample, Measurement

HOST = "host"
"""`DeviceSample.device` of the CPU and RAM series."""


def step_use(measurement: Measurement) -> dict[str, float]:
    """KV use, running and waiting requests, preemptions and prefix-cache hit rate from the engine's step rows."""
    steps = measurement.steps
    if not steps:
        return {}
    durations = np.array([s.duration_s for s in steps], dtype=np.float64)
    weights = durations if durations.sum() > 0 else np.ones(len(steps))
    kv = np.array([s.kv_usage for s in steps], dtype=np.float64)
    running = np.array([s.running for s in steps], dtype=np.float64)
    waiting = np.array([s.waiting for s in steps], dtype=np.float64)
    values = {
        "kv_use_mean": float(np.average(kv, weights=weights)),
        "kv_use_max": float(kv.max()),
        "running_mean": float(np.average(running, weights=weights)),
        "running_max": float(running.max()),
        "waiting_mean": float(np.average(waiting, weights=weights)),
        "waiting_max": float(waiting.max()),
        "preemptions": float(sum(s.preemptions for s in steps)),
    }
    hit_rate = prefix_hit_rate(measurement)
    return values if hit_rate is None else {**values, "prefix_hit_rate": hit_rate}


def prefix_hit_rate(measurement: Measurement) -> float | None:
    """Share of looked-up prompt tokens that the prefix cache held; from the requests where steps do not tell.

    `None` where neither does, as when prefix caching is off.
    """
    queries = sum(s.prefix_queries for s in measurement.steps)
    if queries > 0:
        return sum(s.prefix_hits for s in measurement.steps) / queries
    told = [r for r in measurement.requests if r.cached_tokens is not None]
    prompt_tokens = sum(r.prompt_tokens for r in told)
    return sum(r.cached_tokens or 0 for r in told) / prompt_tokens if prompt_tokens else None


def device_use(measurement: Measurement) -> dict[str, float]:
    """Memory peak, utilisation, power, temperature and energy of the accelerators, and the host's own memory and CPU.

    A peak is that of the fullest device, a mean runs over all readings of all devices, power is the sum of devices.
    """
    accelerators = [s for s in measurement.device if s.device != HOST]
    host = [s for s in measurement.device if s.device == HOST]
    candidates = {
        "device_memory_peak_gib": _max(s.memory_used_gib for s in accelerators),
        "device_utilisation_mean": _mean(s.utilisation for s in accelerators),
        "device_temperature_max_c": _max(s.temperature_c for s in accelerators),
        "device_sm_clock_mean_mhz": _mean(s.sm_clock_mhz for s in accelerators),
        "energy_per_output_token_j": energy_per_output_token_j(measurement),
        "host_memory_peak_gib": _max(s.memory_used_gib for s in host),
        "host_utilisation_mean": _mean(s.utilisation for s in host),
    }
    return {name: value for name, value in candidates.items() if value is not None}


def energy_per_output_token_j(measurement: Measurement) -> float | None:
    """Joules of all accelerators per output token: the power readings integrated by the trapezoid rule.

    `None` without two power readings of one device, or without output.
    """
    tokens = sum(r.output_tokens for r in measurement.requests if is_served(r))
    series = power_series(measurement.device)
    if not series or not tokens:
        return None
    return float(sum(np.trapezoid(power, at) for at, power in series)) / tokens


def power_series(samples: Iterable[DeviceSample]) -> list[tuple[FloatArray, FloatArray]]:
    """`(seconds, watts)` of each device and repeat with at least two power readings.

    Readings are cut where the time of a device goes back, as it does when the clock starts again with a repeat: no
    energy is counted between the pieces. In a series on one clock the short time between repeats counts.
    """
    by_device: dict[str, list[tuple[float, float]]] = {}
    for s in samples:
        if s.device != HOST and s.power_w is not None:
            by_device.setdefault(s.device, []).append((s.at_s, s.power_w))
    series = []
    for readings in by_device.values():
        at, power = np.array(readings, dtype=np.float64).T
        cuts = np.flatnonzero(np.diff(at) < 0) + 1
        series += [(a, p) for a, p in zip(np.split(at, cuts), np.split(power, cuts), strict=True) if a.size > 1]
    return series


def _max(values: Iterable[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
