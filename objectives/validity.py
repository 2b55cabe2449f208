"""Reasons that make a measurement void: it must not be compared, whatever its numbers say.

Each reason is looked for by itself and comes with its evidence. `Measurement.notes` is where the gatherers of facts
leave what the rows cannot show; the keys that are understood here are the `NOTE_` constants.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from objectives.engine_use import HOST, prefix_hit_rate
from objectives.intervals import percentile
from objectives.latency import is_served
from objectives.measurement import Measurement, SpeedProbe
from objectives.speed import mean_probe, speed_index
from objectives.throughput import arrival_rates

NOTE_HELD_BACK = "held_back"
"""Requests that the cap on concurrency kept waiting in the client: their late sending is intended."""
NOTE_CLIENT_LATENESS = "client_lateness_p99_s"
"""99th percentile of how much later than it could the client sent a request, waits for the cap left out."""
NOTE_UNSENT = "unsent"
"""Requests that were never sent."""
NOTE_FOREIGN_PROCESSES = "foreign_processes"
"""Largest number of processes of others that were seen on the devices."""

THROTTLE_MASK = 0x08 | 0x20 | 0x40 | 0x80
"""NVML's hardware slowdown, software and hardware thermal slowdown, and power brake (nvml.h, nvmlClocksEventReason*).

The software power cap (0x04) is left out: a large card meets it in ordinary work, more often the harder a
configuration drives it, so it is a property of the configuration and not a disturbance.
"""


@dataclass(frozen=True, slots=True)
class VoidReason:
    """Why a measurement must not be compared: a short code, the evidence in words, and the number behind it."""

    code: str
    evidence: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class ValidityLimits:
    """Where a disturbance begins to count; each default has its reason.

    Parameters
    ----------
    client_lateness_p99_s:
        0.1 s is 5% of a TTFT of 2 s, and far above the milliseconds by which a healthy event loop is late.
    arrival_rate_error:
        Share by which the achieved arrival rate may miss the scheduled one. Near saturation waiting time grows as
        1 / (1 - load), so that 5% less load at 80% shortens the queue by about a sixth.
    throttled_share_excess:
        Share of readings with slowed clocks beyond that of the reference; 5% is above the odd reading.
    prefix_hit_rate:
        Share of prompt tokens found in the cache when nothing is shared. Blocks can be equal by chance only in their
        first few tokens, so that 1% already means that prompts were seen before.
    speed_ratio:
        Ratio of the speed index before and after. If the machine changed evenly, the mean of both is then wrong by at
        most its root, 1.14; drifts that were seen on shared machines are 1.4 to 2.
    min_requests:
        A 90th percentile needs 10 requests, and no mean of fewer has an interval worth comparing.
    """

    client_lateness_p99_s: float = 0.1
    arrival_rate_error: float = 0.05
    throttled_share_excess: float = 0.05
    prefix_hit_rate: float = 0.01
    speed_ratio: float = 1.3
    min_requests: int = 10


@dataclass(frozen=True, slots=True)
class Expectations:
    """What the workload asked for in each repeat, and which metrics the study lives on.

    Parameters
    ----------
    requests, output_tokens:
        Number of requests, and of output tokens over all of them, in one repeat.
    shares_prefixes:
        Whether prefix-cache hits are intended.
    objectives:
        Metric names that must be defined.
    """

    requests: int
    output_tokens: int
    shares_prefixes: bool = False
    objectives: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reference:
    """What the reference saw of the machine: the measure for all later trials."""

    throttled_share: float
    probe: SpeedProbe | None = None

    @classmethod
    def of(cls, measurement: Measurement) -> Reference:
        """Take the share of throttled readings and the mean speed probe of the reference's own run."""
        return cls(throttled_share(measurement) or 0.0, mean_probe(measurement))


def void_reasons(
    measurement: Measurement,
    reference: Reference | None,
    expectations: Expectations,
    limits: ValidityLimits | None = None,
) -> tuple[VoidReason, ...]:
    """Every reason for which this measurement must not be compared; empty for a valid one.

    Parameters
    ----------
    reference:
        `None` while the reference itself is measured: throttling is then taken as the machine's normal state.
    """
    limits = limits or ValidityLimits()
    return (
        *_lost_requests(measurement, expectations),
        *_too_few_requests(measurement, limits),
        *_client_lateness(measurement, limits),
        *_arrival_rate(measurement, limits),
        *_throttling(measurement, reference, limits),
        *_foreign_processes(measurement),
        *_prefix_hits(measurement, expectations, limits),
        *_speed_change(measurement, limits),
        *_single_tokens(measurement, expectations),
    )


def throttled_share(measurement: Measurement) -> float | None:
    """Largest share, over the accelerators, of readings in which heat or hardware slowed the clocks.

    `None` where no accelerator tells its throttle reasons.
    """
    readings: dict[str, list[bool]] = {}
    for sample in measurement.device:
        if sample.device != HOST and sample.throttle_reasons is not None:
            readings.setdefault(sample.device, []).append(bool(sample.throttle_reasons & THROTTLE_MASK))
    return max((sum(slowed) / len(slowed) for slowed in readings.values()), default=None)


