"""Which parameters matter: permutation importance of a random forest on trials that its trees have not seen.

A forest takes ordinal, categorical and missing values side by side, sees interactions, and says by its own error
whether its answer is worth anything; rank correlation, the simpler choice, misses every effect that is not monotonous,
such as a batch size that is best in the middle. Shuffling is done on the trials left out of each tree (Breiman 2001),
since importances by impurity favour parameters with many values.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.ledger import TrialRecord, TrialState
from tuner.report.words import label, value_text
from tuner.view import StudyView

FEWEST_TRIALS = 8
TREES = 200
MISSING = -1.0

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Importance:
    """How much one target depends on each parameter.

    Parameters
    ----------
    shares:
        Parameter -> increase of the mean squared error when it is shuffled, as a share of the target's variance;
        not below 0.
    explained:
        R² on trials that the trees have not seen; at or below 0 the forest knows nothing.
    """

    target: str
    shares: Mapping[str, float]
    explained: float
    trials: int


def importances(study: StudyView) -> list[Importance]:
    """Return the importance for each objective, and for feasibility if some trials were infeasible.

    Objectives are taken as logarithms where they are positive, since configurations differ by factors. What has too few
    trials, or no variance, is left out.
    """
    scored = [t for t in study.trials if t.number in study.results]
    judged = [t for t in study.trials if t.state in (TrialState.COMPLETE, TrialState.INFEASIBLE)]
    targets: list[tuple[str, list[TrialRecord], list[float]]] = []
    for objective in study.objectives:
        values = [study.values(t)[objective.name] for t in scored]
        positive = all(v > 0 for v in values)
        targets.append((label(objective.name), scored, [math.log(v) for v in values] if positive else values))
    targets.append(("feasibility", judged, [float(t.state is TrialState.COMPLETE) for t in judged]))
    found = (_importance(target, trials, values) for target, trials, values in targets)
    return [item for item in found if item is not None]


def _importance(target: str, trials: Sequence[TrialRecord], values: Sequence[float]) -> Importance | None:
    names, inputs = _encode(trials)
    outputs = np.array(values, dtype=np.float64)
    if len(trials) < FEWEST_TRIALS or not names or float(outputs.var()) == 0.0:
        return None
    shares, explained = _shuffled_errors(inputs, outputs)
    return Importance(target, dict(zip(names, shares, strict=True)), explained, len(trials))


def _encode(trials: Sequence[TrialRecord]) -> tuple[list[str], FloatArray]:
    """Return names of the parameters that vary and an array (trials, parameters) of the rank of each value."""
    columns: dict[str, list[float]] = {}
    for name in dict.fromkeys(name for trial in trials for name in trial.params):
        known = {value_text(t.params[name]): t.params[name] for t in trials if name in t.params}
        if len(known) + any(name not in t.params for t in trials) < 2:
            continue
        order = sorted(known, key=lambda text: _rank(known[text], text))
        codes = {text: float(i) for i, text in enumerate(order)}
        columns[name] = [codes[value_text(t.params[name])] if name in t.params else MISSING for t in trials]
    return list(columns), np.array(list(columns.values()), dtype=np.float64).T


def _rank(value: object, text: str) -> tuple[int, float, str]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, float(value), "") if number else (1, 0.0, text)  # type: ignore[arg-type] # `number` says that it is one


def _shuffled_errors(inputs: FloatArray, outputs: FloatArray) -> tuple[list[float], float]:
    """Return the mean increase of squared error per shuffled column over variance, and R², both out of bag."""
    # joblib tries out a semaphore when it is imported, and leaves it to the machine when the process is killed.
    os.environ.setdefault("JOBLIB_MULTIPROCESSING", "0")
    from sklearn.ensemble import RandomForestRegressor

    forest = RandomForestRegressor(TREES, min_samples_leaf=2, max_features=0.7, random_state=0, n_jobs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=FutureWarning)
        forest.fit(inputs, outputs)
    generator = np.random.default_rng(0)
    increase = np.zeros((len(outputs), inputs.shape[1]))
    predicted, seen = np.zeros(len(outputs)), np.zeros(len(outputs))
    for tree, drawn in zip(forest.estimators_, forest.estimators_samples_, strict=True):
        left_out = np.setdiff1d(np.arange(len(outputs)), drawn)
        if not left_out.size:
            continue
        rows = inputs[left_out].astype(np.float32)
        guess = tree.predict(rows)
        predicted[left_out] += guess
        seen[left_out] += 1
        error = (guess - outputs[left_out]) ** 2
        for column in range(inputs.shape[1]):
            shuffled = rows.copy()
            shuffled[:, column] = generator.permutation(shuffled[:, column])
            increase[left_out, column] += (tree.predict(shuffled) - outputs[left_out]) ** 2 - error
    known = seen > 0
    variance = float(outputs.var())
    shares = (increase[known] / seen[known, None]).mean(axis=0) / variance
    errors = (predicted[known] / seen[known] - outputs[known]) ** 2
    return [max(0.0, float(s)) for s in shares], 1.0 - float(errors.mean()) / variance
