"""What the trials so far say of the others: a process for each objective and each constraint.

With a guide, the process of an objective models by how much the measured values differ from the predicted ones (on a
logarithmic scale: their ratio), unless a process without the guide tells left-out trials better.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tuner.search.gaussian import GaussianProcess, fit
from tuner.search.guide import Guide

Array = NDArray[np.float64]

_VIOLATION_SCALE = 0.1
"""Violations are modelled on a scale that is linear up to about this size and logarithmic beyond: 0 decides."""
_LEAST_TO_JUDGE = 4
"""With fewer measured trials the guide is followed untested."""
_BEYOND_CHANCE = 2.0
"""So many standard errors: the guide is looked at after every trial, and is right more often than not."""
_LEAST_ERROR = 0.05
"""Of the spread of the values: smaller errors are noise, and their logarithms would decide."""
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
    ratios:
        Standard deviation (d,) that is expected of the differences between measured and predicted objectives.
    """

    features: Array
    values: Array
    violations: Array
    widths: Array
    ratios: Array

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Which trials have values."""
        return np.asarray(np.isfinite(self.values).all(axis=1))

    @property
    def feasible(self) -> NDArray[np.bool_]:
        """Which trials have values and violate nothing."""
        return self.measured & np.asarray((self.violations <= 0).all(axis=1))


@dataclass(frozen=True)
class Surrogate:
    """Predicts objectives, and whether the constraints hold.

    Parameters
    ----------
    follows:
        For each objective whether its process models the difference from the guide.
    """

    objectives: tuple[GaussianProcess, ...]
    constraints: tuple[GaussianProcess, ...]
    follows: tuple[bool, ...]
    guide: Guide | None

    @property
    def followed(self) -> Guide | None:
        """The guide, where it has a say."""
        return self.guide if any(self.follows) else None

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Return means and standard deviations (n, d) of the objectives."""
        columns = [process.predict(features) for process in self.objectives]
        means, deviations = np.column_stack([m for m, _ in columns]), np.column_stack([s for _, s in columns])
        if (guide := self.followed) is None:
            return means, deviations
        predicted, filled_in = guide.predict(features)
        follows = np.array(self.follows)
        return means + np.where(follows, predicted, 0.0), np.hypot(deviations, np.where(follows, filled_in, 0.0))

    def feasibility(self, features: Array) -> Array:
        """Return the probability (n,) that every constraint holds."""
        from scipy.special import ndtr

        probability = np.ones(len(features))
        for process in self.constraints:
            mean, deviation = process.predict(features)
            probability *= ndtr(-mean / np.hypot(deviation, process.noise_deviation))
        return probability

    def bounded(self, features: Array, bounds: Array) -> Surrogate:
        """Return the surrogate that has seen what is at least so much (n, d): more, where it expects more.

        Nothing is fitted to it, and the guide is not judged by it.
        """
        if not len(features):
            return self
        expected, _ = self.predict(features)
        beyond = np.maximum(bounds - expected, 0.0)
        columns = zip(self.objectives, beyond.T, strict=True)
        return replace(self, objectives=tuple(p.seeing(features, p.predict(features)[0] + b) for p, b in columns))

    def believing(self, features: Array) -> Surrogate:
        """Return the surrogate that takes what it predicts of pending trials as seen."""
        return Surrogate(
            tuple(p.believing(features) for p in self.objectives),
            tuple(p.believing(features) for p in self.constraints),
            self.follows,
            self.guide,
        )


def learned(observed: Observed, guide: Guide | None = None) -> Surrogate:
    """Fit the processes; there must be a trial with values.

    Ratios are those to what the guide makes of the predictions, also at trials that were predicted themselves: what it
    gets wrong there must not come back as an improvement that no trial ever shows.
    """
    measured = observed.measured
    features, values, widths = observed.features[measured], observed.values[measured], observed.widths[measured]
    noise = [_relative_noise(column) for column in widths.T]
    plain = [fit(features, c, noise_of) for c, noise_of in zip(values.T, noise, strict=True)]
    chosen, follows = plain, [False] * len(plain)
    if guide is not None:
        expected, _ = guide.predict(features)
        ratios = [
            fit(features, column, noise_of, spread=float(spread))
            for column, noise_of, spread in zip((values - expected).T, noise, observed.ratios, strict=True)
        ]
        follows = [not _misleads(ratio, alone) for ratio, alone in zip(ratios, plain, strict=True)]
        chosen = [ratio if follow else alone for ratio, alone, follow in zip(ratios, plain, follows, strict=True)]
    constraints = tuple(
        fit(observed.features[known], softened(column[known]))
        for column in observed.violations.T
        if (known := np.isfinite(column)).any() and (column > 0).any()
    )
    return Surrogate(tuple(chosen), constraints, tuple(follows), guide)


def _misleads(ratio: GaussianProcess, alone: GaussianProcess) -> bool:
    """Whether a process without the guide tells left-out trials better than one with it, beyond chance.

    Compared are logarithms of their errors: one trial that the guide gets wrong by far does not outweigh the others.
    """
    count, least = len(alone.scaled), _LEAST_ERROR * alone.fitted.scale
    if count < _LEAST_TO_JUDGE:
        return False
    with_it, without = (np.log(np.hypot(p.left_out_errors(), least)) for p in (ratio, alone))
    worse = with_it - without
    return bool(worse.mean() > _BEYOND_CHANCE * worse.std(ddof=1) / np.sqrt(count))


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
