"""Points that fill a search space evenly: the design that a study starts from, and the sample that a plan judges."""

from __future__ import annotations

import math

from tuner.space import Parameter, Space, Value

_DECIMALS = 10
"""Steps add up to 0.8999999999999999 where a person writes 0.9."""


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
        {name: value_at(parameter, float(x)) for (name, parameter), x in zip(space.items(), position, strict=True)}
        for position in positions
    ]


def value_at(parameter: Parameter, position: float) -> Value:
    """Value of a parameter at a position in [0, 1): every choice, and every step of a range, gets an equal share."""
    if parameter.choices is not None:
        return parameter.ordered_choices[int(position * len(parameter.choices))]
    low, high = parameter.low, parameter.high
    assert low is not None
    assert high is not None
    if parameter.log:
        value = math.exp(math.log(low) + position * (math.log(high) - math.log(low)))
        return min(int(high), max(int(low), round(value))) if parameter.is_int else value
    if math.isinf(parameter.cardinality):
        return low + position * (high - low)
    return parameter.at_step(int(position * parameter.cardinality))
