"""A user's constraints: one metric against one limit, as a signed relative violation."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

_LARGEST = 1e9
_TEXT = re.compile(r"\s*(?P<metric>[^\s<>=]+)\s*(?P<relation><=|>=)\s*(?P<limit>\S+)\s*")


@dataclass(frozen=True, slots=True)
class Constraint:
    """`metric <= limit` or `metric >= limit`, the limit in the unit of the metric."""

    metric: str
    relation: Literal["<=", ">="]
    limit: float

    @classmethod
    def parse(cls, text: str) -> Constraint:
        """Read `ttft_p95_s <= 2`: a metric's name, a relation and a number, and nothing else is ever evaluated.

        Raises
        ------
        ValueError
            When the text is anything else.
        """
        match = _TEXT.fullmatch(text)
        limit = _number(match["limit"]) if match else None
        if match is None or limit is None:
            raise ValueError(f"{text!r} is not a constraint; write it as 'ttft_p95_s <= 2'")
        return cls(match["metric"], "<=" if match["relation"] == "<=" else ">=", limit)

    def __str__(self) -> str:
        return f"{self.metric} {self.relation} {self.limit:g}"

    def violation(self, value: float) -> float:
        """Relate value - limit, negated for `>=`, to the size of the limit: positive is violated.

        In the metric's own unit for a limit of 0, and within ±1e9 so that no tiny limit makes it infinite.
        """
        excess = value - self.limit if self.relation == "<=" else self.limit - value
        return max(-_LARGEST, min(_LARGEST, excess / abs(self.limit) if self.limit else excess))


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
