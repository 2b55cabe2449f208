"""How long trials take, from those that were run: what says whether another one fits into the night."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from tuner.ledger import History

FIRST_GUESS_S = 600.0
"""Before anything was measured: ten minutes, what a trial of a 32B model takes with its start."""
TWIN_GUESS_S = 5.0
"""The twin plays 400 s of serving in about a second."""
MARGIN = 1.1
"""Trials of the same study differ; a tenth more than the slower half has covered most of them."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Expected seconds of one trial, start and stop included."""

    trial_s: float

    @classmethod
    def of(cls, history: History, first_guess_s: float = FIRST_GUESS_S) -> Pace:
        """Estimate from finished trials: the upper quartile of those that an engine ran, and a margin."""
        seen = sorted(t.engine_s for t in history.finished if t.engine_s > 0 and t.engine is not None)
        if not seen:
            return cls(first_guess_s)
        if len(seen) == 1:
            return cls(MARGIN * seen[0])
        return cls(MARGIN * statistics.quantiles(seen, n=4, method="inclusive")[2])
