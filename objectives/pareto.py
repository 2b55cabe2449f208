"""The front between objectives: dominance, members, knee, hypervolume, and which members noise cannot tell apart.

Points are arrays of shape (n, d), a row a trial and a column an objective, finite; `directions` has d entries, and
without it less is better everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from objectives.intervals import FloatArray, Interval
from objectives.metrics import Direction
from objectives.speed import distinguishable


def dominates(a: Sequence[float], b: Sequence[float], directions: Sequence[Direction] | None = None) -> bool:
    """Whether `a` is at least as good as `b` everywhere and better somewhere: a strict partial order."""
    first, second = _as_minimised([a, b], directions)
    return bool((first <= second).all() and (first < second).any())


def front(points: ArrayLike, directions: Sequence[Direction] | None = None) -> list[int]:
    """Rows that no other row dominates, best in the first objective first; equal rows are all kept.

    Raises
    ------
    ValueError
        When a value is not finite or the number of columns is not that of the directions.
    """
    import moocore

    costs = _as_minimised(points, directions)
    members = np.flatnonzero(moocore.is_nondominated(costs, keep_weakly=True)) if len(costs) else np.empty(0, dtype=int)
    return sorted(members.tolist(), key=lambda row: (*costs[row].tolist(), row))


def knee(points: ArrayLike, directions: Sequence[Direction] | None = None) -> int:
    """Row of the front where giving up a little of one objective stops buying much of another.

    Objectives are scaled to 0 (best) … 1 (worst) between the extremes of the front, on a log scale where all values
    are positive, so that the choice depends on ratios and not on units. The knee lies farthest below the chord of the
    extremes, which is where the scaled values sum to 1 (a plane in more dimensions): the smallest sum. A front that
    does not bend inwards has no such point: then it is the most balanced one, whose worst scaled value is the
    smallest. Ties go to the better first objective, then the second, then the first row.

    Raises
    ------
    ValueError
        For no points, and as `front` does.
    """
    members = front(points, directions)
    if not members:
        raise ValueError("an empty front has no knee")
    scaled = _scaled(_as_minimised(np.asarray(points, dtype=np.float64)[members], directions, log=True))
    sums, worst = scaled.sum(axis=1).round(12), scaled.max(axis=1).round(12)
    return members[int(np.argmin(sums if (sums < 1.0).any() else worst))]


def hypervolume(points: ArrayLike, reference: ArrayLike, directions: Sequence[Direction] | None = None) -> float:
    """Volume between the front and a reference point, in the product of the objectives' units.

    Points that are not better than the reference everywhere add nothing. For a volume in which equal *ratios* count
    the same, pass logarithms of points and reference.

    Raises
    ------
    ValueError
        As `front` does.
    """
    import moocore

    costs = _as_minimised(points, directions)
    corner = _as_minimised(np.asarray(reference, dtype=np.float64)[None, :], directions)[0]
    return float(moocore.hypervolume(costs, ref=corner)) if len(costs) else 0.0


@dataclass(frozen=True, slots=True)
class FrontMember:
    """A row on the front, and the other rows of the front that differ from it in no objective beyond noise."""

    row: int
    same_as: tuple[int, ...]

    @property
    def separable(self) -> bool:
        """Whether it can be told apart from every other member."""
        return not self.same_as


def front_with_noise(
    points: ArrayLike,
    directions: Sequence[Direction] | None = None,
    *,
    intervals: Sequence[Sequence[Interval | None]] | None = None,
    floors: Sequence[float | None] | None = None,
) -> list[FrontMember]:
    """Judge the front, saying for each member which others are the same within noise.

    Two members differ in an objective when their intervals do not overlap *and* their difference exceeds the noise
    floor, as far as these are known. Intervals see the scatter between requests, the floor that between engine starts.

    Parameters
    ----------
    intervals:
        Interval of each point and objective, as rows of `points`.
    floors:
        Relative noise floor of each objective.

    Raises
    ------
    ValueError
        As `front` does.
    """
    members = front(points, directions)
    values = np.asarray(points, dtype=np.float64)

    def differ(a: int, b: int) -> bool:
        for column in range(values.shape[1]):
            floor = floors[column] if floors is not None else None
            beyond = distinguishable(float(values[a, column]), float(values[b, column]), floor or 0.0)
            ends = (intervals[a][column], intervals[b][column]) if intervals is not None else (None, None)
            if beyond and not _overlap(*ends):
                return True
        return False

    return [
        FrontMember(row, tuple(other for other in members if other != row and not differ(row, other)))
        for row in members
    ]


def _overlap(a: Interval | None, b: Interval | None) -> bool:
    return a is not None and b is not None and a[0] <= b[1] and b[0] <= a[1]


def _as_minimised(points: ArrayLike, directions: Sequence[Direction] | None, *, log: bool = False) -> FloatArray:
    """Rows in which smaller is better; with `log`, columns of positive values as logarithms."""
    values = np.array(points, dtype=np.float64)
    if values.size == 0:
        return values.reshape(0, len(directions or ()))
    columns = values.shape[-1]
    if values.ndim != 2 or len(directions or (None,) * columns) != columns or not np.isfinite(values).all():
        raise ValueError(f"points must be finite rows with a value for each objective, got shape {values.shape}")
    for column in range(columns):
        if log and (values[:, column] > 0).all():
            values[:, column] = np.log(values[:, column])
        if directions and directions[column] == "maximize":
            values[:, column] *= -1.0
    return values


def _scaled(costs: FloatArray) -> FloatArray:
    """Columns scaled to 0 … 1 between their extremes; a column without any spread is 0."""
    low = costs.min(axis=0)
    span = costs.max(axis=0) - low
    scaled: FloatArray = (costs - low) / np.where(span > 0, span, math.inf)
    return scaled
