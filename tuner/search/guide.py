"""What a predictor says of the whole space, from a few hundred of its predictions: the mean that the models start from.

The predictor is asked at points that fill the space, then around its own front, then wherever a point is about to be
chosen. Between them a process of its own fills in, so that any configuration has a prediction, and a deviation for what
was filled in: schedulers have steps and edges that no smooth process follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from objectives.pareto import front
from tuner.search.candidates import near_points, spread_points
from tuner.search.coordinates import Array, Coordinates, keys, unseen
from tuner.search.gaussian import GaussianProcess, fit

Predict = Callable[[Array], Array]
"""Predicted objectives (n, d) at positions (n, size), on the scale that is modelled; infinite where nothing would run,
NaN where nothing can be said."""

CENTRES = 32
"""So many of the best predictions are looked around: what is measured differs from them, and so does its front."""
_LOG_NOISE = (-9.2, 1.0)
"""Predictions have no noise; what is allowed for are steps that no smooth process follows."""
SCHEDULING = frozenset(
    {
        "max_num_seqs",
        "max_num_batched_tokens",
        "long_prefill_token_threshold",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
    }
)
"""Arguments that are felt by the schedule and the size of the KV pool alone, which the predictor plays."""
_LEAST = 16
"""Fewer predictions guide nobody."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How many predictions are made.

    Parameters
    ----------
    spread:
        Over the whole space.
    rounds, near:
        So many rounds of so many around the best, before anything is chosen.
    asks, asked:
        So many rounds of so many at most for each choice.
    """

    spread: int
    rounds: int
    near: int
    asks: int
    asked: int


THOROUGH = Effort(spread=256, rounds=6, near=64, asks=8, asked=24)
BRIEF = Effort(spread=96, rounds=2, near=32, asks=2, asked=8)
"""Where nothing can be predicted while a trial is measured, because that would be seen in what it shows."""


@dataclass(frozen=True)
class Guide:
    """Predictions, and what fills in between them; made by `guided`.

    Parameters
    ----------
    positions:
        The best of what was predicted (m, size), the front first.
    known:
        What was predicted, by `keys` of features: objectives (d,), infinite where nothing would run, NaN where the
        predictor says nothing.
    """

    positions: Array
    processes: tuple[GaussianProcess, ...]
    known: Mapping[bytes, Array]
    coordinates: Coordinates
    ask: Predict
    effort: Effort

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Return predicted objectives (n, d), and the deviation of what was filled in: 0 where it was not."""
        columns = [process.predict(features) for process in self.processes]
        means, deviations = np.column_stack([m for m, _ in columns]), np.column_stack([s for _, s in columns])
        for row, key in enumerate(keys(features)):
            exact = self.known.get(key)
            if exact is not None and np.isfinite(exact).all():
                means[row], deviations[row] = exact, 0.0
        return means, deviations

    def refuses(self, features: Array) -> NDArray[np.bool_]:
        """Say which rows (n,) are predicted not to run."""
        nothing = np.zeros(len(self.processes))
        return np.array([bool(np.isinf(self.known.get(key, nothing)).any()) for key in keys(features)], dtype=bool)

    def was_asked(self, features: Array) -> NDArray[np.bool_]:
        """Say of which rows (n,) the predictor itself has spoken."""
        return np.array([key in self.known for key in keys(features)], dtype=bool)

    def repeats(self, features: Array, tried: Array) -> NDArray[np.bool_]:
        """Say which rows (n,) are scheduled as one of those tried (m, columns) is, and are the same in all else.

        They are predicted exactly alike and differ in arguments that only the schedule feels.
        """
        there = {schedule for schedule in self._schedules(tried) if schedule}
        return np.array([schedule in there for schedule in self._schedules(features)], dtype=bool)

    def _schedules(self, features: Array) -> list[tuple[bytes, bytes] | None]:
        """Return what is equal for rows that the predictor tells nothing apart of; `None` where it did not speak.

        Up to what is lost in sums: as many steps of other lengths take equally long.
        """
        others = ~self.coordinates.columns_of(SCHEDULING)
        found: list[tuple[bytes, bytes] | None] = []
        for row, key in zip(features, keys(features), strict=True):
            values = self.known.get(key)
            if values is None or not np.isfinite(values).all():
                found.append(None)
            else:
                found.append((values.round(9).tobytes(), row[others].round(9).tobytes()))
        return found

    def asking(self, positions: Array) -> Guide:
        """Return the guide that knows what the predictor says at further positions (m, size), too."""
        features, values = self.coordinates.features(positions), self.ask(positions)
        told = np.isfinite(values).all(axis=1)
        processes = self.processes
        if told.any():
            processes = tuple(p.seeing(features[told], c[told]) for p, c in zip(processes, values.T, strict=True))
        return replace(
            self, processes=processes, known={**self.known, **dict(zip(keys(features), values, strict=True))}
        )


def explored(coordinates: Coordinates, predict: Predict, seed: int, effort: Effort) -> tuple[Array, Array]:
    """Return positions and predicted objectives: over the space, and ever closer around the predicted front."""
    positions = unseen(spread_points(coordinates, seed, effort.spread, all_up_to=effort.spread), set())
    values = predict(positions)
    generator = np.random.default_rng(seed)
    for _ in range(effort.rounds):
        known = np.isfinite(values).all(axis=1)
        if not known.any():
            break
        near = near_points(coordinates, positions[known][_best(values[known])], generator, effort.near)
        near = unseen(near, set(keys(positions)))
        if len(near):
            positions, values = np.vstack([positions, near]), np.vstack([values, predict(near)])
    return positions, values


def _best(values: Array) -> list[int]:
    """Return rows (at least `CENTRES` of n) of the front, of the front without those, and so on."""
    found: list[int] = []
    left = np.arange(len(values))
    while len(found) < CENTRES and len(left):
        found += left[front(values[left])].tolist()
        left = np.setdiff1d(left, found)
    return found


def guided(coordinates: Coordinates, positions: Array, values: Array, ask: Predict, effort: Effort) -> Guide | None:
    """Return the guide that follows from predictions, and asks for more; `None` from too few."""
    told = np.isfinite(values).all(axis=1)
    if told.sum() < _LEAST:
        return None
    features = coordinates.features(positions)
    processes = tuple(fit(features[told], column, log_noise=_LOG_NOISE) for column in values[told].T)
    known = dict(zip(keys(features), values, strict=True))
    return Guide(positions[told][_best(values[told])], processes, known, coordinates, ask, effort)
