"""A run held against the front while it lasts, for whatever measures or predicts it."""

from __future__ import annotations

from collections.abc import Sequence

from objectives.early_end import Bar, RunningBounds, beaten_by
from objectives.measurement import Failure, FailureKind, RequestRecord, Stage


class Race:
    """A run against the front: lost as soon as it is certain that a member of it is better in everything."""

    def __init__(self, bars: Sequence[Bar], planned: int) -> None:
        self.lost: Failure | None = None
        self._bars = bars
        self._planned = planned
        self._over = 0
        self._bounds = RunningBounds(sorted({name for one in bars for name in one.limits}), planned)

    def is_lost_after(self, record: RequestRecord) -> bool:
        """Take in a request that is over, and say whether the rest is not worth its time."""
        self._over += 1
        self._bounds.add(record)
        at_least = self._bounds.at_least()
        better = beaten_by(self._bars, at_least)
        if better is None or self._over == self._planned:
            return False
        bounds = " and ".join(f"{name} is at least {at_least[name]:.4g}" for name in better.limits)
        known = " and ".join(f"{value:.4g}" for value in better.values.values())
        text = f"after {self._over} of {self._planned} requests {bounds}; trial {better.trial} has {known}"
        self.lost = Failure(FailureKind.DOMINATED, Stage.RUN, text, at_least=at_least)
        return True
