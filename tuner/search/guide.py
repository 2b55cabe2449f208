"""What a predictor says of the whole space, from a few hundred of its predictions: the mean that the models start from.

The predictor is asked at points that fill the space, then around its own front. Between them a process of its own fills
in, so that any configuration has a prediction, and a deviation for what was filled in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from objectives.pareto import front
from tuner.search.candidates import near_points, spread_points
from tuner.search.coordinates import Array, Coordinates, keys, unseen
from tuner.search.gaussian import GaussianProcess, fit

Predict = Callable[[Array], Array]
"""Predicted objectives (n, d) at positions (n, size), on the scale that is modelled; NaN where nothing is predicted."""

SPREAD = 192
"""Predictions over the whole space."""
ROUNDS = 3
NEAR = 48
"""Predictions around the predicted front, in each of so many rounds."""
_LOG_NOISE = (-9.2, 1.0)
"""Predictions have no noise; what is allowed for are steps that no smooth process follows."""
_LEAST = 16
"""Fewer predictions guide nobody."""


@dataclass(frozen=True)
class Guide:
    """Predictions, and what fills in between them; made by `guided`.

    Parameters
    ----------
    positions:
        The predicted front (m, size).
    """

    positions: Array
    processes: tuple[GaussianProcess, ...]

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Return predicted objectives and the deviation of what was filled in (n, d)."""
        columns = [process.predict(features) for process in self.processes]
        return np.column_stack([m for m, _ in columns]), np.column_stack([s for _, s in columns])


def explored(coordinates: Coordinates, predict: Predict, seed: int) -> tuple[Array, Array]:
    """Return positions and predicted objectives: over the space, and ever closer around the predicted front."""
    positions = unseen(spread_points(coordinates, seed, SPREAD, all_up_to=SPREAD), set())
    values = predict(positions)
    generator = np.random.default_rng(seed)
    for round_number in range(ROUNDS):
        known = np.isfinite(values).all(axis=1)
        if not known.any():
            break
        centres = positions[known][front(values[known])]
        near = near_points(coordinates, centres, generator, NEAR, reach=0.5**round_number)
        near = unseen(near, set(keys(positions)))
        if len(near):
            positions, values = np.vstack([positions, near]), np.vstack([values, predict(near)])
    return positions, values


def guided(coordinates: Coordinates, positions: Array, values: Array) -> Guide | None:
    """Return the guide that follows from predictions; `None` from too few."""
    known = np.isfinite(values).all(axis=1)
    if known.sum() < _LEAST:
        return None
    positions, values = positions[known], values[known]
    features = coordinates.features(positions)
    processes = tuple(fit(features, column, log_noise=_LOG_NOISE) for column in values.T)
    return Guide(positions[front(values)], processes)
