"""Measure a choice against vLLM's defaults again: interleaved, each run with an engine of its own and fresh seeds.

The order of the runs is default, pick, pick, default, …: a machine that slowly changes then weighs on both alike. Of
every objective the logarithm is fitted by least squares to "which of the two" and a straight line over the runs, and
Student's t gives the interval of the first. `benchmarks/verify.py` compares this with the alternatives: with 3 to 5
rounds the bootstrap over rounds sees a difference where there is none in 11 to 31% of all verifications, this in 1 to
3%; t on the differences within rounds is as honest and finds less.

Knows engines by their protocol only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from objectives.measurement import Failure, Measurement, SpeedProbe
from objectives.score import Score
from objectives.speed import correct, mean_probe, speed_index
from tuner.config import EngineConfig
from tuner.engine.protocol import MeasurePlan, Progress, TrialEngine
from tuner.errors import StudyStoppedError, UsageError
from tuner.ledger import Agreement, Verification, VerifiedRun
from tuner.view import Objective
from tuner.workload.model import Workload

Side = Literal["default", "pick"]
Verdict = Literal["better", "worse", "no difference"]

CONFIDENCE = 0.95
"""That all intervals of one verification hold together."""

NEGLIGIBLE = 0.01
"""Relative change that is no reason to deploy anything: a verdict needs an interval that lies beyond it."""

WORTH_SEEING = 0.15
"""Relative change that an operator would not want to be hidden by noise."""

DEFAULT_ROUNDS = 8
"""Find an improvement of 15% in 98 of 100 verifications with the 6% noise a run of a shared machine; 5 rounds find it
in 80 there, and in 95 with 5% noise that the objectives share half of (benchmarks/verify.py)."""

MIN_ROUNDS = 2
"""Fewer leave no degree of freedom for the noise."""

_THE_WAY = (
    "over HTTP a request also passes the API server and its tokeniser, and every token the detokeniser and a stream"
)

_MIN_VALUES = 4
"""Runs with a value of an objective: difference, level and slope take three, one is left for the noise."""


@dataclass(frozen=True, slots=True)
class Run:
    """One engine start of a verification.

    Parameters
    ----------
    salt:
        Seed of the fresh token ids. The two runs of a round share theirs: each has an engine of its own, so that
        neither warms the other, and the same prompts take that much chance out of their difference.
    """

    round: int
    side: Side
    salt: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One objective of the pick against the default: relative change (-0.2 is 20% less), its interval, the verdict."""

    change: float
    interval: tuple[float, float]
    verdict: Verdict


def plan_rounds(rounds: int, seed: int) -> tuple[Run, ...]:
    """Order of the runs: default and pick in turns, the order within a round reversed in every other one.

    Raises
    ------
    UsageError
        For fewer rounds than `MIN_ROUNDS`.
    """
    if rounds < MIN_ROUNDS:
        raise UsageError(f"--rounds {rounds}: the noise cannot be told from fewer than {MIN_ROUNDS} rounds")
    sides: tuple[tuple[Side, Side], ...] = (("default", "pick"), ("pick", "default"))
    return tuple(Run(r, side, _salt(seed, r)) for r in range(rounds) for side in sides[r % 2])


