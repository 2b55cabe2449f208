"""Gaussian process regression for tens to a few hundred trials: Matérn 5/2, a length for each feature, noise a point.

Rasmussen & Williams, Gaussian Processes for Machine Learning (2006): algorithm 2.1 for fit and prediction, equation 5.9
for the gradient, 5.12 for leaving one out. Lengths, level and noise are those of the highest posterior density.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SPREAD_COUNTS = 3
"""An expected spread counts as so many values: from about as many on, the values speak for themselves."""
MOST_TO_FIT = 64
"""Lengths and noise are fitted on so many of the points, evenly chosen; the prediction uses all."""
_LOG_LENGTH = (-0.7, 1.0)
"""Mean and standard deviation of the logarithm of a length, for one feature; grows with the root of their number, as a
distance does (Hvarfner et al., Vanilla Bayesian Optimization Performs Great in High Dimensions, 2024)."""
_LOG_LEVEL = (0.0, 1.0)
LOG_NOISE = (-4.6, 1.5)
"""The same of the variance of the values, and of their noise, relative to the variance that was seen."""
_LOG_LIMITS = (-7.0, 4.0)
_ITERATIONS = 40
_JITTER = 1e-8
_ROOT5 = 5.0**0.5


@dataclass(frozen=True)
class Fitted:
    """What is fitted of a process.

    Parameters
    ----------
    lengths:
        Of each feature: how far apart two values of it are when they say little of each other.
    level, noise:
        Variance, and variance of the noise at relative noise 1, both in units of the standardised values.
    centre, scale:
        Mean and standard deviation of the values.
    """

    lengths: Array
    level: float
    noise: float
    centre: float
    scale: float


@dataclass(frozen=True)
class GaussianProcess:
    """A process that knows its points; made by `fit`."""

    fitted: Fitted
    features: Array
    scaled: Array
    relative_noise: Array
    _factor: Array
    _weights: Array

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation (n,) of the noise-free value at features (n, columns)."""
        from scipy.linalg import solve_triangular

        known = self.fitted
        distances = _squared_distances(features / known.lengths, self.features / known.lengths)
        covariance = known.level * _matern(distances)
        mean = covariance @ self._weights
        part = solve_triangular(self._factor, covariance.T, lower=True, check_finite=False)
        variance = np.maximum(known.level - np.einsum("ij,ij->j", part, part), 1e-10)
        return known.centre + known.scale * mean, known.scale * np.sqrt(variance)

    @property
    def noise_deviation(self) -> float:
        """Standard deviation of the noise of a value, in the values' own unit, at relative noise 1."""
        return self.fitted.scale * float(np.sqrt(self.fitted.noise))

    def left_out_errors(self) -> Array:
        """Return value minus prediction (n,) of each point from all the others; what was fitted is kept."""
        from scipy.linalg import cho_solve

        inverse = cho_solve((self._factor, True), np.eye(len(self.scaled)), check_finite=False)
        errors: Array = self.fitted.scale * self._weights / np.diag(inverse)
        return errors

    def believing(self, features: Array) -> GaussianProcess:
        """Return the process that takes what it predicts at further features (m, columns) as seen."""
        return self.seeing(features, self.predict(features)[0]) if len(features) else self

    def seeing(self, features: Array, values: Array) -> GaussianProcess:
        """Return the process that has seen values (m,) at further features (m, columns); what was fitted is kept."""
        return _conditioned(
            np.vstack([self.features, features]),
            np.concatenate([self.scaled, (values - self.fitted.centre) / self.fitted.scale]),
            np.concatenate([self.relative_noise, np.ones(len(features))]),
            self.fitted,
        )


def fit(
    features: Array,
    values: Array,
    relative_noise: Array | None = None,
    log_noise: tuple[float, float] = LOG_NOISE,
    spread: float | None = None,
) -> GaussianProcess:
    """Fit a process to values (n,) at features (n, columns).

    Parameters
    ----------
    relative_noise:
        Variance of the noise of each value relative to the others (n,); how large it is altogether is fitted.
    log_noise:
        Mean and standard deviation that are expected of the logarithm of its variance, the values' own being 1.
    spread:
        Standard deviation that is expected of the values: counts as much as `SPREAD_COUNTS` of them.
    """
    count = len(values)
    noise_of = np.ones(count) if relative_noise is None else relative_noise
    centre, scale = float(values.mean()), float(values.std())
    if spread is not None:
        scale = float(np.sqrt((SPREAD_COUNTS * spread**2 + count * scale**2) / (SPREAD_COUNTS + count)))
    scale = scale if scale > 1e-9 else 1.0
    scaled = (values - centre) / scale
    chosen = np.arange(count) if count <= MOST_TO_FIT else np.linspace(0, count - 1, MOST_TO_FIT).astype(int)
    lengths, level, noise = _most_probable(features[chosen], scaled[chosen], noise_of[chosen], log_noise)
    return _conditioned(features, scaled, noise_of, Fitted(lengths, level, noise, centre, scale))