def _lost_requests(measurement: Measurement, expectations: Expectations) -> Iterator[VoidReason]:
    repeats = max(1, len(measurement.duration_s))
    asked = expectations.requests * repeats
    bad = [r for r in measurement.requests if not is_served(r)]
    missing = max(asked - len(measurement.requests), round(measurement.notes.get(NOTE_UNSENT, 0)), 0)
    if bad or missing:
        first = next((r.error for r in bad if r.error), "no complete answer" if bad else "never sent")
        evidence = f"{len(bad) + missing} of {asked} requests got lost; the first: {first}"
        yield VoidReason("lost_requests", evidence, float(len(bad) + missing))
        return
    tokens = sum(r.output_tokens for r in measurement.requests)
    short = expectations.output_tokens * repeats - tokens
    if short > 0:
        yield VoidReason("lost_tokens", f"{short} of {short + tokens} output tokens did not arrive", float(short))


def _too_few_requests(measurement: Measurement, limits: ValidityLimits) -> Iterator[VoidReason]:
    served = sum(map(is_served, measurement.requests))
    if served < limits.min_requests:
        evidence = f"{served} requests were served; a comparison takes at least {limits.min_requests}"
        yield VoidReason("too_few_requests", evidence, float(served))


def _client_lateness(measurement: Measurement, limits: ValidityLimits) -> Iterator[VoidReason]:
    late_s = measurement.notes.get(NOTE_CLIENT_LATENESS)
    if late_s is None and measurement.requests and not measurement.notes.get(NOTE_HELD_BACK):
        late_s = percentile([r.sent_s - r.scheduled_s for r in measurement.requests], 99.0)
    if late_s is not None and late_s > limits.client_lateness_p99_s:
        evidence = f"the client sent 1% of the requests {late_s:.3f} s late or later ({limits.client_lateness_p99_s} s)"
        yield VoidReason("client_late", evidence, late_s)


def _arrival_rate(measurement: Measurement, limits: ValidityLimits) -> Iterator[VoidReason]:
    """Below the limit of lateness a difference in the whole span is jitter, however short the span."""
    rates = arrival_rates(measurement)
    if measurement.notes.get(NOTE_HELD_BACK) or len(rates) < 2:
        return
    asked, achieved = rates["requested_rate_per_s"], rates["achieved_rate_per_s"]
    gaps = len(measurement.requests) - max(1, len(measurement.duration_s))
    error = achieved / asked - 1.0
    if abs(error) > limits.arrival_rate_error and gaps * abs(1 / achieved - 1 / asked) > limits.client_lateness_p99_s:
        yield VoidReason("arrival_rate", f"{achieved:.3g} requests/s arrived where {asked:.3g} were asked for", error)


def _throttling(measurement: Measurement, reference: Reference | None, limits: ValidityLimits) -> Iterator[VoidReason]:
    share = throttled_share(measurement)
    if reference is None or share is None:
        return
    if share > reference.throttled_share + limits.throttled_share_excess:
        usual = reference.throttled_share
        evidence = f"clocks were slowed in {share:.0%} of the readings, for the reference in {usual:.0%}"
        yield VoidReason("throttled", evidence, share)


def _foreign_processes(measurement: Measurement) -> Iterator[VoidReason]:
    count = measurement.notes.get(NOTE_FOREIGN_PROCESSES, 0.0)
    if count > 0:
        yield VoidReason("foreign_process", f"{count:.0f} processes of others were on the devices", count)


def _prefix_hits(measurement: Measurement, expectations: Expectations, limits: ValidityLimits) -> Iterator[VoidReason]:
    rate = prefix_hit_rate(measurement)
    if rate is not None and not expectations.shares_prefixes and rate > limits.prefix_hit_rate:
        evidence = f"{rate:.1%} of the prompt tokens came from the prefix cache, where no two prompts share any"
        yield VoidReason("prefix_hits", evidence, rate)


def _speed_change(measurement: Measurement, limits: ValidityLimits) -> Iterator[VoidReason]:
    if measurement.speed_before is None or measurement.speed_after is None:
        return
    ratio = speed_index(measurement.speed_after, measurement.speed_before)
    if max(ratio, 1.0 / ratio) > limits.speed_ratio:
        change = f"{ratio:.2f} times as slow" if ratio > 1 else f"{1 / ratio:.2f} times as fast"
        yield VoidReason("speed_changed", f"after the run the machine was {change} as before it", ratio)


def _single_tokens(measurement: Measurement, expectations: Expectations) -> Iterator[VoidReason]:
    wanted = [name for name in expectations.objectives if name.startswith(("tpot_", "itl_"))]
    served = [r for r in measurement.requests if is_served(r)]
    if wanted and served and all(r.output_tokens < 2 for r in served):
        yield VoidReason("single_tokens", f"every answer is one token long, which leaves {wanted[0]} undefined", 1.0)
