"""Who decides what is tried after the queue: the design first, then the model of the trials, guided by predictions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tuner.design import design_points
from tuner.guidance import Guidance, Predict
from tuner.search.border import Admits
from tuner.search.coordinates import Coordinates, keys
from tuner.search.guide import THOROUGH, Effort, Guide
from tuner.search.suggest import Past, Suggestion, suggest
from tuner.space import Space, Value
from tuner.spec import Search

GAIN, NOISE, FOLLOWS = "gain", "gain_noise", "follows_twin"
"""Attributes of a choice: by how much the front is expected to grow, how much the noise of one measurement of each of
its members changes it, and whether predictions had a say."""
PATIENCE = 3
"""So many choices in a row that promise too little end a search, and so many looks that find nothing to choose."""
MOST_DESIGN_POINTS = 256
"""So many points of the design are looked at for one that may be tried."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is to be tried, who says so, and what is to be remembered of why."""

    source: str
    changes: Mapping[str, Value]
    attributes: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SearchEnd:
    """Why a search is over: `exhausted` or `converged`, and the sentence."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Foresight:
    """Predictions for a chooser.

    Parameters
    ----------
    predict:
        Predicts objectives in their own units.
    ahead:
        Whether it is asked in the background, while trials run.
    effort:
        How often it is asked.
    """

    predict: Predict
    ahead: bool = False
    effort: Effort = THOROUGH


class Chooser:
    """Chooses by what is past; the same past gives the same choice.

    Parameters
    ----------
    model:
        From objectives in their own units to the scale that `Past` has them on.
    admits:
        What is known of a configuration without an engine.
    noted:
        Told, in a sentence, when predictions are no longer followed, or are again.
    """

    def __init__(
        self,
        space: Space,
        search: Search,
        *,
        objectives: int,
        model: Callable[[Sequence[float]], Sequence[float]],
        admits: Admits,
        foresight: Foresight | None,
        noted: Callable[[str], None],
    ) -> None:
        self.coordinates = Coordinates(space)
        self._space = space
        self._search = search
        self._admits = admits
        self._noted = noted
        self._in_vain = 0
        self._guidance: Guidance | None = None
        if foresight is not None and search.sampler == "gp":
            self._guidance = Guidance(
                self.coordinates,
                foresight.predict,
                model,
                objectives,
                search.seed,
                ahead=foresight.ahead,
                effort=foresight.effort,
            )

    def choose(self, past: Past, seed: int, *, followed: bool) -> Choice | None:
        """Return what the design or the model wants tried; `None` leaves it to another sampler.

        Parameters
        ----------
        followed:
            Whether the latest choice of the model followed the predictions; `True` before the first.
        """
        guide = (
            self._guidance.at(past.measured, past.positions, past.beside) if self._guidance and past.measured else None
        )
        begun = len(past.positions) + len(past.censored) + len(past.pending)
        if guide is not None or begun >= self._search.startup_trials:
            if self._search.sampler != "gp":
                return None
            found = self._suggested(past, seed, guide, followed=followed)
            if found is not None:
                self._in_vain = 0
                return Choice(
                    "sampler", found.changes, {GAIN: found.gain, NOISE: found.noise, FOLLOWS: found.follows_guide}
                )
        point = self._design_point(past)
        self._in_vain = self._in_vain + 1 if point is None else 0
        return None if point is None else Choice("design", point)

    def _suggested(self, past: Past, seed: int, guide: Guide | None, *, followed: bool) -> Suggestion | None:
        found = suggest(past, self.coordinates, seed, self._admits, guide)
        if guide is not None and found is not None and found.follows_guide != followed:
            outcome = "better: they are followed again" if found.follows_guide else "worse: they are not followed"
            self._noted(f"left-out trials are told with the twin's predictions {outcome}")
        return found

    def _design_point(self, past: Past) -> dict[str, Value] | None:
        """Return the first point of a sequence that fills the space evenly which is admitted and was never proposed."""
        seen = set(keys(past.everything))
        for count in (16, 64, MOST_DESIGN_POINTS):
            for point in design_points(self._space, count, self._search.seed):
                [key] = keys(self.coordinates.position(point)[None, :])
                if key not in seen and self._admits(point) <= 0:
                    return point
                seen.add(key)
        return None

    @property
    def looks_ahead(self) -> bool:
        """Whether anything is predicted while trials run."""
        return self._guidance is not None and self._guidance.works_ahead

    def look_ahead(self, past: Past, seed: int) -> None:
        """Have predicted, while a trial runs, what the next choice will need if that trial shows what is expected.

        Parameters
        ----------
        seed:
            Of the next choice.
        """
        if self._guidance is not None:
            self._guidance.prepare(
                past.measured + 1,
                np.vstack([past.positions, past.pending]),
                past.beside,
                lambda guide: suggest(past, self.coordinates, seed, lambda _: 0.0, guide),
            )

    def rest(self, *, now: bool) -> None:
        """Predict nothing in the background for now: something is measured that must not be disturbed."""
        if self._guidance is not None:
            self._guidance.rest(now=now)

    def end(self, gains: Sequence[tuple[float, float]], under_way: int = 0) -> SearchEnd | None:
        """Say why nothing more is to be tried, or worth it; `None` while something is.

        Parameters
        ----------
        gains:
            What the choices of the model promised whose trials are over, and what noise alone did then, in order.
        under_way:
            How many are not: they were chosen without knowing what came of each other, and are as many reasons to wait.
        """
        if self._in_vain >= PATIENCE:
            return SearchEnd(
                "exhausted", "every configuration that was found is known or refused: nothing is left to try"
            )
        patience, limit = max(PATIENCE, under_way), self._search.stop_when_gain_below
        latest = gains[-patience:]
        if limit is None or len(latest) < patience:
            return None
        if any(gain >= (noise if limit == "noise" else limit) for gain, noise in latest):
            return None
        gain, noise = latest[-1]
        than = f"the noise of one measurement changes it ({noise:.2%})" if limit == "noise" else f"{limit:.2%}"
        text = (
            f"the last {patience} proposals were each expected to grow the hypervolume by less than {than}, the "
            f"latest by {gain:.3%} (search.stop_when_gain_below)"
        )
        return SearchEnd("converged", text)


def seed_of(seed: int, position: int) -> int:
    """Derive the seed of one choice, so that it depends on nothing but the history."""
    return int.from_bytes(hashlib.sha256(f"{seed} {position}".encode()).digest()[:4], "little")
