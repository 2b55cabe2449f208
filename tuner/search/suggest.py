"""From what the trials so far showed to the configuration that promises most of those not known yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from objectives.pareto import front, hypervolume
from tuner.search.border import Admits, Border
from tuner.search.candidates import MOST_TO_LIST, near_points, spread_points
from tuner.search.coordinates import Array, Coordinates, keys, unseen
from tuner.search.guide import Guide
from tuner.search.improvement import expected_improvement
from tuner.search.surrogate import Observed, Surrogate, learned
from tuner.space import Value

_ROUNDS = 2
"""How often the surroundings of the best points are searched again, each time so much less far."""
_REACH = 0.5
_CENTRES = 8
_NEAR_ASKED = 128
"""So many neighbours of the best that were predicted are looked at, too."""
_MARGIN = 0.1
"""The corner lies so much of the front's extent beyond its worst values."""
_NOISE_DRAWS = 64
"""Tell a standard deviation to a tenth."""
_LIKELY = 0.5
"""Points that run with this probability count for how far the front may extend."""


@dataclass(frozen=True)
class Suggestion:
    """What to try next.

    Parameters
    ----------
    changes:
        The configuration.
    gain:
        Expected growth of the hypervolume, as a share of what the front has of it (`_Aim.volume`).
    noise:
        Standard deviation of the front's hypervolume by the noise of one measurement of each member, as such a share.
    follows_guide:
        Whether predictions of the guide had a say.
    """

    changes: Mapping[str, Value]
    gain: float
    noise: float
    follows_guide: bool = False


@dataclass(frozen=True)
class Past:
    """Trials as the proposer knows them.

    Parameters
    ----------
    positions:
        Of each trial with a result (n, size), snapped.
    values, violations, widths, ratios:
        As in `Observed`.
    pending:
        Positions of trials that run (m, size).
    closed:
        Positions of trials of which nothing was learned (k, size): they are not proposed again.
    censored, bounds:
        Positions of trials that were ended early (l, size), and what their objectives are at least (l, d).
    beside:
        Configurations of trials that lie beside the space, by `keys` of their positions.
    """

    positions: Array
    values: Array
    violations: Array
    widths: Array
    ratios: Array
    pending: Array
    closed: Array
    censored: Array
    bounds: Array
    beside: Mapping[bytes, Mapping[str, Value]] = field(default_factory=dict)

    @property
    def measured(self) -> int:
        """Number of trials with values."""
        return int(np.isfinite(self.values).all(axis=1).sum())

    @property
    def everything(self) -> Array:
        """Positions that are not to be proposed again."""
        return np.vstack([self.positions, self.pending, self.closed, self.censored])


def suggest(
    past: Past,
    coordinates: Coordinates,
    seed: int,
    admits: Admits,
    guide: Guide | None = None,
) -> Suggestion | None:
    """Return the most promising configuration, or `None` where nothing was measured or nothing is left.

    The same past and seed give the same answer.
    """
    violations = _unforeseen(past, coordinates, admits)
    observed = Observed(coordinates.features(past.positions), past.values, violations, past.widths, past.ratios)
    if not observed.measured.any():
        return None
    pending = coordinates.features(past.pending)
    surrogate = learned(observed, guide).bounded(coordinates.features(past.censored), past.bounds).believing(pending)
    seen = set(keys(past.everything))
    generator = np.random.default_rng(seed)
    pool = _starting_points(past, observed, coordinates, generator, seed)
    if guide is not None:
        pool = np.vstack([pool, guide.positions, near_points(coordinates, guide.positions, generator)])
    pool = unseen(pool, seen)
    if not len(pool):
        return None
    aim = _aim(observed, surrogate, pending, coordinates.features(pool))
    worth = aim.worth(coordinates.features(pool))
    for round_number in range(_ROUNDS):
        best = pool[np.argsort(-worth, kind="stable")[:_CENTRES]]
        near = near_points(coordinates, best, generator, reach=_REACH ** (round_number + 1))
        pool, worth = _with(near, pool, worth, aim, coordinates, seen)
    if surrogate.followed is not None:

        def aim_of(guide: Guide, among: Array) -> _Aim:
            return _aim(observed, replace(surrogate, guide=guide), pending, coordinates.features(among))

        aim, pool, worth = _asked(surrogate.followed, aim, aim_of, pool, worth, seen, generator)
    chosen = Border(coordinates, admits, seed).first_admitted(pool, worth)
    if chosen is None:
        return None
    return Suggestion(
        coordinates.changes(pool[chosen]),
        gain=float(worth[chosen]) / aim.volume,
        noise=aim.noise(generator) / aim.volume,
        follows_guide=surrogate.followed is not None,
    )


def _with(
    further: Array, pool: Array, worth: Array, aim: _Aim, coordinates: Coordinates, seen: set[bytes]
) -> tuple[Array, Array]:
    """Return the pool with further points, and what all of them are worth."""
    new = unseen(further, seen | set(keys(pool)))
    if not len(new):
        return pool, worth
    return np.vstack([pool, new]), np.concatenate([worth, aim.worth(coordinates.features(new))])