def _conditioned(features: Array, scaled: Array, noise_of: Array, fitted: Fitted) -> GaussianProcess:
    from scipy.linalg import cho_solve, cholesky

    covariance = fitted.level * _matern(_squared_distances(features / fitted.lengths, features / fitted.lengths))
    covariance[np.diag_indices(len(scaled))] += fitted.noise * noise_of + _JITTER
    factor = cholesky(covariance, lower=True, check_finite=False)
    weights = cho_solve((factor, True), scaled, check_finite=False)
    return GaussianProcess(fitted, features, scaled, noise_of, factor, weights)


def _most_probable(
    features: Array, values: Array, noise_of: Array, log_noise: tuple[float, float]
) -> tuple[Array, float, float]:
    """Return lengths, level and noise of the highest posterior density, from one fixed start."""
    from scipy.optimize import minimize

    columns = features.shape[1]
    means = np.array([_LOG_LENGTH[0] + 0.5 * np.log(columns)] * columns + [_LOG_LEVEL[0], log_noise[0]])
    spreads = np.array([_LOG_LENGTH[1]] * columns + [_LOG_LEVEL[1], log_noise[1]])
    squares = (features.T[:, :, None] - features.T[:, None, :]) ** 2
    found = minimize(
        _loss,
        means,
        args=(squares, values, noise_of, means, spreads),
        jac=True,
        method="L-BFGS-B",
        bounds=[_LOG_LIMITS] * columns + [(-4.0, 4.0), (-14.0, 2.0)],
        options={"maxiter": _ITERATIONS},
    )
    fitted = np.exp(found.x)
    return fitted[:columns], float(fitted[-2]), float(fitted[-1])


def _loss(
    logs: Array, squares: Array, values: Array, noise_of: Array, means: Array, spreads: Array
) -> tuple[float, Array]:
    """Return the negative logarithm of the posterior density, and its gradient."""
    from scipy.linalg import LinAlgError, cholesky, lapack

    columns, count = len(logs) - 2, len(values)
    inverse_squares = np.exp(-2 * logs[:columns])
    level, noise = np.exp(logs[-2]), np.exp(logs[-1])
    distances = _ROOT5 * np.sqrt(np.tensordot(inverse_squares, squares, axes=1))
    decay = np.exp(-distances)
    kernel = level * (1 + distances + distances**2 / 3) * decay
    covariance = kernel.copy()
    covariance[np.diag_indices(count)] += noise * noise_of + _JITTER
    try:
        factor = cholesky(covariance, lower=True, check_finite=False)
    except LinAlgError:
        return 1e10, np.zeros_like(logs)
    inverse, _ = lapack.dpotri(factor, lower=1)
    inverse = inverse + np.tril(inverse, -1).T
    weights = inverse @ values
    apart = (logs - means) / spreads
    loss = 0.5 * values @ weights + np.log(np.diag(factor)).sum() + 0.5 * apart @ apart
    outer = 0.5 * (inverse - np.outer(weights, weights))
    slopes = outer * (level * (5 / 3) * (1 + distances) * decay)
    gradient = np.concatenate(
        [
            (squares.reshape(columns, -1) @ slopes.ravel()) * inverse_squares,
            [np.sum(outer * kernel), noise * np.diag(outer) @ noise_of],
        ]
    )
    return float(loss), gradient + apart / spreads


def _matern(squared: Array) -> Array:
    distances = _ROOT5 * np.sqrt(squared)
    kernel: Array = (1 + distances + distances**2 / 3) * np.exp(-distances)
    return kernel


def _squared_distances(a: Array, b: Array) -> Array:
    products = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2 * a @ b.T
    squared: Array = np.maximum(products, 0.0)
    return squared
