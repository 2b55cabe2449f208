"""What a search is held against: a space, what each configuration is really worth, and what is known of it beforehand.

Objectives are p95 TTFT and p95 TPOT in seconds. The truth is free of noise; a run adds the noise of one measurement.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tuner.config import EngineConfig
from tuner.gate import Gate
from tuner.ledger import History, TrialRecord, TrialState
from tuner.search.guide import THOROUGH, Effort
from tuner.space import Parameter, Space, Value

Changes = Mapping[str, Value]
Values = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Truth:
    """What a configuration is worth without noise.

    Parameters
    ----------
    values:
        p95 TTFT and p95 TPOT in seconds; `None` where the engine cannot start.
    violation:
        Signed memory violation, above 0 exactly where it cannot start.
    engine_s:
        Seconds that a trial of it takes, start and stop included.
    weights_gib, kv_gib:
        What the engine would say of its memory, for memory models that learn; `None` where it says nothing.
    """

    values: Values | None
    violation: float
    engine_s: float
    weights_gib: float | None = None
    kv_gib: float | None = None


Predictor = Callable[[Changes, int], Values | None]
"""A twin's prediction of the objectives of a configuration, on so many measured trials; infinite where no engine would
run, `None` where it predicts nothing."""


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a tuner may know of a problem before anything runs; a baseline gets none of it.

    Parameters
    ----------
    base:
        What every trial starts with.
    gate:
        Made from the trials so far: refuses without an engine. `None` where nothing is known of the memory.
    predictor:
        The twin, made from the trials so far; `None` where there is none.
    effort:
        How often the twin is asked, as the tuner would on such a machine.
    first:
        (source, changes) of the trials after vLLM's defaults: recipes.
    effective:
        What vLLM sets beyond the space.
    """

    base: EngineConfig
    gate: Callable[[Callable[[], History]], Gate] | None = None
    predictor: Callable[[Callable[[], History]], Predictor] | None = None
    effort: Effort = THOROUGH
    first: Sequence[tuple[str, Changes]] = ()
    effective: Changes = field(default_factory=dict)


class Problem(Protocol):
    """One problem. `version` changes with everything that changes its truth."""

    name: str
    title: str
    space: Space
    default: Changes
    version: str

    def truth(self, changes: Changes) -> Truth:
        """Return what a configuration is worth; also for values outside the space, as recipes have them."""
        ...

    def noise(self, generator: np.random.Generator) -> Values:
        """Draw the factors by which one measurement differs from the truth."""
        ...

    def note(self, changes: Changes) -> None:
        """Remember a configuration that was looked at, for what is best known."""
        ...

    def knowledge(self) -> Knowledge:
        """Return what the tuner may know."""
        ...

    def known_points(self) -> list[Values]:
        """Return the values of everything that is known to be feasible, for the best known hypervolume."""
        ...

    def corner(self) -> Values:
        """Return the reference point of the hypervolume, in seconds."""
        ...


def key_of(changes: Changes) -> str:
    """Return a text that is equal for equal changes."""
    return json.dumps(dict(changes), sort_keys=True, separators=(",", ":"))


def measured(problem: Problem, truth: Truth, changes: Changes, seed: int) -> Values | None:
    """Return one noisy measurement; the same for the same configuration and seed, whoever asks and when."""
    if truth.values is None:
        return None
    digest = hashlib.sha256(f"{problem.name} {seed} {key_of(changes)}".encode()).digest()
    ttft, tpot = problem.noise(np.random.default_rng(int.from_bytes(digest[:8], "little")))
    return (truth.values[0] * ttft, truth.values[1] * tpot)


def lognormal(deviation: float, generator: np.random.Generator) -> Values:
    """Draw two factors whose logarithms are normal."""
    ttft, tpot = np.exp(deviation * generator.standard_normal(2))
    return float(ttft), float(tpot)


def front_of(points: Sequence[Values]) -> list[int]:
    """Rows of the front of two objectives, in ascending order of the first; quick for many points."""
    order = sorted(range(len(points)), key=lambda i: points[i])
    members: list[int] = []
    for row in order:
        if not members or points[row][1] < points[members[-1]][1]:
            members.append(row)
    return members


def corner_of(points: Sequence[Values]) -> Values:
    """Return a reference point: the worst values of the front, and a tenth of the front's extent beyond (as ratios)."""
    members = np.log(np.array([points[i] for i in front_of(points)]))
    low, high = members.min(axis=0), members.max(axis=0)
    corner = np.exp(high + 0.1 * (high - low))
    return (float(corner[0]), float(corner[1]))


def record(number: int, base: EngineConfig, changes: Changes, truth: Truth) -> TrialRecord:
    """Return a trial as far as a memory model learns from it."""
    from objectives.measurement import EngineFacts

    engine = None
    if truth.values is not None:
        engine = EngineFacts(
            engine="vllm",
            vllm_version="",
            device_name="",
            device_count=1,
            model="",
            start_s=0.0,
            kv_gib=truth.kv_gib,
            weights_gib=truth.weights_gib,
        )
    return TrialRecord(
        number=number,
        state=TrialState.COMPLETE if engine else TrialState.INFEASIBLE,
        source="search",
        params=dict(changes),
        config=base.with_args(changes),
        started_at=float(number),
        finished_at=float(number),
        engine=engine,
    )


def parameter(spec: object) -> Parameter:
    """Return a parameter as a study file spells it."""
    return Parameter.model_validate(spec)
