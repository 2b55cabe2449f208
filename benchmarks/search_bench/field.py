"""A smooth field of ratios over a space: by how much a truth differs from what any model of it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tuner.space import Space

FIELD_DEVIATION = (0.12, 0.08)
"""Standard deviation of the logarithm of the field, for TTFT and TPOT."""
FIELD_LENGTHS = {
    "max_num_seqs": 0.8,
    "max_num_batched_tokens": 0.8,
    "long_prefill_token_threshold": 0.8,
    "gpu_memory_utilization": 4.0,
    "enable_prefix_caching": 3.0,
    "block_size": 3.0,
    "async_scheduling": 3.0,
}
"""Over which share of a parameter's range the field changes by about its deviation; without one, not at all. What the
scheduler does not see changes times by a few percent, mostly everywhere alike."""


class Field:
    """A smooth random function of a configuration, of the stated deviation: a Gaussian process as a sum of waves."""

    WAVES = 64

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        generator = np.random.default_rng(seed)
        lengths = np.array([FIELD_LENGTHS.get(name, np.inf) for name in space])
        self._frequencies = generator.standard_normal((2, self.WAVES, len(space))) / lengths
        self._phases = generator.uniform(0, 2 * np.pi, (2, self.WAVES))

    def __call__(self, values: Mapping[str, Any]) -> tuple[float, float]:
        """Return the ratios of TTFT and TPOT for the values of all parameters."""
        position = np.array([_position(p, values[name]) for name, p in self._space.items()])
        waves = np.cos(self._frequencies @ position + self._phases).sum(axis=1) * np.sqrt(2 / self.WAVES)
        return (float(np.exp(FIELD_DEVIATION[0] * waves[0])), float(np.exp(FIELD_DEVIATION[1] * waves[1])))


def _position(p: Any, value: Any) -> float:
    """Place of a value in its parameter, 0 to 1; values outside are held at the ends."""
    if p.choices is None:
        return min(1.0, max(0.0, (value - p.low) / (p.high - p.low)))
    choices = list(p.ordered_choices)
    if not p.is_ordered:
        return choices.index(value) / max(1, len(choices) - 1)
    return float(np.interp(value, choices, np.linspace(0, 1, len(choices))))
