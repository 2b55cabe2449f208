"""Rates of a run: requests, tokens and goodput per second, and whether requests arrived as fast as asked.

Every rate is a sum over all repeats divided by the sum of their lengths; a request that was not served adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from objectives.intervals import Bootstrap, FloatArray, Interval
from objectives.latency import Latencies
from objectives.measurement import Measurement, RequestRecord

SLO_KEYS = ("ttft_s", "tpot_s", "e2el_s")


def check_slo(slo: Mapping[str, float]) -> None:
    """Check that a service level names known latencies and positive limits in seconds.

    Raises
    ------
    ValueError
        Names the first key that is wrong.
    """
    for key, limit in slo.items():
        if key not in SLO_KEYS:
            raise ValueError(f"slo: {key!r} is not a latency of one request; use {', '.join(SLO_KEYS)}")
        if not limit > 0:
            raise ValueError(f"slo: {key} must be a positive number of seconds, not {limit!r}")


def meets_slo(latencies: Latencies, slo: Mapping[str, float]) -> FloatArray:
    """1.0 for each request that keeps all limits, else 0.0; shape (n,).

    A request of one token has no TPOT and so none that is too long.
    """
    check_slo(slo)
    good = np.ones(latencies.repeats.size, dtype=np.bool_)
    for key, limit in slo.items():
        column: FloatArray = getattr(latencies, key)
        good &= ~(column > limit)
    return good.astype(np.float64)


def rates(
    measurement: Measurement, latencies: Latencies, slo: Mapping[str, float] | None = None
) -> tuple[dict[str, float], dict[str, Interval]]:
    """All throughput metrics with their intervals.

    A rate has an interval from two repeats on; goodput has one for a single repeat too, since which requests keep
    their limits varies within it. Nothing is returned for a run without served requests or without a length.
    """
    durations = _durations_s(measurement, latencies)
    if durations is None:
        return {}, {}
    ones = np.ones(latencies.repeats.size)
    amounts = {
        "requests_per_s": ones,
        "output_tokens_per_s": latencies.output_tokens.astype(np.float64),
        "total_tokens_per_s": (latencies.prompt_tokens + latencies.output_tokens).astype(np.float64),
    }
    if slo:
        amounts["goodput_requests_per_s"] = meets_slo(latencies, slo)
    values = {name: float(a.sum() / durations.sum()) for name, a in amounts.items()}
    if latencies.repeats.size < 2:
        return values, {}
    bootstrap = Bootstrap(latencies.repeats)
    repeated = bootstrap.labels.size > 1
    with_interval = [n for n in amounts if repeated or n == "goodput_requests_per_s"]
    return values, {name: bootstrap.rate(amounts[name], durations) for name in with_interval}


def arrival_rates(measurement: Measurement) -> dict[str, float]:
    """`requested_rate_per_s` and `achieved_rate_per_s`: arrivals per second as scheduled and as sent.

    (n - 1) / (last - first) of each repeat, averaged over the gaps of all repeats. A rate is absent where all
    requests arrive at once.
    """
    spans = {
        "requested_rate_per_s": _arrival_span(measurement, lambda r: r.scheduled_s),
        "achieved_rate_per_s": _arrival_span(measurement, lambda r: r.sent_s),
    }
    return {name: gaps / span_s for name, (gaps, span_s) in spans.items() if span_s > 0}


def _durations_s(measurement: Measurement, latencies: Latencies) -> FloatArray | None:
    """Lengths of the repeats that served a request, in ascending order of repeat; `None` where one is not known."""
    labels = np.unique(latencies.repeats)
    if labels.size == 0 or labels[-1] >= len(measurement.duration_s):
        return None
    durations = np.asarray(measurement.duration_s, dtype=np.float64)[labels]
    return durations if bool((durations > 0).all()) else None


def _arrival_span(measurement: Measurement, at: Callable[[RequestRecord], float]) -> tuple[int, float]:
    """Gaps between arrivals and the seconds that they take, over all repeats."""
    by_repeat: dict[int, list[float]] = {}
    for record in measurement.requests:
        by_repeat.setdefault(record.repeat, []).append(at(record))
    gaps = sum(len(times) - 1 for times in by_repeat.values())
    return gaps, sum(max(times) - min(times) for times in by_repeat.values())
