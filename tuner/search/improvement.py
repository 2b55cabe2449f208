"""How much a front is expected to grow by a point of which only a distribution is known.

The expected improvement of the hypervolume is an integral over everything that is not dominated yet, of the probability
that the point dominates it: with independent normal objectives it splits into strips along one objective, and each
strip is the same problem with one objective less (Emmerich, Deutz & Klinkenberg, Hypervolume-based expected
improvement, 2011). Less is better everywhere.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from objectives import pareto

Array = NDArray[np.float64]


def expected_improvement(means: Array, deviations: Array, front: Array, corner: Array) -> Array:
    """Return the expected growth (n,) of the hypervolume between `front` and `corner`.

    Parameters
    ----------
    means, deviations:
        Of each point's objectives (n, d); deviations > 0.
    front:
        Points (m, d) that were reached; dominated ones change nothing.
    corner:
        The worst value of each objective that counts (d,).
    """
    inside = front[(front < corner).all(axis=1)]
    return _improvement(means, deviations, inside, corner)


def _improvement(means: Array, deviations: Array, front: Array, corner: Array) -> Array:
    if means.shape[1] == 1:
        best = min([float(corner[0]), *front[:, 0].tolist()])
        return _below(means[:, 0], deviations[:, 0], best)
    front = front[pareto.front(front)]  # projected on fewer objectives, most of a front is dominated
    order = np.argsort(front[:, -1], kind="stable")
    levels = [*front[order, -1].tolist(), float(corner[-1])]
    total = np.zeros(len(means))
    reached = np.zeros(len(means))
    for count, level in enumerate(levels):
        until = _below(means[:, -1], deviations[:, -1], level)
        if (until > reached).any():
            inner = _improvement(means[:, :-1], deviations[:, :-1], front[order[:count], :-1], corner[:-1])
            total += np.maximum(until - reached, 0.0) * inner
        reached = until
    return total


def _below(means: Array, deviations: Array, level: float) -> Array:
    """Expected amount (n,) by which each normal variable lies below a level."""
    from scipy.special import ndtr

    z = (level - means) / deviations
    amount: Array = deviations * (z * ndtr(z) + np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi))
    return np.maximum(amount, 0.0)
