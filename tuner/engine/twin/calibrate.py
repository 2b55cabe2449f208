"""Fit the step-time coefficients to measured trials: robust, non-negative, and only where there is data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from objectives.measurement import Failure
from objectives.speed import mean_probe
from tuner.engine.twin.coefficient_sets import CoefficientSets
from tuner.engine.twin.engine import TwinEngine
from tuner.engine.twin.replay import MeasuredTrial, replay
from tuner.engine.twin.steptime import COMPONENTS, Coefficients

Array = NDArray[np.float64]

_EAGER = COMPONENTS.index("eager")

MIN_AGREEMENT = 0.8
"""A replay that agrees with fewer of a trial's steps has lost its way; the trial is left out."""
MIN_STEPS = 50
"""Fewer steps than this decide nothing."""
_HUBER = 1.345
"""Huber's constant: 95% efficiency for normal residuals (Huber, Robust Statistics, 1981)."""
_ROUNDS = 25
_PRIOR_WEIGHT = 1e-3
"""Weight of the catalogue against the data: settles what the data leaves open and moves nothing else."""
_BOUND_WEIGHT = 1e4
"""The same for a component that the data cannot tell from others."""
_SPEED_ROUNDS = 10
"""Fit and the trials' own speeds follow from each other; after so many rounds neither moves any more, to a percent."""
_LEAST_SPREAD = 0.02
"""Share of a typical time below which residuals are not worth telling apart."""
_WINDOW_STEPS = 20
"""Residuals are judged over so many steps, since a request's times are sums over steps."""


@dataclass(frozen=True, slots=True)
class Followed:
    """A measured trial as equations: what the catalogue says of each of its steps, and what each took.

    Parameters
    ----------
    seconds_of:
        Steps x components: the catalogue's seconds.
    measured_s:
        One measured time a step, at whatever speed the machine had.
    """

    trial: MeasuredTrial
    seconds_of: Array
    measured_s: Array


def follow(trial: MeasuredTrial, twin: TwinEngine, most_steps: int | None = None) -> Followed | None:
    """Replay a trial; `None` for one that the twin cannot follow.

    Parameters
    ----------
    most_steps:
        Only so many steps from the trial's start, where it has more: a replay costs time for each.
    """
    prepared = twin.prepare(trial.config, kv_tokens=trial.measurement.engine.kv_tokens)
    if isinstance(prepared, Failure):
        return None
    steps = replay(trial, prepared, most_steps)
    if steps.agreement < MIN_AGREEMENT or not steps.loads:
        return None
    seconds_of = np.array([prepared.cost.components(load) for load in steps.loads])
    return Followed(trial, seconds_of, np.maximum(np.array(steps.seconds), 1e-6))


def calibrate(trials: Sequence[MeasuredTrial], twin: TwinEngine, key: str = "") -> Coefficients:
    """Fit coefficients to the steps of measured trials.

    Times are divided by each trial's speed index first, so that the set is for the reference's speed; use
    `Coefficients.scaled` to predict for another.

    Parameters
    ----------
    twin:
        An engine for the same model and device; its own coefficients are not used.

    Returns
    -------
    Coefficients
        The catalogue's set (with no interval) where fewer than `MIN_STEPS` steps of the trials can be followed.
    """
    return fit([f for trial in trials if (f := follow(trial, twin)) is not None], key=key)


def calibrate_by_probe(trials: Sequence[MeasuredTrial], twin: TwinEngine, key: str = "") -> Coefficients:
    """Fit as `calibrate` does, with each trial's speed taken from its probes instead of from its `speed`."""
    return fit_by_probe([f for trial in trials if (f := follow(trial, twin)) is not None], twin, key=key)


