"""Statistics of the latencies of a run, under their metric names: over all requests and by prompt length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from objectives.intervals import Bootstrap, FloatArray, Interval, percentile, requests_needed
from objectives.latency import Latencies, prompt_groups

PERCENTS: Mapping[str, float] = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}
STATISTICS = ("mean", *PERCENTS, "max")
PER_REQUEST = ("ttft", "tpot", "e2el", "queue", "ttft_sent", "ttft_per_1k_prompt")
"""Latencies with one value a request; the column of `Latencies` is the name with `_s`."""
BY_PROMPT_LENGTH = ("ttft", "tpot", "e2el", "queue")
"""Those that are told apart by prompt length, as ITL is."""


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Values and 95% intervals by metric name.

    `thin` names the percentiles that rest on fewer values than they need: metric -> (percentile, number of values).
    For ITL these are gaps, for all others requests.
    """

    values: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, Interval] = field(default_factory=dict)
    thin: dict[str, tuple[str, int]] = field(default_factory=dict)

    def notes(self) -> tuple[str, ...]:
        """One sentence for each percentile that rests on too few values anywhere."""
        sentences = []
        for name, percent in PERCENTS.items():
            thin = {metric: size for metric, (p, size) in self.thin.items() if p == name}
            overall = [f"{m} ({n})" for m, n in thin.items() if "@" not in m]
            grouped = len(thin) - len(overall)
            if grouped:
                overall.append(f"{grouped} metrics by prompt length")
            if overall:
                sentences.append(f"{name} rests on fewer than {requests_needed(percent)} values: {', '.join(overall)}")
        return tuple(sentences)


def summarise(latencies: Latencies) -> LatencySummary:
    """Mean, percentiles and maximum of every latency, over all requests and by prompt length.

    The maximum has no interval, since a bootstrap cannot see beyond it; neither has anything that rests on a single
    request.
    """
    summary = LatencySummary()
    _add_latencies(summary, latencies, PER_REQUEST, "")
    for group in prompt_groups(latencies.prompt_tokens):
        rows = latencies.of_prompts(group.low, group.high)
        _add_latencies(summary, rows, BY_PROMPT_LENGTH, f"@{group.label}")
    return summary


def _add_latencies(summary: LatencySummary, latencies: Latencies, kinds: tuple[str, ...], suffix: str) -> None:
    draws: dict[bytes, Bootstrap] = {}

    def bootstrap_of(rows: NDArray[np.bool_]) -> Bootstrap:
        # Latencies that are defined for the same requests share their draws.
        key = rows.tobytes()
        if key not in draws:
            draws[key] = Bootstrap(latencies.repeats[rows])
        return draws[key]

    for kind in kinds:
        column: FloatArray = getattr(latencies, f"{kind}_s")
        known = ~np.isnan(column)
        if known.any():
            _add_values(summary, kind, column[known], suffix)
        if known.sum() > 1:
            _add_intervals(summary, kind, column[known], bootstrap_of(known), suffix)
    if latencies.gaps_s.size:
        _add_values(summary, "itl", latencies.gaps_s, suffix)
        summary.values[f"itl_std_s{suffix}"] = float(latencies.gaps_s.std())
    if np.unique(latencies.gap_owners).size > 1:
        _add_gap_intervals(summary, latencies, bootstrap_of(np.ones(latencies.repeats.size, dtype=np.bool_)), suffix)


def _add_values(summary: LatencySummary, kind: str, values: FloatArray, suffix: str) -> None:
    summary.values[f"{kind}_mean_s{suffix}"] = float(values.mean())
    for name, percent in PERCENTS.items():
        metric = f"{kind}_{name}_s{suffix}"
        summary.values[metric] = percentile(values, percent)
        if values.size < requests_needed(percent):
            summary.thin[metric] = (name, values.size)
    summary.values[f"{kind}_max_s{suffix}"] = float(values.max())


def _add_intervals(summary: LatencySummary, kind: str, values: FloatArray, bootstrap: Bootstrap, suffix: str) -> None:
    summary.intervals[f"{kind}_mean_s{suffix}"] = bootstrap.mean(values)
    ends = bootstrap.percentiles(values, tuple(PERCENTS.values()))
    summary.intervals.update({f"{kind}_{p}_s{suffix}": i for p, i in zip(PERCENTS, ends, strict=True)})


def _add_gap_intervals(summary: LatencySummary, latencies: Latencies, bootstrap: Bootstrap, suffix: str) -> None:
    mean, spread = bootstrap.gap_moments(latencies.gaps_s, latencies.gap_owners)
    ends = bootstrap.gap_percentiles(latencies.gaps_s, latencies.gap_owners, tuple(PERCENTS.values()))
    summary.intervals.update({f"itl_mean_s{suffix}": mean, f"itl_std_s{suffix}": spread})
    summary.intervals.update({f"itl_{p}_s{suffix}": i for p, i in zip(PERCENTS, ends, strict=True)})
