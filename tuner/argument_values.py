"""Values of engine arguments, whichever way a study file or vLLM's command line spells them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from tuner.errors import UsageError


class Arguments:
    """Engine arguments by vLLM's names, whichever way a study or a command line spells their values."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = {key if key.startswith("env.") else key.replace("-", "_"): value for key, value in raw.items()}

    def raw(self, name: str) -> Any:
        """Return the value as it stands, `None` where it is not set."""
        return self._raw.get(name)

    def number(self, name: str, default: float) -> float:
        """Return a finite number."""
        value = self._raw.get(name)
        if value is None:
            return default
        number = _parse_number(value)
        if number is None or not math.isfinite(number):
            raise UsageError(f"engine arguments: {name}: {value!r} is not a number.")
        return number

    def count(self, name: str, default: int) -> int:
        """Return a whole number from 1."""
        number = self.number(name, default)
        if number < 1:
            raise UsageError(f"engine arguments: {name}: {self._raw.get(name)!r} must be at least 1.")
        return int(number)

    def optional_count(self, name: str) -> int | None:
        """Return a whole number from 1, or `None` where it is not set."""
        return None if self._raw.get(name) is None else self.count(name, 1)

    def share(self, name: str, default: float) -> float:
        """Return a number above 0 and at most 1."""
        number = self.number(name, default)
        if not 0 < number <= 1:
            raise UsageError(f"engine arguments: {name}: {number} must be above 0 and at most 1.")
        return number

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a switch."""
        value = self._raw.get(name)
        if isinstance(value, str):
            return value.strip().lower() in ("1", "true", "yes", "on")
        return default if value is None else bool(value)

    def env_flag(self, name: str, *, default: bool) -> bool:
        """Return an environment variable read as a switch."""
        return self.flag(f"env.{name}", default=default)


def _parse_number(value: Any) -> float | None:
    """Numbers as vLLM's command line takes them: `k`, `m`, `g` are powers of 1000, `K`, `M`, `G` of 1024."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)([kKmMgGtT]?)\s*", str(value))
    if match is None:
        return None
    scale = match.group(2)
    power = " kmgt".index(scale.lower()) if scale else 0
    return float(match.group(1)) * float((1024 if scale.isupper() else 1000) ** power)


def as_mapping(value: Any, scalar_key: str) -> Mapping[str, Any]:
    """Return a mapping given as such or as JSON text; a scalar becomes the value of `scalar_key`."""
    if isinstance(value, str) and value.strip().startswith("{"):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UsageError(f"engine arguments: {value!r} is not valid JSON: {error}.") from error
    if isinstance(value, Mapping):
        return value
    return {} if value is None else {scalar_key: value}