def fit(followed: Sequence[Followed], prior: Coefficients | None = None, key: str = "") -> Coefficients:
    """Fit coefficients to trials that were followed, each taken to have run at its `speed`.

    Parameters
    ----------
    prior:
        What the data leaves open is drawn towards one common factor on this set; on the catalogue without one.
        That is the case for `eager` where every step was: then it cannot be told from the costs of any step.
    """
    if sum(len(f.measured_s) for f in followed) < MIN_STEPS:
        return replace(prior or Coefficients(), key=key)
    start = np.array((prior or Coefficients()).vector())
    seconds_of = np.vstack([f.seconds_of for f in followed]) * start
    measured_s = np.concatenate([f.measured_s / f.trial.speed for f in followed])
    observed: NDArray[np.bool_] = np.asarray(seconds_of.any(axis=0))
    told_apart = observed.copy()
    told_apart[_EAGER] &= not seconds_of[:, _EAGER].all()
    weights = np.where(told_apart, _PRIOR_WEIGHT, _BOUND_WEIGHT)
    factors = np.ones(len(COMPONENTS))
    factors[observed] = robust_nonnegative_fit(seconds_of[:, observed], measured_s, weights[observed])
    factors *= start
    return Coefficients(
        values=dict(zip(COMPONENTS, factors.tolist(), strict=True)),
        ratio_interval=_ratio_interval([(f.measured_s / f.trial.speed, f.seconds_of @ factors) for f in followed]),
        fitted=tuple(name for name, seen in zip(COMPONENTS, told_apart.tolist(), strict=True) if seen),
        key=key,
        steps=len(measured_s),
    )


def fit_by_probe(
    followed: Sequence[Followed], twin: TwinEngine, prior: Coefficients | None = None, key: str = ""
) -> Coefficients:
    """Fit as `fit` does, with each trial's speed taken from its probes, and then from its own steps.

    A first fit predicts what each configuration's probe takes on a machine of the trials' common speed; the measured
    probes over that are the trials' speeds, for a second fit. A machine is not always as fast while a workload runs as
    in the second before and after it: from there on, a trial's speed is what its own steps took over what the fit to
    all trials says. Trials have steps of a kind in common (single tokens after the prompts), so that this does not
    take up what a component should say. The speeds of all trials are 1 on average.
    """
    first = fit(_at_speeds(followed, [1.0] * len(followed)), prior)
    probes = [probe_speed(f.trial, twin.with_coefficients(first)) or 1.0 for f in followed]
    found = fit(_at_speeds(followed, probes), prior, key)
    for _ in range(_SPEED_ROUNDS if len(followed) > 1 else 0):
        found = fit(_at_speeds(followed, [own_speed(f, found) for f in followed]), prior, key)
    return found


def fit_sets(followed: Sequence[Followed], twin: TwinEngine) -> CoefficientSets:
    """Fit one set to all trials, and from there one to the trials of each key, speeds taken from the probes.

    Trials of one key are taken to have run at the same speed on average as those of another: what their probes are
    apart by beyond that is what the kernels are apart by.
    """
    shared = fit_by_probe(followed, twin)
    by_key: dict[str, list[Followed]] = defaultdict(list)
    for one in followed:
        by_key[twin.key(one.trial.config)].append(one)
    if len(by_key) == 1:
        return CoefficientSets(shared, {key: replace(shared, key=key) for key in by_key})
    enough = {key: group for key, group in by_key.items() if sum(len(f.measured_s) for f in group) >= MIN_STEPS}
    return CoefficientSets(shared, {key: fit_by_probe(group, twin, shared, key) for key, group in enough.items()})


def probe_speed(trial: MeasuredTrial, twin: TwinEngine) -> float | None:
    """Say how many times as long everything took as when `twin` was calibrated; `None` without a probe.

    By the prefill of the probes alone. On 22 recorded runs of an idle CPU it was off by 3% (standard deviation) from
    what the runs' own steps showed; the decode step, a few milliseconds, by 8%, and told nothing of them.
    """
    measured = mean_probe(trial.measurement)
    predicted = twin.probe(trial.config, trial.measurement.engine.kv_tokens)
    return None if measured is None or isinstance(predicted, Failure) else measured.prefill_s / predicted.prefill_s


