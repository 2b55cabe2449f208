"""Points that fill a search space evenly, and where a value lies in it: a number from 0 to 1 for each parameter."""

from __future__ import annotations

import math
from bisect import bisect

from tuner.space import Parameter, Space, Value, active


def design_points(space: Space, count: int, seed: int) -> list[dict[str, Value]]:
    """Return the first points of a scrambled Sobol sequence over a space; more of them begin with the same ones.

    Parameters
    ----------
    count:
        Number of points, at least 1.
    """
    from scipy.stats import qmc

    sobol = qmc.Sobol(len(space), scramble=True, rng=seed)
    positions = sobol.random_base2(max(0, count - 1).bit_length())[:count]
    return [
        active(space, {name: value_at(p, float(x)) for (name, p), x in zip(space.items(), position, strict=True)})
        for position in positions
    ]


def value_at(parameter: Parameter, position: float) -> Value:
    """Value of a parameter at a position in [0, 1]: every choice, and every step of a range, gets an equal share."""
    if is_listed(parameter):
        index = min(int(position * parameter.cardinality), int(parameter.cardinality) - 1)
        return parameter.at_step(index) if parameter.choices is None else parameter.ordered_choices[index]
    low, high = _ends(parameter)
    value = (
        math.exp(math.log(low) + position * math.log(high / low)) if parameter.log else low + position * (high - low)
    )
    value = min(high, max(low, value))
    return round(value) if parameter.is_int else value


def position_of(parameter: Parameter, value: Value) -> float:
    """Where a value of a parameter lies, so that `value_at` gives it back."""
    if parameter.choices is not None:
        index = parameter.ordered_choices.index(parameter.as_choice(value))
        return (index + 0.5) / len(parameter.choices)
    if is_listed(parameter):
        return (parameter.step_of(value) + 0.5) / parameter.cardinality
    low, high = _ends(parameter)
    return 0.5 if low == high else _along(parameter, value)


def place_of(parameter: Parameter, value: Value) -> float | None:
    """Where any value lies on the scale of a parameter's own: between two of them, or below 0 or above 1.

    `None` for what has no place there: another category, or 0 where it means no limit.
    """
    if parameter.contains(value):
        return position_of(parameter, value)
    if not parameter.is_ordered or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not math.isfinite(value) or (value <= 0 and (parameter.log or parameter.zero_is_most)):
        return None
    if parameter.choices is not None:
        numbers = [c for c in parameter.ordered_choices if c != 0 or not parameter.zero_is_most]
        below = min(max(bisect(numbers, value) - 1, 0), len(numbers) - 2)
        share = float((value - numbers[below]) / (numbers[below + 1] - numbers[below]))
        return (below + share + 0.5) / len(parameter.choices)
    low, high = _ends(parameter)
    if low == high:
        return None
    if is_listed(parameter):
        return ((value - low) / (parameter.step or 1) + 0.5) / parameter.cardinality
    return _along(parameter, value)


def is_listed(parameter: Parameter) -> bool:
    """Whether every value of a parameter has an equal share of [0, 1]: choices, and linear ranges of finite length."""
    return not parameter.log and not math.isinf(parameter.cardinality)


def _along(parameter: Parameter, value: float) -> float:
    """Return how far along a range a value lies: 0 at its start, 1 at its end."""
    low, high = _ends(parameter)
    return math.log(value / low) / math.log(high / low) if parameter.log else (value - low) / (high - low)


def _ends(parameter: Parameter) -> tuple[float, float]:
    assert parameter.low is not None
    assert parameter.high is not None
    return parameter.low, parameter.high
