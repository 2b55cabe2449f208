"""A value of the space as the numbers and texts that Optuna keeps, and back."""

from __future__ import annotations

import json
from typing import Any

from tuner.space import Parameter, Value

MOST_WHOLE_NUMBERS = 64
"""Ranges with more values than this are kept as real numbers and rounded: Optuna's samplers would list every whole one,
gigabytes for a range of bytes."""


def encode(parameter: Parameter, value: Value) -> Any:
    """Turn a value of the space into Optuna's."""
    if parameter.cardinality > MOST_WHOLE_NUMBERS:
        return float(value)
    if parameter.step is not None:
        return parameter.step_of(value)
    if parameter.choices is None:
        return int(value)
    if parameter.is_ordered:
        return parameter.ordered_choices.index(value)
    return json.dumps(parameter.as_choice(value), sort_keys=True)


def decode(parameter: Parameter, value: Any) -> Value:
    """Turn Optuna's value into one of the space."""
    if parameter.cardinality > MOST_WHOLE_NUMBERS:
        return parameter.nearest(value)
    if parameter.step is not None:
        return parameter.at_step(value)
    if parameter.choices is None:
        return value
    return parameter.ordered_choices[value] if parameter.is_ordered else json.loads(value)
