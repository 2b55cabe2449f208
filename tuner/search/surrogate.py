"""What the trials so far say of the others: a process for each objective and each constraint."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.search.gaussian import GaussianProcess, fit

Array = NDArray[np.float64]

_VIOLATION_SCALE = 0.1
"""Violations are modelled on a scale that is linear up to about this size and logarithmic beyond: 0 decides."""
_WIDTH_LIMITS = (0.25, 4.0)
"""By how much the variance of one trial's noise may differ from the typical one."""


@dataclass(frozen=True)
class Observed:
    """What the trials so far showed, as arrays; less is better in every objective.

    Parameters
    ----------
    features:
        Of each trial (n, columns).
    values:
        Its objectives (n, d), times and rates as logarithms; NaN where it could not run.
    violations:
        Its signed violations (n, c), 0 or less is feasible; NaN where unknown.
    widths:
        Widths of the intervals of its objectives (n, d), NaN where unknown. Only how they compare is used: an interval
        over requests does not say how much a repetition of the same requests differs.
    """

    features: Array
    values: Array
    violations: Array
    widths: Array

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Which trials have values."""
        return np.isfinite(self.values).all(axis=1)

    @property
    def feasible(self) -> NDArray[np.bool_]:
        """Which trials have values and violate nothing."""
        return self.measured & (self.violations <= 0).all(axis=1)


@dataclass(frozen=True)
class Surrogate:
    """Predicts objectives, and whether the constraints hold."""

    objectives: tuple[GaussianProcess, ...]
    constraints: tuple[GaussianProcess, ...]

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Return means and standard deviations (n, d) of the objectives."""
        columns = [process.predict(features) for process in self.objectives]
        return np.column_stack([m for m, _ in columns]), np.column_stack([s for _, s in columns])

    def feasibility(self, features: Array) -> Array:
        """Return the probability (n,) that every constraint holds."""
        from scipy.special import ndtr

        probability = np.ones(len(features))
        for process in self.constraints:
            mean, deviation = process.predict(features)
            probability *= ndtr(-mean / np.hypot(deviation, process.noise_deviation))
        return probability

    def believing(self, features: Array) -> Surrogate:
        """Return the surrogate that takes what it predicts of pending trials as seen."""
        return Surrogate(
            tuple(p.believing(features) for p in self.objectives),
            tuple(p.believing(features) for p in self.constraints),
        )


def learned(observed: Observed) -> Surrogate:
    """Fit the processes; there must be a trial with values."""
    measured = observed.measured
    objectives = tuple(
        fit(observed.features[measured], observed.values[measured, i], _relative_noise(observed.widths[measured, i]))
        for i in range(observed.values.shape[1])
    )
    constraints = tuple(
        fit(observed.features[known], softened(column[known]))
        for column in observed.violations.T
        if (known := np.isfinite(column)).any() and (column > 0).any()
    )
    return Surrogate(objectives, constraints)


def softened(violations: Array) -> Array:
    """Return violations on the scale that they are modelled on; their signs stay."""
    scaled: Array = np.sign(violations) * np.log1p(np.abs(violations) / _VIOLATION_SCALE)
    return scaled


def _relative_noise(widths: Array) -> Array:
    known = widths[np.isfinite(widths) & (widths > 0)]
    if not len(known):
        return np.ones(len(widths))
    relative = (widths / np.median(known)) ** 2
    return np.clip(np.where(np.isfinite(relative) & (relative > 0), relative, 1.0), *_WIDTH_LIMITS)
