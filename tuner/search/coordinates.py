"""A space as numbers: positions in the unit cube (a column a parameter), and the features that models see.

A position is *snapped* when it is exactly where `tuner.design.position_of` puts the value that it stands for, and where
the first of a parameter's values lies when the parameter is not searched in that configuration.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from graphlib import TopologicalSorter

import numpy as np
from numpy.typing import NDArray

from tuner.design import is_listed, place_of, position_of, value_at
from tuner.space import Parameter, Space, Value, active, is_active

Array = NDArray[np.float64]

_KEY_DECIMALS = 9
"""Positions that agree to so many decimals are the same configuration."""
_SAME = 10.0**-_KEY_DECIMALS


class Coordinates:
    """Translates between configurations of a space, positions and features."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._parameters = tuple(space.values())
        self._rest = tuple(float(_snapped(p, np.zeros(1))[0]) for p in self._parameters)
        self._conditions = _conditions(space)

    @property
    def size(self) -> int:
        """Number of parameters, and of columns of a position."""
        return len(self._parameters)

    @property
    def points(self) -> float:
        """Number of configurations, or more where parameters hang on others; infinite where one is a real number."""
        return math.prod(float(p.cardinality) for p in self._parameters)

    def position(self, changes: Mapping[str, Value]) -> Array:
        """Return the snapped position of a configuration, which must lie in the space."""
        return np.array(
            [
                position_of(p, changes[name]) if is_active(self.space, name, changes) else rest
                for (name, p), rest in zip(self.space.items(), self._rest, strict=True)
            ]
        )

    def place(self, changes: Mapping[str, Value]) -> Array | None:
        """Return where a configuration lies that need not be one of the space; `None` where that cannot be said.

        Beside the space it is no snapped position: between two values of a parameter, or below 0 or above 1.
        """
        places = [
            place_of(p, changes.get(name)) if is_active(self.space, name, changes) else rest
            for (name, p), rest in zip(self.space.items(), self._rest, strict=True)
        ]
        return None if None in places else np.array(places, dtype=np.float64)

    def changes(self, position: Array) -> dict[str, Value]:
        """Return the configuration that a position stands for."""
        values = {name: value_at(p, float(x)) for (name, p), x in zip(self.space.items(), position, strict=True)}
        return active(self.space, values)

    def snapped(self, positions: Array) -> Array:
        """Move positions (n, size) to where the values that they stand for lie."""
        return self._rested(np.column_stack([_snapped(p, positions[:, i]) for i, p in enumerate(self._parameters)]))

    def features(self, positions: Array) -> Array:
        """Return what models see (n, columns): a true category of three or more values takes a column for each."""
        columns: list[Array] = []
        for parameter, column in zip(self._parameters, positions.T, strict=True):
            if parameter.is_ordered or parameter.cardinality <= 2:
                columns.append(column)
            else:
                count = int(parameter.cardinality)
                index = np.minimum((column * count).astype(int), count - 1)
                columns += list((index[:, None] == np.arange(count)).astype(np.float64).T / np.sqrt(2))
        return np.column_stack(columns)

    def columns_of(self, names: Container[str]) -> NDArray[np.bool_]:
        """Say which columns of features are of parameters of these names."""
        counts = [1 if p.is_ordered or p.cardinality <= 2 else int(p.cardinality) for p in self._parameters]
        return np.repeat([name in names for name in self.space], counts)

    def steps(self) -> Array:
        """Return the distance from one value to the next of each parameter; 0 for real numbers, NaN for categories."""
        return np.array(
            [np.nan if not p.is_ordered else 1 / p.cardinality if is_listed(p) else 0.0 for p in self._parameters]
        )

    def everything(self) -> Array:
        """Return the position of every configuration (n, size); only where `points` is small."""
        axes = [_all_positions(p) for p in self._parameters]
        crossed = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, self.size)
        return unseen(self._rested(crossed), set()) if self._conditions else crossed

    def _rested(self, positions: Array) -> Array:
        """Move parameters that are not searched at snapped positions (n, size) to where those rest."""
        searched: dict[int, NDArray[np.bool_]] = {}
        for column, conditions in self._conditions:
            holds = np.ones(len(positions), dtype=bool)
            for other, allowed in conditions:
                holds &= np.isclose(positions[:, other, None], allowed, rtol=0.0, atol=_SAME).any(axis=1)
                holds &= searched.get(other, True)
            positions[~holds, column] = self._rest[column]
            searched[column] = holds
        return positions


def keys(positions: Array) -> list[bytes]:
    """Return one key a row, equal for the same configuration."""
    rounded = np.ascontiguousarray(np.round(positions, _KEY_DECIMALS) + 0.0)
    return [row.tobytes() for row in rounded]


def unseen(positions: Array, seen: set[bytes]) -> Array:
    """Return the rows that are not seen yet, each once, in order."""
    rows: dict[bytes, int] = {}
    for index, key in enumerate(keys(positions)):
        if key not in seen:
            rows.setdefault(key, index)
    return positions[list(rows.values())]


def _conditions(space: Space) -> list[tuple[int, list[tuple[int, Array]]]]:
    """Return the columns of parameters that hang on others, these first: the others' columns and allowed positions."""
    columns = {name: column for column, name in enumerate(space)}
    order = TopologicalSorter({name: parameter.when.keys() for name, parameter in space.items()}).static_order()
    return [
        (
            columns[name],
            [
                (columns[other], np.array([position_of(space[other], value) for value in values]))
                for other, values in space[name].when.items()
            ],
        )
        for name in order
        if space[name].when
    ]


def _snapped(parameter: Parameter, column: Array) -> Array:
    count = parameter.cardinality
    if is_listed(parameter):
        return (np.clip(np.floor(column * count), 0, count - 1) + 0.5) / count
    assert parameter.low is not None
    assert parameter.high is not None
    if parameter.low == parameter.high:
        return np.full_like(column, 0.5)
    column = np.clip(column, 0.0, 1.0)
    if not parameter.is_int:
        return column
    span = np.log(parameter.high / parameter.low)
    values = np.clip(np.round(parameter.low * np.exp(column * span)), parameter.low, parameter.high)
    positions: Array = np.log(values / parameter.low) / span
    return positions


def _all_positions(parameter: Parameter) -> Array:
    assert parameter.low is not None or parameter.choices is not None
    values: Sequence[Value] = (
        parameter.ordered_choices
        if parameter.choices is not None
        else [parameter.at_step(i) for i in range(int(parameter.cardinality))]
    )
    return np.array([position_of(parameter, v) for v in values])