def verify(
    engine: TrialEngine,
    reference: EngineConfig,
    pick: EngineConfig,
    workload: Workload,
    plan: MeasurePlan,
    *,
    number: int,
    rounds: int,
    objectives: Sequence[Objective],
    score: Callable[[Measurement], Score],
    progress: Progress,
    over_http: bool = False,
    seed: int = 0,
) -> Verification | Failure:
    """Measure `pick` and `reference` in turns and say which is better.

    A run that is void or fails for the machine's sake is tried once more; one that is void again is left out.

    Parameters
    ----------
    number:
        The trial that `pick` is the configuration of.

    Returns
    -------
    Verification | Failure
        The failure of the first run that cannot be had: at once for a configuration's own fault.

    Raises
    ------
    UsageError
        For too few rounds, or for an engine that predicts instead of measuring.
    StudyStoppedError
        When too few runs of an objective count.
    """
    kept: list[VerifiedRun] = []
    runs = plan_rounds(rounds, seed)
    for index, run in enumerate(runs):
        outcome = _measured(
            engine,
            pick if run.side == "pick" else reference,
            workload,
            dataclasses.replace(plan, salt=run.salt),
            score,
            _labelled(progress, f"verify {index + 1}/{len(runs)}, {run.side}"),
        )
        if isinstance(outcome, Failure):
            return outcome
        if outcome is not None:
            values = {o.name: v for o in objectives if (v := outcome.score.values.get(o.name)) is not None}
            kept.append(VerifiedRun(run.round, run.side, values, outcome.probe))
    compared = compare(kept, objectives)
    if not compared:
        raise StudyStoppedError(
            f"verify: only {len(kept)} of {len(runs)} runs count, too few for any objective; the others were void "
            "twice: see that nothing else uses the machine, and verify again"
        )
    return Verification(
        number=number,
        rounds=rounds,
        change={name: c.change for name, c in compared.items()},
        interval={name: c.interval for name, c in compared.items()},
        verdict={name: c.verdict for name, c in compared.items()},
        over_http=over_http,
        finished_at=time.time(),
        runs=tuple(kept),
    )


def compare(runs: Sequence[VerifiedRun], objectives: Sequence[Objective]) -> dict[str, Comparison]:
    """Compare the two sides, objective by objective, with intervals that hold together at `CONFIDENCE`.

    Parameters
    ----------
    runs:
        In the order in which they ran.

    Returns
    -------
    dict
        An objective that fewer than four runs, or only one side, have a value above 0 of is absent: its relative
        change is undefined.
    """
    level = 1.0 - (1.0 - CONFIDENCE) / max(len(objectives), 1)
    compared: dict[str, Comparison] = {}
    for objective in objectives:
        order = [(i, run.side, run.values.get(objective.name, 0.0)) for i, run in enumerate(runs)]
        counted = [(i, side, value) for i, side, value in order if value > 0]
        if len(counted) < _MIN_VALUES or {side for _, side, _ in counted} != {"default", "pick"}:
            continue
        positions = np.array([i for i, _, _ in counted], dtype=np.float64)
        is_pick = np.array([side == "pick" for _, side, _ in counted], dtype=np.float64)
        logs = np.log([value for _, _, value in counted])
        effect, half_width = _effect(positions, is_pick, logs, level)
        low, high = math.expm1(effect - half_width), math.expm1(effect + half_width)
        compared[objective.name] = Comparison(math.expm1(effect), (low, high), _verdict(low, high, objective))
    return compared


def _effect(positions: np.ndarray, is_pick: np.ndarray, logs: np.ndarray, level: float) -> tuple[float, float]:
    """Least squares of log(value) on side, level and slope: the effect of the side and half of its interval.

    Source: ordinary least squares, covariance s² (XᵀX)⁻¹ with n - 3 degrees of freedom.
    """
    design = np.column_stack([is_pick, np.ones_like(positions), positions - positions.mean()])
    inverse = np.linalg.inv(design.T @ design)
    coefficients = inverse @ design.T @ logs
    residuals = logs - design @ coefficients
    freedom = len(logs) - design.shape[1]
    error = math.sqrt(float(residuals @ residuals) / freedom * float(inverse[0, 0]))
    return float(coefficients[0]), error * float(stats.t.ppf((1.0 + level) / 2.0, freedom))


def _verdict(low: float, high: float, objective: Objective) -> Verdict:
    if high >= -NEGLIGIBLE and low <= NEGLIGIBLE:
        return "no difference"
    is_less = high < 0
    return "better" if is_less == (objective.direction == "minimize") else "worse"


@dataclass(frozen=True, slots=True)
class _Scored:
    score: Score
    probe: SpeedProbe | None


