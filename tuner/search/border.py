"""Where configurations are admitted: learned from few answers, since asking for each would take too long."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tuner.search.candidates import spread_points
from tuner.search.coordinates import Array, Coordinates
from tuner.search.gaussian import GaussianProcess, fit
from tuner.search.surrogate import softened
from tuner.space import Value

Admits = Callable[[Mapping[str, Value]], float]
"""Signed violation that is known of a configuration before an engine starts; above 0 it is not proposed."""

MOST_ANSWERS = 96
"""So many configurations at most are asked about for one proposal."""
_SPREAD = 32
"""So many of them, evenly over the space, once the first was refused."""


class Border:
    """Finds the most promising of the points that are admitted."""

    def __init__(self, coordinates: Coordinates, admits: Admits, seed: int) -> None:
        self._coordinates = coordinates
        self._admits = admits
        self._seed = seed
        self._asked: list[Array] = []
        self._answers: list[float] = []

    def first_admitted(self, positions: Array, worth: Array) -> int | None:
        """Return the row (of n) that is admitted and worth most; `None` where none is found in so many answers."""
        features = self._coordinates.features(positions)
        left = worth.copy()
        likely = np.ones(len(positions))
        while len(self._answers) < MOST_ANSWERS and (left > 0).any():
            row = int(np.argmax(left * likely))
            if self._answer(positions[row]) <= 0:
                return row
            left[row] = 0.0
            if len(self._answers) <= 1:
                for position in spread_points(self._coordinates, self._seed, _SPREAD):
                    self._answer(position)
            likely = _likely(self._process(), features)
        return None

    def _answer(self, position: Array) -> float:
        self._asked.append(position)
        self._answers.append(self._admits(self._coordinates.changes(position)))
        return self._answers[-1]

    def _process(self) -> GaussianProcess:
        return fit(self._coordinates.features(np.array(self._asked)), softened(np.array(self._answers)))


def _likely(process: GaussianProcess, features: Array) -> Array:
    """Return the probability (n,) of being admitted."""
    from scipy.special import ndtr

    mean, deviation = process.predict(features)
    probability: Array = ndtr(-mean / deviation)
    return np.maximum(probability, 1e-12)
