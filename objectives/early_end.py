"""When a run need not be finished: whatever its other requests do, it is worse in everything than a trial before it.

What is still to come is taken to be as good as can be, a latency of 0, so that a bound is certain, not likely: with the
requests that are over, a percentile over all of them can only be higher.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from objectives.latency import e2el_s, is_served, tpot_s, ttft_s
from objectives.measurement import RequestRecord
from objectives.summary import PERCENTS

MARGIN = 0.2
"""A run is ended only where it is certain to be worse by so much: engines that start anew differ."""
_LATENCIES: Mapping[str, Callable[[RequestRecord], float | None]] = {"ttft": ttft_s, "tpot": tpot_s, "e2el": e2el_s}
_NAME = re.compile(rf"({'|'.join(_LATENCIES)})_({'|'.join(PERCENTS)}|max)_s")


@dataclass(frozen=True, slots=True)
class Bar:
    """A member of the front that a run is held against.

    Parameters
    ----------
    trial:
        Its number.
    values:
        Objective -> its value, in the objective's unit.
    limits:
        Objective -> what a run must be certain to exceed, in all of them, to be ended: the value and a margin.
    """

    trial: int
    values: Mapping[str, float]
    limits: Mapping[str, float]


def bar(trial: int, values: Mapping[str, float], noise: Mapping[str, float]) -> Bar:
    """Return what a run is held against: the margin is `MARGIN`, or twice the noise floor where that is more."""
    limits = {name: value * (1 + max(MARGIN, 2 * noise.get(name, 0.0))) for name, value in values.items()}
    return Bar(trial, dict(values), limits)


def can_bound(metric: str) -> bool:
    """Whether there is a certain bound for this metric: percentiles and the maximum of TTFT, TPOT and E2EL."""
    return _NAME.fullmatch(metric) is not None


class RunningBounds:
    """What is certain of the objectives of a run, request by request.

    Parameters
    ----------
    metrics:
        Names that `can_bound` takes.
    planned:
        Requests of the whole run, over all its repeats.
    """

    def __init__(self, metrics: Sequence[str], planned: int) -> None:
        parts = {name: match.groups() for name in metrics if (match := _NAME.fullmatch(name))}
        self._statistics = {name: (kind, PERCENTS.get(statistic, 100.0)) for name, (kind, statistic) in parts.items()}
        self._known: dict[str, list[float]] = {kind: [] for kind, _ in self._statistics.values()}
        self._planned = planned

    def add(self, record: RequestRecord) -> None:
        """Take in a request that is over; one that was not served says nothing."""
        if not is_served(record):
            return
        for kind, known in self._known.items():
            value = _LATENCIES[kind](record)
            if value is not None:
                bisect.insort(known, value)

    def at_least(self) -> dict[str, float]:
        """Return a lower bound of each metric, whatever the requests that are not over will do."""
        return {
            name: _padded_percentile(self._known[kind], self._planned, percent)
            for name, (kind, percent) in self._statistics.items()
        }


def beaten_by(bars: Sequence[Bar], at_least: Mapping[str, float]) -> Bar | None:
    """Return a bar that a run with these lower bounds is certain to exceed in everything; `None` if there is none."""
    for one in bars:
        if one.limits and all(at_least.get(name, 0.0) > limit for name, limit in one.limits.items()):
            return one
    return None


def _padded_percentile(known: Sequence[float], planned: int, percent: float) -> float:
    """Percentile of sorted values that are filled up with zeros to so many, interpolated as `percentile` does."""
    missing = max(0, planned - len(known))
    position = (max(planned, len(known)) - 1) * percent / 100
    low = int(position)

    def value(index: int) -> float:
        return known[index - missing] if index >= missing else 0.0

    here = value(low)
    return here if position == low else here + (value(low + 1) - here) * (position - low)
