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

STARTS = "starts"
"""Name of Optuna's constraint for everything that keeps an engine from running: memory, or arguments vLLM refuses."""
BESIDE, LEARNED = "beside", "learned"
"""Attributes of a trial whose configuration lies beside the space: its coordinates, and what it showed. Optuna has no
place for it, so that it is closed there without values; the model learns from it all the same."""


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
    history: Sequence[StoredTrial], coordinates: Coordinates, objectives: int, constraints: Sequence[str]
) -> Past:
    """Return the trials that have a place in the space, or beside it.

    Parameters
    ----------
    objectives:
        How many there are.
    constraints:
        Their names, `STARTS` first.
    """
    inside = [t for t in history if t.user_attrs.get("in_space") and len(t.params) == coordinates.size]
    beside = [t for t in history if LEARNED in t.user_attrs]
    told = [t for t in inside if t.state.name == "COMPLETE"]
    nothing = [math.nan] * objectives
    places = [coordinates.place(json.loads(t.user_attrs[BESIDE])) for t in beside]
    positions = _rows([*_positions(told, coordinates), *places], coordinates.size)
    values = [t.values for t in told] + [t.user_attrs[LEARNED]["values"] for t in beside]
    violations = [t.constraints for t in told] + [t.user_attrs[LEARNED]["violations"] for t in beside]
    could_not_run = [bool(t.user_attrs.get("imputed")) for t in (*told, *beside)]
    return Past(
        positions=positions,
        values=_rows([nothing if not_run else v for v, not_run in zip(values, could_not_run, strict=True)], objectives),
        violations=_rows(
            [
                [math.nan if not_run and name != STARTS else signed[name] for name in constraints]
                for signed, not_run in zip(violations, could_not_run, strict=True)
            ],
            len(constraints),
        ),
        widths=_rows([t.user_attrs.get("widths") or nothing for t in (*told, *beside)], objectives),
        pending=_positions([t for t in inside if t.state.name in ("RUNNING", "WAITING")], coordinates),
        closed=_positions([t for t in inside if t.state.name == "FAIL"], coordinates),
        beside={
            key: json.loads(t.user_attrs["changes"])
            for key, t in zip(keys(positions[len(told) :]), beside, strict=True)
        },
    )


def _positions(trials: Sequence[StoredTrial], coordinates: Coordinates) -> Array:
    decoded = [{n: decode(coordinates.space[n], v) for n, v in t.params.items()} for t in trials]
    return _rows([coordinates.position(changes) for changes in decoded], coordinates.size)


def _rows(rows: Sequence[Any], columns: int) -> Array:
    """Return rows as an array (n, columns) of numbers, NaN for `None`."""
    return np.array(rows, dtype=np.float64).reshape(-1, columns)
