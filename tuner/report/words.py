"""Names and numbers as people read them: labels of metrics, values with fitting units, changes in percent."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

from tuner.secrets import MASKED, is_secret

_LATENCY = re.compile(
    r"(?P<kind>ttft_per_1k_prompt|ttft_sent|ttft|tpot|itl|e2el|queue)_(?P<statistic>mean|p\d+|max|std)_s"
    r"(?:@(?P<group>[\d-]+))?(?P<corrected>_corrected)?"
)
_KINDS = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2el": "end-to-end latency",
    "queue": "queue time",
    "ttft_sent": "TTFT after sending",
    "ttft_per_1k_prompt": "TTFT per 1,000 prompt tokens",
}
_UNITS = re.compile(r"_(s|gib|tokens|mhz|c|j)$")


def label(metric: str) -> str:
    """Name of a metric in words, without its unit: `ttft_p95_s@2048` is "TTFT p95, prompts of 2048 tokens"."""
    match = _LATENCY.fullmatch(metric)
    if match is None:
        return _UNITS.sub("", metric.replace("_per_s", " per second")).replace("_", " ")
    text = f"{_KINDS[match['kind']]} {match['statistic']}"
    text += f", prompts of {match['group']} tokens" if match["group"] else ""
    return text + (", corrected for machine speed" if match["corrected"] else "")


def scaled(unit: str, values: Iterable[float]) -> tuple[float, str]:
    """Factor and unit in which these values are easy to read: milliseconds where all are under a second, percent."""
    if unit == "s" and max((abs(v) for v in values), default=1.0) < 1.0:
        return 1000.0, "ms"
    return (100.0, "%") if unit == "share" else (1.0, unit)


def quantity(value: float, unit: str) -> str:
    """Return a value with three digits and its unit: `1.74 s`, `88.1 ms`, `93%`."""
    factor, shown = scaled(unit, (value,))
    number = digits(value * factor)
    return f"{number}%" if shown == "%" else f"{number} {shown}".strip()


def interval(low: float, high: float, unit: str) -> str:
    """Return an interval in the unit that fits its upper end: `1.63–1.86 s`."""
    factor, shown = scaled(unit, (low, high))
    return f"{digits(low * factor)}–{digits(high * factor)} {shown}".strip()


def digits(value: float) -> str:
    """Return a number with three significant digits, thousands apart, never in powers of ten."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def percent(change: float) -> str:
    """Return a relative change with its sign: `−31%`, `+4%`, `+0.4%`."""
    shown = f"{abs(change) * 100:.1f}" if abs(change) < 0.0095 else f"{abs(change) * 100:.0f}"
    sign = "" if float(shown) == 0 else "+" if change > 0 else "−"
    return f"{sign}{shown}%"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 trial`, `12 trials`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def param_text(name: str, value: Any) -> str:
    """Return `name=value`; a value that the name makes a secret is masked."""
    return f"{name}={MASKED if is_secret(name) else value_text(value)}"


def value_text(value: Any) -> str:
    """Return a parameter's value as one writes it in YAML: `true`, `16`, `[1, 2]`."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
