"""What a finding about a rule is, and how figures become a verdict. Pure: no engine, no twin, no files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class Verdict(StrEnum):
    """What trying a rule came to."""

    HOLDS = "holds"
    """Every part of it, wherever it was tried."""
    FAILS = "does not hold"
    """Nowhere was all of it so."""
    DEPENDS = "depends"
    """All of it was so in some situations and not in others."""
    UNTRIED = "not tried"


class Direction(StrEnum):
    """Which way a figure went."""

    LOWER = "lower"
    HIGHER = "higher"
    SAME = "same"
    UNCLEAR = "unclear"
    """The runs do not agree."""


@dataclass(frozen=True, slots=True)
class Change:
    """Ratios new / old of one figure over paired runs: the smallest, the geometric mean, the largest."""

    low: float
    mid: float
    high: float

    @classmethod
    def of(cls, old: Sequence[float], new: Sequence[float]) -> Change:
        """Pair runs that saw the same arrivals.

        Raises
        ------
        ValueError
            For no pairs, for lists of different lengths, and for a figure that is not positive.
        """
        if not old or not all(value > 0 for value in (*old, *new)):
            raise ValueError(f"paired runs need positive figures, got {list(old)} and {list(new)}")
        ratios = [b / a for a, b in zip(old, new, strict=True)]
        return cls(min(ratios), math.exp(sum(map(math.log, ratios)) / len(ratios)), max(ratios))

    def reversed(self) -> Change:
        """Return the ratios old / new."""
        return Change(1 / self.high, 1 / self.mid, 1 / self.low)

    def direction(self, noise: float) -> Direction:
        """Which way it went, where a ratio within 1 ± `noise` is no change and all runs have to agree."""
        if self.high < 1 - noise:
            return Direction.LOWER
        if self.low > 1 + noise:
            return Direction.HIGHER
        if self.low >= 1 - noise and self.high <= 1 + noise:
            return Direction.SAME
        return Direction.UNCLEAR


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether one part of a rule was as said in one situation."""

    situation: str
    part: str
    as_said: bool


@dataclass(frozen=True, slots=True)
class Tried:
    """One place where a rule was tried: its figures, and what they say of the rule.

    Parameters
    ----------
    predicted:
        Whether the figures come from the twin or the memory model.
    how:
        Workload, configuration, number of runs, noise.
    header, rows:
        The figures as a table.
    notes:
        What else the figures show, in sentences that are made from them.
    """

    where: str
    predicted: bool
    how: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule and everything that was found about it.

    Parameters
    ----------
    number, rule:
        Its place on the page, and the rule as guides have it.
    criterion:
        What counts as said.
    turns_on:
        What it depends on, or why it does not hold.
    why:
        What in the scheduler, the kernels or the memory makes it so.
    """

    number: int
    rule: str
    criterion: str
    tried: tuple[Tried, ...]
    turns_on: str
    why: str

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """All outcomes, wherever they come from; situations carry the name of the place."""
        return tuple(
            Outcome(f"{place.where}: {outcome.situation}", outcome.part, outcome.as_said)
            for place in self.tried
            for outcome in place.outcomes
        )

    @property
    def verdict(self) -> Verdict:
        """What all places together say."""
        return verdict(self.outcomes)

    def parts(self) -> dict[str, tuple[int, int]]:
        """Part of the rule -> in how many situations it was as said, and of how many."""
        found: dict[str, tuple[int, int]] = {}
        for outcome in self.outcomes:
            held, of = found.get(outcome.part, (0, 0))
            found[outcome.part] = held + outcome.as_said, of + 1
        return found


def verdict(outcomes: Sequence[Outcome]) -> Verdict:
    """Judge a rule: a situation speaks for it when each part that was tried there was as said."""
    if not outcomes:
        return Verdict.UNTRIED
    situations: dict[str, bool] = {}
    for outcome in outcomes:
        situations[outcome.situation] = situations.get(outcome.situation, True) and outcome.as_said
    if all(situations.values()):
        return Verdict.HOLDS
    return Verdict.DEPENDS if any(situations.values()) else Verdict.FAILS


def crossing(at: Sequence[float], ratios: Sequence[float], noise: float = 0.0) -> float | None:
    """Where a ratio first passes 1, by a straight line through its logarithm; `None` where it never does.

    Parameters
    ----------
    at:
        Ascending places, such as loads.
    ratios:
        A positive ratio at each of them.
    noise:
        Ratios within 1 ± this share are on neither side.
    """
    sides = [(place, math.log(r)) for place, r in zip(at, ratios, strict=True) if abs(r - 1) > noise]
    for (a, x), (b, y) in pairwise(sides):
        if x * y < 0:
            return a + (b - a) * x / (x - y)
    return None


def reaching(at: Sequence[float], values: Sequence[float], level: float) -> float | None:
    """Where a quantity first passes `level`, by straight lines between the places; `None` where it never does."""
    for (a, b), (x, y) in zip(pairwise(at), pairwise(values), strict=True):
        if x == level:
            return a
        if (x - level) * (y - level) < 0:
            return a + (b - a) * (level - x) / (y - x)
    return at[-1] if values and values[-1] == level else None


def within(value: float, claimed: float, tolerance: float) -> bool:
    """Whether a figure is what was claimed, give or take a share of it."""
    return abs(value / claimed - 1) <= tolerance


def ms(seconds: float) -> str:
    """Write a time as people read it."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def percent(ratio: float) -> str:
    """Write a ratio as a change."""
    change = f"{(ratio - 1) * 100:+.0f}%"
    return "±0%" if change in ("+0%", "-0%") else change.replace("-", "−")
