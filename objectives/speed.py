"""How fast the machine is now, and how large a difference has to be to mean anything.

The speed index compares two runs of the same short probe; the noise floor comes from runs of the same configuration;
drift is a sentinel that leaves the floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from objectives.intervals import Interval
from objectives.measurement import Measurement, SpeedProbe
from objectives.metrics import CORRECTED, Speed, UnknownMetricError, lookup


def speed_index(probe: SpeedProbe, reference: SpeedProbe) -> float:
    """How many times as long the probe takes as the reference's: above 1 on a slower machine.

    Geometric mean of the ratios of prefill (bound by arithmetic) and decode step (bound by memory bandwidth), so that
    both count the same and exchanging probe and reference gives the reciprocal.

    Raises
    ------
    ValueError
        For a probe with a time that is not positive.
    """
    times = (probe.prefill_s, probe.decode_step_s, reference.prefill_s, reference.decode_step_s)
    if not all(t > 0 and math.isfinite(t) for t in times):
        raise ValueError(f"a speed probe needs positive times, got {times}")
    return math.sqrt((times[0] / times[2]) * (times[1] / times[3]))


def mean_probe(measurement: Measurement) -> SpeedProbe | None:
    """Geometric mean of the probes before and after the workload, or the only one; `None` where there is none."""
    return mean_of_probes([p for p in (measurement.speed_before, measurement.speed_after) if p is not None])


def mean_of_probes(probes: Sequence[SpeedProbe]) -> SpeedProbe | None:
    """Geometric mean of some probes; `None` of none."""
    if not probes:
        return None
    return SpeedProbe(
        prefill_s=math.prod(p.prefill_s for p in probes) ** (1.0 / len(probes)),
        decode_step_s=math.prod(p.decode_step_s for p in probes) ** (1.0 / len(probes)),
    )


def correct(values: Mapping[str, float], index: float) -> dict[str, float]:
    """Corrected twins of the times (divided by the index) and rates (multiplied), named `NAME_corrected`.

    The raw values stay as they are, and what does not follow the machine's speed (shares, memory, goodput under
    fixed limits, metrics of the user's own) has no twin. The correction is of first order: it takes all work to be
    slower by the same factor, while queues under a fixed arrival rate grow faster than that.
    """
    return {name + CORRECTED: value * factor for name, value, factor in _factors(values, index)}


def correct_intervals(intervals: Mapping[str, Interval], index: float) -> dict[str, Interval]:
    """Intervals of the corrected values, as in `correct`. The uncertainty of the index itself is not in them."""
    factors = {name: factor for name, _, factor in _factors(dict.fromkeys(intervals, 0.0), index)}
    return {n + CORRECTED: (intervals[n][0] * f, intervals[n][1] * f) for n, f in factors.items()}


def _factors(values: Mapping[str, float], index: float) -> list[tuple[str, float, float]]:
    by_kind: dict[Speed, float] = {"time": 1.0 / index, "rate": index}
    kinds = {name: _speed_of(name) for name in values}
    return [(n, v, by_kind[kinds[n]]) for n, v in values.items() if kinds[n] in by_kind]


def _speed_of(name: str) -> Speed:
    try:
        return lookup(name).speed
    except UnknownMetricError:
        return "none"


def noise_floor(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Relative difference that two runs of one configuration stay below with 95% probability, by metric.

    The repeatability limit of ISO 5725-6 (1.96 √2 standard deviations), relative to the mean, with the standard
    deviation of so few runs freed of its bias (the c4 of control charts). A metric that is missing in a run, or whose
    mean is 0 while it varies, has none.

    Parameters
    ----------
    values:
        Metrics of at least two runs of the same configuration, each on an engine of its own.

    Raises
    ------
    ValueError
        For fewer than two runs.
    """
    k = len(values)
    if k < 2:
        raise ValueError(f"a noise floor takes at least two runs of the same configuration, got {k}")
    c4 = math.sqrt(2.0 / (k - 1)) * math.gamma(k / 2) / math.gamma((k - 1) / 2)
    floors = {}
    for name in sorted(set.intersection(*(set(v) for v in values))):
        sample = np.array([v[name] for v in values], dtype=np.float64)
        spread, mean = float(sample.std(ddof=1)) / c4, abs(float(sample.mean()))
        if spread == 0.0 or mean > 0.0:
            floors[name] = 1.96 * math.sqrt(2.0) * spread / mean if spread else 0.0
    return floors


def relative_difference(a: float, b: float) -> float:
    """Size of a - b relative to the mean size of both: symmetric, 0 for equal numbers and at most 2."""
    size = (abs(a) + abs(b)) / 2.0
    return abs(a - b) / size if size > 0 else 0.0


def distinguishable(a: float, b: float, floor: float) -> bool:
    """Whether two values differ by more than the noise floor of their metric."""
    return relative_difference(a, b) > floor


@dataclass(frozen=True, slots=True)
class Drift:
    """A sentinel that left the noise floor.

    Parameters
    ----------
    index:
        Position of the sentinel in the series; trials since the one before it (`index - 1`) are in doubt.
    relative_change:
        value / reference - 1.
    """

    index: int
    metric: str
    relative_change: float
    floor: float


def drifts(series: Sequence[Mapping[str, float]], floors: Mapping[str, float]) -> tuple[Drift, ...]:
    """Every sentinel and metric that differs from the first of the series by more than the noise floor.

    Parameters
    ----------
    series:
        Metrics of the reference, and then of each time that it was measured again.
    floors:
        Metric -> noise floor; only these are judged.
    """
    return tuple(
        Drift(index, metric, sentinel[metric] / series[0][metric] - 1.0, floor)
        for index, sentinel in enumerate(series)
        for metric, floor in floors.items()
        if series[0].get(metric) and metric in sentinel and distinguishable(series[0][metric], sentinel[metric], floor)
    )
