"""The named metrics: what each means, its unit and direction, and all of them computed from one measurement.

A name says its unit. `ttft_p95_s@2048` is the metric over prompts of 2048 tokens, `ttft_p95_s@1025-2048` over a range
(used when a workload has more than 12 lengths), and `ttft_p95_s_corrected` is divided by the speed index.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from objectives.engine_use import device_use, step_use
from objectives.intervals import Interval
from objectives.latency import Latencies
from objectives.measurement import EngineFacts, Measurement
from objectives.summary import BY_PROMPT_LENGTH, STATISTICS, summarise
from objectives.throughput import arrival_rates, rates

Direction = Literal["minimize", "maximize"]
Speed = Literal["time", "rate", "none"]

CORRECTED = "_corrected"


@dataclass(frozen=True, slots=True)
class Metric:
    """One named metric.

    Parameters
    ----------
    direction:
        Which way is better when it is an objective.
    speed:
        How it follows the speed of the machine: a `time` is longer on a slow one, a `rate` lower, `none` of the rest
        is corrected.
    """

    name: str
    unit: str
    direction: Direction
    description: str
    speed: Speed = "none"


class UnknownMetricError(LookupError):
    """A name that no metric has; `suggestion` is the nearest one, if any is near."""

    def __init__(self, name: str, suggestion: str | None) -> None:
        self.name = name
        self.suggestion = suggestion
        super().__init__(f"there is no metric {name!r}" + (f"; did you mean {suggestion!r}?" if suggestion else ""))


class Computed(NamedTuple):
    """All metrics of a measurement: values, 95% intervals where there are any, and sentences about them."""

    values: dict[str, float]
    intervals: dict[str, Interval]
    notes: tuple[str, ...]


_LATENCIES = {
    "ttft": "time from scheduled arrival to the first token",
    "tpot": "time per output token after the first, of one request",
    "itl": "gap between two output tokens, over all gaps",
    "e2el": "time from scheduled arrival to the last token",
    "queue": "time in the engine's queue",
    "ttft_sent": "time from sending to the first token",
    "ttft_per_1k_prompt": "time to first token per 1,000 prompt tokens",
}
_OTHERS = (
    Metric("itl_std_s", "s", "minimize", "standard deviation of the gaps between output tokens", "time"),
    Metric("requests_per_s", "1/s", "maximize", "requests served per second", "rate"),
    Metric("output_tokens_per_s", "tokens/s", "maximize", "output tokens per second", "rate"),
    Metric("total_tokens_per_s", "tokens/s", "maximize", "prompt and output tokens per second", "rate"),
    Metric("goodput_requests_per_s", "1/s", "maximize", "requests per second that keep every limit of the slo"),
    Metric("requested_rate_per_s", "1/s", "maximize", "arrivals per second as scheduled"),
    Metric("achieved_rate_per_s", "1/s", "maximize", "arrivals per second as sent"),
    Metric("kv_use_mean", "share", "minimize", "mean share of the KV pool in use"),
    Metric("kv_use_max", "share", "minimize", "largest share of the KV pool in use"),
    Metric("running_mean", "requests", "maximize", "requests that run at once, mean over time"),
    Metric("running_max", "requests", "maximize", "requests that run at once, at most"),
    Metric("waiting_mean", "requests", "minimize", "requests that wait in the engine, mean over time"),
    Metric("waiting_max", "requests", "minimize", "requests that wait in the engine, at most"),
    Metric("preemptions", "count", "minimize", "requests thrown out of the KV pool to be computed again"),
    Metric("prefix_hit_rate", "share", "maximize", "prompt tokens found in the prefix cache"),
    Metric("device_memory_peak_gib", "GiB", "minimize", "memory in use on the fullest accelerator, at most"),
    Metric("device_utilisation_mean", "share", "maximize", "utilisation of the accelerators"),
    Metric("device_temperature_max_c", "°C", "minimize", "temperature of the hottest accelerator"),
    Metric("device_sm_clock_mean_mhz", "MHz", "maximize", "clock of the accelerators"),
    Metric("energy_per_output_token_j", "J", "minimize", "energy of all accelerators per output token"),
    Metric("host_memory_peak_gib", "GiB", "minimize", "RAM in use on the host, at most"),
    Metric("host_utilisation_mean", "share", "minimize", "CPU utilisation of the host"),
    Metric("start_s", "s", "minimize", "time from the call to a ready engine"),
    Metric("warmup_s", "s", "minimize", "time of the warm-up"),
    Metric(
        "speed_index",
        "ratio",
        "minimize",
        "times as slow as the machine was for the reference, by the speed probe, where that is alike",
    ),
    Metric("stop_s", "s", "minimize", "time to stop the engine and prove its memory free"),
)


def _latency_metrics() -> list[Metric]:
    return [
        Metric(f"{kind}_{statistic}_s", "s", "minimize", f"{what}, {statistic}", "time")
        for kind, what in _LATENCIES.items()
        for statistic in STATISTICS
    ]


METRICS: Mapping[str, Metric] = {m.name: m for m in (*_latency_metrics(), *_OTHERS)}
"""Every metric by its plain name."""

_NAME = re.compile(rf"(?P<base>.+?)(?P<group>@\d+(?:-\d+)?)?(?P<corrected>{CORRECTED})?")


def names() -> tuple[str, ...]:
    """Plain names of all metrics."""
    return tuple(METRICS)


def lookup(name: str) -> Metric:
    """Find the metric of a name, also with `@` and a prompt length, and with `_corrected`.

    Raises
    ------
    UnknownMetricError
        With the nearest name. Also for a prompt length on a metric that is not told apart by length, and for a
        correction of one that does not follow the speed of the machine.
    """
    match = _NAME.fullmatch(name)
    metric = METRICS.get(match["base"]) if match else None
    if match is None or metric is None:
        near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.6)
        raise UnknownMetricError(name, near[0] if near else None)
    corrected = match["corrected"] or ""
    if match["group"] and not is_by_prompt_length(metric.name):
        raise UnknownMetricError(name, metric.name + corrected)
    if corrected and metric.speed == "none":
        raise UnknownMetricError(name, metric.name)
    words = metric.description
    if match["group"]:
        words += f"; prompts of {match['group'][1:]} tokens"
    if corrected:
        words += "; corrected for the speed of the machine"
    return Metric(name, metric.unit, metric.direction, words, "none" if corrected else metric.speed)


def is_by_prompt_length(name: str) -> bool:
    """Whether the metric of this plain name is also computed for each prompt length."""
    kinds = (*BY_PROMPT_LENGTH, "itl")
    return name == "itl_std_s" or any(name == f"{kind}_{statistic}_s" for kind in kinds for statistic in STATISTICS)


def compute_all(measurement: Measurement, slo: Mapping[str, float] | None = None) -> Computed:
    """Every metric that this measurement defines.

    Requests that were not served add nothing; a metric without data is absent. All values and ends of intervals are
    finite.

    Parameters
    ----------
    slo:
        Limits that a request has to keep to count as goodput, such as `{"ttft_s": 2.0, "tpot_s": 0.08}`.

    Raises
    ------
    ValueError
        For a service level that names no latency.
    """
    latencies = Latencies.of(measurement.requests)
    summary = summarise(latencies)
    rate_values, rate_intervals = rates(measurement, latencies, slo)
    values = {
        **summary.values,
        **rate_values,
        **arrival_rates(measurement),
        **step_use(measurement),
        **device_use(measurement),
        **_engine_times(measurement.engine),
    }
    intervals = {**summary.intervals, **rate_intervals}
    return Computed(
        {name: value for name, value in values.items() if math.isfinite(value)},
        {name: ends for name, ends in intervals.items() if all(map(math.isfinite, ends))},
        summary.notes(),
    )


def _engine_times(engine: EngineFacts) -> dict[str, float]:
    """Seconds of start, warm-up and stop; 0 stands for unknown in the facts, and unknown is absent here."""
    times = {"start_s": engine.start_s, "warmup_s": engine.warmup_s, "stop_s": engine.stop_s}
    return {name: seconds for name, seconds in times.items() if seconds > 0}
