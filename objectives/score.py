"""`Score`: what one trial is worth, and the only thing of a measurement that the optimiser sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class VoidReason:
    """Why a measurement must not be compared: a short code, the evidence in words, and the number behind it."""

    code: str
    evidence: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Every metric of a trial with its interval, its constraint violations, and whether it may be compared.

    Parameters
    ----------
    values:
        Metric name -> value, in the unit that the name ends in. A metric that is undefined here is absent.
    intervals:
        Metric name -> (low, high), the 95% interval of the value; absent where none can be given.
    violations:
        Constraint name -> signed number, <= 0 is feasible. `memory` is always there.
    void:
        Reasons that make the measurement void; empty for a valid one.
    notes:
        Sentences that a reader of the numbers should know, such as percentiles that rest on few requests.
    """

    values: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    violations: Mapping[str, float]
    void: tuple[VoidReason, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def feasible(self) -> bool:
        """Whether every constraint holds."""
        return all(v <= 0 for v in self.violations.values())
