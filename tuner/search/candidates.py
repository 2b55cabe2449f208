"""Points to choose from: spread over the space, and around the points that are best so far."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tuner.search.coordinates import Array, Coordinates

SPREAD = 512
"""Points over the whole space; a power of two, as Sobol's sequence wants it."""
NEAR = 512
"""Points around the best ones, all together."""
MOST_TO_LIST = 2048
"""All configurations of a space are candidates if they are so many at most."""
_REACH = (0.02, 0.06, 0.2)
"""How far a parameter is moved, as shares of its range; always at least to its next value."""


def spread_points(coordinates: Coordinates, seed: int, count: int = SPREAD, all_up_to: int = 0) -> Array:
    """Return snapped positions (count, size) that fill the space evenly; all there are, if they are not too many.

    Parameters
    ----------
    all_up_to:
        A space of so many configurations at most is listed whole.
    """
    from scipy.stats import qmc

    if coordinates.points <= all_up_to:
        return coordinates.everything()
    sobol = qmc.Sobol(coordinates.size, scramble=True, rng=seed)
    return coordinates.snapped(sobol.random_base2((count - 1).bit_length())[:count])


def near_points(
    coordinates: Coordinates, centres: Array, generator: np.random.Generator, count: int = NEAR, reach: float = 1.0
) -> Array:
    """Return snapped positions (count, size) in each of which one to three parameters of a centre are moved."""
    if not len(centres):
        return np.empty((0, coordinates.size))
    base = centres[np.arange(count) % len(centres)]
    size = coordinates.size
    moved = _moved_parameters(generator, count, size)
    steps = coordinates.steps()
    ordered = np.isfinite(steps)
    distance = generator.choice(_REACH, size=(count, 1)) * reach * generator.standard_normal((count, size))
    least = np.where(ordered, steps, 0.0)
    signs = np.where(distance < 0, -1.0, 1.0)
    target = base + signs * np.maximum(np.abs(distance), least)
    target = np.where(target < 0, -target, np.where(target > 1, 2 - target, target))  # back from the walls
    target = np.where(ordered, target, generator.random((count, size)))
    return coordinates.snapped(np.clip(np.where(moved, target, base), 0.0, 1.0))


def _moved_parameters(generator: np.random.Generator, count: int, size: int) -> NDArray[np.bool_]:
    how_many = generator.integers(1, min(3, size) + 1, size=(count, 1))
    ranks = generator.random((count, size)).argsort(axis=1).argsort(axis=1)
    moved: NDArray[np.bool_] = ranks < how_many
    return moved