def speed_among(trial: MeasuredTrial, calibrated_on: Sequence[MeasuredTrial], twin: TwinEngine) -> float | None:
    """Say how many times as long everything took in a trial as in those that `twin` was calibrated on, by the probes.

    What is fitted is the speed of those trials' steps. Their probes were faster or slower than that, by chance and
    since the twin's probe is not quite the engine's: so a probe counts against theirs. `None` without a probe.
    """
    speed = probe_speed(trial, twin)
    theirs = [s for one in calibrated_on if (s := probe_speed(one, twin)) is not None]
    if speed is None or not theirs:
        return speed
    return speed / float(np.exp(np.mean(np.log(theirs))))


def own_speed(followed: Followed, coefficients: Coefficients) -> float:
    """Say how many times as long a trial's steps took as a set says: the median over windows of steps."""
    return float(np.median(_ratios(followed.measured_s, followed.seconds_of @ np.array(coefficients.vector()))))


def _at_speeds(followed: Sequence[Followed], speeds: Sequence[float]) -> list[Followed]:
    """Set the trials' speeds, scaled so that they are 1 on average."""
    mean = float(np.exp(np.mean(np.log(speeds)))) if speeds else 1.0
    return [replace(f, trial=replace(f.trial, speed=s / mean)) for f, s in zip(followed, speeds, strict=True)]


def robust_nonnegative_fit(seconds_of: Array, measured_s: Array, prior_weights: Array | None = None) -> Array:
    """Find factors >= 0 with `seconds_of @ factors` close to `measured_s`, outliers counting little.

    Non-negative least squares, reweighted after Huber. Residuals are taken relative to the square root of the
    measured time: between absolute (long prefill steps decide all) and relative (short decode steps do). What the data
    leaves open is drawn towards one common factor on the catalogue.

    Parameters
    ----------
    seconds_of:
        Steps x components: the catalogue's seconds of each component.
    measured_s:
        One measured time a step, > 0.
    prior_weights:
        How strongly each component is drawn, against the weight of all its data.
    """
    from scipy.optimize import nnls

    scale = 1.0 / np.sqrt(measured_s)
    rows, target = seconds_of * scale[:, None], measured_s * scale
    common = float(np.median(measured_s / np.maximum(seconds_of.sum(axis=1), 1e-12)))
    pulls = np.full(rows.shape[1], _PRIOR_WEIGHT) if prior_weights is None else prior_weights
    prior_rows = np.diag(np.sqrt(pulls) * np.linalg.norm(rows, axis=0))
    prior_target = prior_rows.sum(axis=1) * common
    floor = _LEAST_SPREAD * float(np.median(target))
    weights = np.ones(len(target))
    factors = np.full(rows.shape[1], common)
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        previous = factors
        # A triangle has the same least squares as all the rows; non-negative ones are then a matter of its few rows.
        equations = np.vstack([rows * root[:, None], prior_rows])
        both = np.column_stack([equations, np.append(target * root, prior_target)])
        triangle: Array = np.asarray(np.linalg.qr(both, mode="r"))
        factors, _ = nnls(triangle[:, :-1], triangle[:, -1])
        residuals = np.abs(target - rows @ factors)
        spread = max(1.4826 * float(np.median(residuals)), floor)
        weights = np.minimum(1.0, _HUBER * spread / np.maximum(residuals, 1e-12))
        if np.allclose(factors, previous, rtol=1e-4, atol=1e-6):
            break
    fitted: Array = factors
    return fitted


def _ratio_interval(parts: Sequence[tuple[Array, Array]]) -> tuple[float, float]:
    """95% interval of measured over predicted time, over windows of steps of one trial."""
    low, high = np.percentile(np.concatenate([_ratios(*part) for part in parts]), [2.5, 97.5])
    return float(low), float(high)


def _ratios(measured_s: Array, predicted_s: Array) -> Array:
    """Measured over predicted time of windows of steps."""
    starts = np.arange(0, len(measured_s), _WINDOW_STEPS)
    ratios: Array = np.add.reduceat(measured_s, starts) / np.maximum(np.add.reduceat(predicted_s, starts), 1e-12)
    return ratios
