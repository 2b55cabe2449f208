"""What a predictor says, when the proposer needs it: asked ahead while trials run, remembered, the same after a resume.

A prediction depends on the trials that the predictor is calibrated on. Which those are follows from how many were
measured, with one trial's delay, so that a new calibration can be asked about before it is needed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from tuner.search.coordinates import Array, Coordinates, keys
from tuner.search.guide import Effort, Guide, explored, guided
from tuner.space import Value

CALIBRATED_ON = (0, 3, 6, 12, 24, 48)
"""Measured trials that the predictor is calibrated on: as many as there are, of these."""


class Predict(Protocol):
    """Predicts objectives of configurations, in their own units."""

    def __call__(self, configurations: Sequence[Mapping[str, Value]], basis: int) -> Sequence[Sequence[float] | None]:
        """Return the objectives of each, calibrated on the first `basis` trials.

        Infinite where no engine would run, `None` where nothing can be said.
        """
        ...


class Guidance:
    """A predictor as the proposer uses it.

    Parameters
    ----------
    model:
        From objectives in their own units to the scale that is modelled.
    ahead:
        Whether predictions are made in the background before they are needed.
    """

    def __init__(
        self,
        coordinates: Coordinates,
        predict: Predict,
        model: Callable[[Sequence[float]], Sequence[float]],
        objectives: int,
        seed: int,
        *,
        ahead: bool,
        effort: Effort,
    ) -> None:
        self._coordinates = coordinates
        self._predict = predict
        self._model = model
        self._empty = [float("nan")] * objectives
        self._seed = seed
        self._effort = effort
        self._known: dict[tuple[int, bytes], Sequence[float]] = {}
        self._explored: dict[int, tuple[Array, Array]] = {}
        self._one_at_a_time = threading.Lock()
        self._may_work = threading.Event()
        self._may_work.set()
        self._wanted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="guidance", daemon=True) if ahead else None
        if self._worker is not None:
            self._worker.start()

    def at(
        self, measured: int, positions: Array, beside: Mapping[bytes, Mapping[str, Value]] | None = None
    ) -> Guide | None:
        """Return the guide after so many measured trials, from predictions at positions (n, size) too.

        Parameters
        ----------
        beside:
            Configurations of those of the positions that lie beside the space, by `keys`.
        """
        basis = basis_of(measured)
        if basis not in self._explored:
            self._explored[basis] = explored(
                self._coordinates, lambda p: self._values(p, basis), self._seed, self._effort
            )
        everywhere, values = self._explored[basis]

        def ask(further: Array) -> Array:
            return self._values(further, basis)

        predicted = self._values(positions, basis, beside)
        return guided(
            self._coordinates, np.vstack([everywhere, positions]), np.vstack([values, predicted]), ask, self._effort
        )

    @property
    def works_ahead(self) -> bool:
        """Whether predictions are made in the background."""
        return self._worker is not None

    def prepare(
        self,
        measured: int,
        positions: Array,
        beside: Mapping[bytes, Mapping[str, Value]],
        rehearse: Callable[[Guide], object],
    ) -> None:
        """Have ready what `at` will be asked, and what the guide will be asked where it is used as `rehearse` does."""

        def work() -> None:
            if (guide := self.at(measured, positions, beside)) is not None:
                rehearse(guide)

        if self._worker is not None:
            with contextlib.suppress(queue.Empty):
                self._wanted.get_nowait()  # outdated: nobody will ask for that any more
            self._wanted.put(work)

    def rest(self, *, now: bool) -> None:
        """Ask nothing ahead for now: something is measured that must not be disturbed."""
        if now:
            self._may_work.clear()
        else:
            self._may_work.set()

    def _work(self) -> None:
        while True:
            self._wanted.get()()

    def _values(self, positions: Array, basis: int, beside: Mapping[bytes, Mapping[str, Value]] | None = None) -> Array:
        known = keys(positions)
        rows = [self._value(row, key, basis, beside or {}) for row, key in zip(positions, known, strict=True)]
        return np.array(rows, dtype=np.float64).reshape(-1, len(self._empty))

    def _value(
        self, position: Array, key: bytes, basis: int, beside: Mapping[bytes, Mapping[str, Value]]
    ) -> Sequence[float]:
        if threading.current_thread() is self._worker:
            self._may_work.wait()
        with self._one_at_a_time:
            if (basis, key) not in self._known:
                changes = beside.get(key) or self._coordinates.changes(position)
                [found] = self._predict([changes], basis)
                self._known[basis, key] = self._modelled(found)
            return self._known[basis, key]

    def _modelled(self, found: Sequence[float] | None) -> Sequence[float]:
        if found is None:
            return self._empty
        return self._model(found) if np.isfinite(found).all() else [np.inf] * len(self._empty)


def basis_of(measured: int) -> int:
    """Return how many trials the predictor is calibrated on after so many measured ones."""
    return max((count for count in CALIBRATED_ON if count < measured), default=0)
