"""Problem (d): made up, nine parameters of all kinds, a third of the space out of memory, and nobody knows where.

Shaped like serving (waiting falls with concurrency, steps grow with it), with interactions that no memory model or twin
has: what it tests is the sampler alone.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np

from search_bench.cache import Cache
from search_bench.problem import Changes, Knowledge, Truth, Values, corner_of, front_of, lognormal, parameter
from tuner.config import EngineConfig
from tuner.design import design_points

SPACE = {
    "lanes": parameter({"low": 1, "high": 512, "log": True}),
    "chunk": parameter({"low": 128, "high": 32768, "log": True}),
    "share": parameter({"low": 0.4, "high": 0.97}),
    "page": parameter([8, 16, 32, 64, 128]),
    "packing": parameter(["plain", "half", "mixed"]),
    "lookahead": parameter([True, False]),
    "kernel": parameter(["red", "green", "blue"]),
    "split": parameter({"low": 1, "high": 8}),
    "delay": parameter({"low": 0.0, "high": 1.0}),
}
DEFAULT = {
    "lanes": 256,
    "chunk": 8192,
    "share": 0.9,
    "page": 16,
    "packing": "plain",
    "lookahead": True,
    "kernel": "red",
    "split": 1,
    "delay": 0.0,
}
DATA = Path(__file__).parents[1] / "data" / "search"
TRIAL_S, REFUSED_S = 600.0, 180.0
ROUNDS, CENTRES, KEPT = 60, 500, 400
_BYTES = {"plain": 1.0, "half": 0.5, "mixed": 0.7}
_SLOWER = {"plain": 1.0, "half": 1.1, "mixed": 1.03}
_KERNEL = {"red": (1.0, 1.0), "green": (0.86, 1.12), "blue": (1.15, 0.9)}


class Synthetic:
    """The problem; without any knowledge."""

    name = "synthetic"
    title = "(d) synthetic, hidden out-of-memory"
    space = SPACE
    default = DEFAULT
    version = "1"

    def truth(self, changes: Changes) -> Truth:
        """Compute what a configuration is worth."""
        violation = _violation(changes)
        if violation > 0:
            return Truth(None, violation, REFUSED_S)
        return Truth(_values(changes), violation, TRIAL_S)

    def noise(self, generator: np.random.Generator) -> Values:
        """Draw a measurement's noise."""
        return lognormal(0.05, generator)

    def note(self, changes: Changes) -> None:
        """Everything is known already."""

    def knowledge(self) -> Knowledge:
        """Nothing is known."""
        return Knowledge(EngineConfig({"model": "synthetic"}))

    def known_points(self) -> list[Values]:
        """Return the front of a search with tens of thousands of evaluations."""
        return _best_known()

    def corner(self) -> Values:
        """Return the reference point."""
        return corner_of(_best_known())


def _room(c: Changes) -> float:
    """Memory that is left for pages."""
    weights = 52.0 / c["split"] ** 0.6
    peak = 0.9 + c["chunk"] * 3.2e-4 * (1.4 if c["kernel"] == "green" else 1.0) + c["lanes"] * 0.012
    return 80.0 * c["share"] - weights - peak - (1.5 if c["lookahead"] else 0.0) - 0.4 * c["split"]


def _violation(c: Changes) -> float:
    needed = 15.0 * _BYTES[c["packing"]] * (1 + c["page"] / 256)
    room = _room(c)
    short = (needed - room) / max(room, 0.9)
    if c["kernel"] == "blue" and c["page"] < 16:
        short = max(short, 0.5)
    return max(-1.0, min(10.0, short))


def _values(c: Changes) -> Values:
    held = _room(c) / (0.35 * _BYTES[c["packing"]])
    lanes = max(1.0, 1.0 / (1.0 / c["lanes"] + 1.0 / held))
    quick, small = _KERNEL[c["kernel"]]
    chunk = c["chunk"] / (1 + 0.15 * (c["split"] - 1))
    efficiency = chunk / (chunk + 900.0) * (1 - 0.25 * math.exp(-c["page"] / 12))
    prefill_s = 1.6 * quick * _SLOWER[c["packing"]] / efficiency / c["split"] ** 0.35
    load = min(0.97, 0.55 + 0.5 / (1 + lanes / 6) + 0.08 * (prefill_s / 1.6 - 1) + 0.1 * c["delay"] ** 2)
    ttft = prefill_s * (1 + load / (1 - load) * 0.6) + 14.0 / (1 + lanes) ** 0.9 + 0.8 * c["delay"]
    step = 0.017 * small / c["split"] ** 0.25 * (1 + (0.05 if c["page"] > 64 else 0.0))
    interference = 0.35 * (chunk / 4096) ** 0.7 * (1 - 0.55 * c["delay"] * (1 - c["delay"]) * 4 * 0.8)
    tpot = step * (1 + 0.05 * lanes**0.8) * (1 + interference) * (0.93 if c["lookahead"] else 1.0)
    tpot *= 1.06 if c["packing"] == "half" and c["page"] > 32 else 1.0
    return (ttft, tpot)


@cache
def _best_known() -> list[Values]:
    """Search with mutation around the front, from a large even sample; noise-free and done once."""
    kept = Cache(DATA / "synthetic-best.jsonl", Synthetic.version)
    if (best := kept.get("front")) is None:
        generator = np.random.default_rng(0)
        pool = [(c, _values(c)) for c in design_points(SPACE, 8192, 1) if _violation(c) <= 0]
        for _ in range(ROUNDS):
            pool = _front(pool)
            centres = generator.choice(len(pool), size=min(len(pool), CENTRES), replace=False)
            others = [_mutated(pool[i][0], generator) for i in centres for _ in range(1 + CENTRES // len(centres))]
            pool += [(c, _values(c)) for c in others if _violation(c) <= 0]
        members = sorted(values for _, values in _front(pool))
        best = [[float(f"{v:.6g}") for v in values] for values in members[:: max(1, len(members) // KEPT)]]
        kept.put("front", best)
    return [(ttft, tpot) for ttft, tpot in best]


def _front(pool: list[tuple[dict[str, object], Values]]) -> list[tuple[dict[str, object], Values]]:
    return [pool[i] for i in front_of([values for _, values in pool])]


def _mutated(changes: Changes, generator: np.random.Generator) -> dict[str, object]:
    from tuner.design import value_at

    other = dict(changes)
    for name in generator.choice(list(SPACE), size=int(generator.integers(1, 4)), replace=False):
        p = SPACE[str(name)]
        if p.choices is not None or generator.random() < 0.2:
            other[str(name)] = value_at(p, float(generator.random()))
        elif p.log:
            value = other[str(name)] * math.exp(0.15 * generator.standard_normal())
            other[str(name)] = int(min(p.high or 1, max(p.low or 1, round(value))))
        elif p.is_int:
            other[str(name)] = int(min(p.high or 1, max(p.low or 1, other[str(name)] + generator.integers(-1, 2))))
        else:
            step = 0.08 * ((p.high or 1) - (p.low or 0)) * generator.standard_normal()
            other[str(name)] = float(min(p.high or 1, max(p.low or 0, other[str(name)] + step)))
    return other
