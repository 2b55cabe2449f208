"""What the model learns from: the trials in Optuna's store, as arrays."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tuner.search.coordinates import Array, Coordinates, keys
from tuner.search.encoding import decode
from tuner.search.suggest import Past
from tuner.space import Value, is_active

STARTS = "starts"
"""Name of Optuna's constraint for everything that keeps an engine from running: memory, or arguments vLLM refuses."""
BESIDE, LEARNED = "beside", "learned"
"""Attributes of a trial whose configuration lies beside the space: its coordinates, and what it showed. Optuna has no
place for it, so that it is closed there without values; the model learns from it all the same."""
CENSORED = "censored"
"""Attribute of a trial that was ended early: its values are what it had reached by then, of its constraints nothing is
known."""
RATIOS = 0.15
"""Standard deviation of the logarithm of measured over predicted, before there are many: 0.10 to 0.14 over the
configurations of two studies of real engines and the recorded A10G study (benchmarks/README.md, Twin)."""


class StoredTrial(Protocol):
    """What is read of one of Optuna's trials."""

    @property
    def state(self) -> Any:
        """With a name: RUNNING, WAITING, COMPLETE or FAIL."""

    @property
    def params(self) -> Mapping[str, Any]:
        """Of the space, encoded; empty beside it."""

    @property
    def values(self) -> Sequence[float] | None:
        """On the scale that is modelled."""

    @property
    def constraints(self) -> Mapping[str, float]:
        """Signed violations."""

    @property
    def user_attrs(self) -> Mapping[str, Any]:
        """What the proposer noted."""


def past_of(
    history: Sequence[StoredTrial], coordinates: Coordinates, logarithmic: Sequence[bool], constraints: Sequence[str]
) -> Past:
    """Return the trials that have a place in the space, or beside it.

    Parameters
    ----------
    logarithmic:
        Of each objective, whether its logarithm is modelled.
    constraints:
        Their names, `STARTS` first.
    """
    inside = [t for t in history if t.user_attrs.get("in_space") and _is_whole(t, coordinates)]
    beside = [t for t in history if BESIDE in t.user_attrs]
    ended = [t for t in (*inside, *beside) if CENSORED in t.user_attrs]
    told = [t for t in inside if t.state.name == "COMPLETE" and CENSORED not in t.user_attrs]
    learned = [t for t in beside if LEARNED in t.user_attrs and CENSORED not in t.user_attrs]
    running = [t for t in (*inside, *beside) if t.state.name == "RUNNING"]
    off = [*learned, *(t for t in running if BESIDE in t.user_attrs)]
    objectives, nothing = len(logarithmic), [math.nan] * len(logarithmic)

    def places(trials: Sequence[StoredTrial]) -> Array:
        return _rows([_place(t, coordinates) for t in trials], coordinates.size)

    could_not_run = [bool(t.user_attrs.get("imputed")) for t in (*told, *learned)]
    values = [_values(t) for t in (*told, *learned)]
    measured = [v for v, not_run in zip(values, could_not_run, strict=True) if v is not None and not not_run]
    sizes = np.median(np.abs(measured), axis=0) if measured else np.ones(objectives)
    violations = [t.constraints for t in told] + [t.user_attrs[LEARNED]["violations"] for t in learned]
    return Past(
        positions=places([*told, *learned]),
        values=_rows([nothing if not_run else v for v, not_run in zip(values, could_not_run, strict=True)], objectives),
        violations=_rows(
            [
                [math.nan if not_run and name != STARTS else signed[name] for name in constraints]
                for signed, not_run in zip(violations, could_not_run, strict=True)
            ],
            len(constraints),
        ),
        ratios=np.where(logarithmic, RATIOS, RATIOS * sizes),
        widths=_rows([t.user_attrs.get("widths") or nothing for t in (*told, *learned)], objectives),
        pending=places(running),
        closed=places([t for t in inside if t.state.name == "FAIL"]),
        censored=places(ended),
        bounds=_rows([_values(t) for t in ended], objectives),
        beside=dict(zip(keys(places(off)), (json.loads(t.user_attrs["changes"]) for t in off), strict=True)),
    )


def modelled(value: float, log: bool, sign: int) -> float:
    """Return what is minimised: ratios matter in times and rates, so their logarithm is modelled."""
    return sign * (math.log(max(value, 1e-9)) if log else value)


def _values(trial: StoredTrial) -> Sequence[float] | None:
    found: Sequence[float] | None = trial.user_attrs[LEARNED]["values"] if LEARNED in trial.user_attrs else trial.values
    return found


def _is_whole(trial: StoredTrial, coordinates: Coordinates) -> bool:
    """Whether everything that is searched in a trial was written down; it may have been killed on the way."""
    values = _decoded(trial, coordinates)
    return all(name in values for name in coordinates.space if is_active(coordinates.space, name, values))


def _decoded(trial: StoredTrial, coordinates: Coordinates) -> dict[str, Value]:
    return {name: decode(coordinates.space[name], value) for name, value in trial.params.items()}


def _place(trial: StoredTrial, coordinates: Coordinates) -> Any:
    if BESIDE in trial.user_attrs:
        return coordinates.place(json.loads(trial.user_attrs[BESIDE]))
    return coordinates.position(_decoded(trial, coordinates))


def _rows(rows: Sequence[Any], columns: int) -> Array:
    """Return rows as an array (n, columns) of numbers, NaN for `None`."""
    return np.array(rows, dtype=np.float64).reshape(-1, columns)