def _measured(
    engine: TrialEngine,
    config: EngineConfig,
    workload: Workload,
    plan: MeasurePlan,
    score: Callable[[Measurement], Score],
    progress: Progress,
) -> _Scored | Failure | None:
    """Score of one run, tried twice at most; `None` when it was void both times."""
    outcome: Failure | None = None
    for attempt in range(2):
        measured = engine.run(config, workload, dataclasses.replace(plan, salt=plan.salt + attempt), progress)
        if isinstance(measured, Failure):
            outcome = measured
            if measured.kind.is_configuration_fault:
                break
            continue
        if measured.predicted:
            raise UsageError("verify: the twin predicts and cannot verify; name a real engine in `engine`")
        scored = score(measured)
        if not scored.void:
            return _Scored(scored, mean_probe(measured))
        outcome = None
    return outcome


def _labelled(progress: Progress, label: str) -> Progress:
    return lambda text: progress(f"{label}: {text}")


def _salt(seed: int, number: int) -> int:
    """Even 31-bit number that no trial of the study uses by counting; the odd one after it is for a second try."""
    digest = hashlib.sha256(f"verify {seed} {number}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFE


def agreement(
    runs: Sequence[VerifiedRun],
    in_process: Mapping[str, float],
    probe: SpeedProbe | None,
    noise: Mapping[str, float],
    objectives: Sequence[Objective],
) -> tuple[Agreement, ...]:
    """Compare the pick's served runs with the figures of its trial.

    Parameters
    ----------
    runs:
        Those of a verification over HTTP.
    in_process, probe:
        Values and speed probe of the trial.
    noise:
        The study's noise floors: relative difference of two single measurements that 95% stay below. Where there is
        none, the scatter of the served runs stands for it.
    """
    served = [run for run in runs if run.side == "pick"]
    index = _speed_index([run.probe for run in served], probe)
    found = []
    for objective in objectives:
        values = [v for run in served if (v := run.values.get(objective.name, 0.0)) > 0]
        base = in_process.get(objective.name, 0.0)
        if not values or base <= 0:
            continue
        logs = np.log(values)
        center = float(np.exp(np.median(logs)))
        scatter = float(stats.t.ppf(0.975, len(values) - 1) * logs.std(ddof=1)) if len(values) > 1 else 0.0
        tolerance = noise.get(objective.name, math.expm1(scatter))
        same_speed = correct({objective.name: center}, index).values() if index else ()
        corrected = next((value / base - 1.0 for value in same_speed), None)
        found.append(Agreement(objective.name, base, center, center / base - 1.0, tolerance, index, corrected))
    return tuple(found)


def _speed_index(served: Sequence[SpeedProbe | None], in_process: SpeedProbe | None) -> float | None:
    """Speed index of the served runs against the trial's; median over the runs."""
    if in_process is None:
        return None
    indices = [speed_index(probe, in_process) for probe in served if probe is not None]
    return statistics.median(indices) if indices else None


def agreement_sentence(compared: Agreement) -> str:
    """Say to the operator how the served figures compare, and where a difference comes from."""
    noise = f"the noise of {compared.tolerance:.1%}"
    text = f"{compared.name}: {compared.served:.4g} served, {compared.in_process:.4g} in process"
    text += f" ({compared.change:+.1%})"
    if compared.within_noise:
        return f"{text}, within {noise}"
    text += f", beyond {noise}"
    if compared.speed_index is None:
        return f"{text}: {_THE_WAY}, and a machine that changed since the study shows here too"
    text += f": the speed probe took {compared.speed_index:.2f} times as long as in the study"
    if compared.corrected is None:
        return f"{text}, and {_THE_WAY}"
    text += f"; at one speed it is {compared.corrected:+.1%}"
    if abs(compared.corrected) <= compared.tolerance:
        return f"{text}, within that noise"
    return f"{text}: {_THE_WAY}"