def _asked(
    guide: Guide,
    aim: _Aim,
    aim_of: Callable[[Guide, Array], _Aim],
    pool: Array,
    worth: Array,
    seen: set[bytes],
    generator: np.random.Generator,
) -> tuple[_Aim, Array, Array]:
    """Ask about the most promising points, and around the best of those, until the best is one that was predicted.

    Those that were only filled in are worth nothing then: where there are many, some always look better than they are.
    """
    for round_number in range(guide.effort.asks):
        features = guide.coordinates.features(pool)
        known = guide.was_asked(features)
        if known[np.argmax(worth)] and round_number:
            break
        order = np.argsort(-worth, kind="stable")
        guide = guide.asking(pool[order[~known[order]][: guide.effort.asked]])
        aim = aim_of(guide, pool)
        worth = aim.worth(features)
        known = guide.was_asked(features)
        order = np.argsort(-worth, kind="stable")
        centres = pool[order[known[order]][:_CENTRES]]
        reach = 1.0 if round_number % 2 == 0 else _REACH
        near = near_points(guide.coordinates, centres, generator, _NEAR_ASKED, reach)
        pool, worth = _with(near, pool, worth, aim, guide.coordinates, seen)
    known = guide.was_asked(guide.coordinates.features(pool))
    return aim, pool, np.where(known, worth, 0.0) if (worth[known] > 0).any() else worth


@dataclass(frozen=True)
class _Aim:
    """What a point is worth: the expected growth of the front, times the probability that it can run.

    Parameters
    ----------
    tried:
        Features of trials that were measured or run (m, columns): what the guide cannot tell from one is worth nothing.
    volume:
        What a growth is a share of: between the front and the corner, or the middle of the trials where that is worse,
        since a front of one member, as with one objective, reaches no further than itself.
    """

    surrogate: Surrogate
    front: Array
    corner: Array
    tried: Array
    volume: float

    def worth(self, features: Array) -> Array:
        means, deviations = self.surrogate.predict(features)
        gain = expected_improvement(means, deviations, self.front, self.corner)
        worth: Array = gain * self.surrogate.feasibility(features)
        guide = self.surrogate.followed
        if guide is None:
            return worth
        return np.where(guide.refuses(features) | guide.repeats(features, self.tried), 0.0, worth)

    def noise(self, generator: np.random.Generator) -> float:
        """Return how much the front's hypervolume differs (standard deviation) where each member is measured once."""
        if not len(self.front):
            return 0.0
        deviations = [process.noise_deviation for process in self.surrogate.objectives]
        draws = generator.standard_normal((_NOISE_DRAWS, *self.front.shape)) * deviations
        return float(np.std([hypervolume(self.front + draw, self.corner) for draw in draws]))


def _aim(observed: Observed, surrogate: Surrogate, pending: Array, pool: Array) -> _Aim:
    """Say what a point is held against.

    The front is what the surrogate believes of the trials, so that one lucky measurement does not set it. The corner
    lies beyond the ends of that front and of the front which the surrogate expects there to be: one that is still too
    short is worth extending, and what lies beyond both ends is not. With a guide these are of what it was asked about:
    what was only filled in also reaches to where nothing runs, and a corner out there makes the ends of the front dear.
    """
    feasible, tried = observed.feasible, np.vstack([observed.features[observed.measured], pending])
    if not feasible.any():
        corner = observed.values[observed.measured].max(axis=0) + 1.0
        return _Aim(surrogate, np.empty((0, len(corner))), corner, tried, 1.0)
    expected_to_run = pending[surrogate.feasibility(pending) > _LIKELY]
    believed, _ = surrogate.predict(np.vstack([observed.features[feasible], expected_to_run]))
    members = believed[front(believed)]
    if (guide := surrogate.followed) is not None:
        pool = pool[guide.was_asked(pool) & ~guide.refuses(pool)]
    likely = pool[surrogate.feasibility(pool) > _LIKELY]
    expected = np.vstack([members, surrogate.predict(likely)[0]]) if len(likely) else members
    ends = expected[front(expected)]
    worst = np.maximum(members.max(axis=0), ends.max(axis=0))
    corner = worst + np.maximum(_MARGIN * (worst - ends.min(axis=0)), 1e-3)
    volume = hypervolume(members, np.maximum(corner, np.median(believed, axis=0)))
    return _Aim(surrogate, members, corner, tried, max(volume, 1e-12))


def _unforeseen(past: Past, coordinates: Coordinates, admits: Admits) -> Array:
    """Return the violations (n, c) of which there is something to learn.

    What does not start and was expected not to says nothing of its neighbours that is not known of each of them.
    """
    violations = past.violations.copy()
    known = keys(past.positions)
    for row in np.flatnonzero(violations[:, 0] > 0):
        if admits(past.beside.get(known[row]) or coordinates.changes(past.positions[row])) > 0:
            violations[row, 0] = np.nan
    return violations


def _starting_points(
    past: Past, observed: Observed, coordinates: Coordinates, generator: np.random.Generator, seed: int
) -> Array:
    spread = spread_points(coordinates, seed, all_up_to=MOST_TO_LIST)
    feasible: NDArray[np.bool_] = observed.feasible
    if not feasible.any():
        return spread
    centres = past.positions[feasible][front(past.values[feasible])]
    return np.vstack([spread, near_points(coordinates, centres, generator)])
