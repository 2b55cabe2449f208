"""One interface for everything that searches, and the searchers of others.

A searcher may be asked several times before it is told anything: what was not told yet is running elsewhere. The others
start with vLLM's defaults, as the tuner does, and have no gate: a start that fails costs them a trial. `gated` puts the
tuner's gate in front of one of them: what it refuses costs nothing and is told as what it is.
"""

from __future__ import annotations

import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from search_bench.problem import Changes, Problem, Truth, Values, record
from tuner.design import design_points
from tuner.gate import NotAdmitted
from tuner.ledger import History
from tuner.space import Parameter

if TYPE_CHECKING:
    import optuna

MOST_REFUSALS = 200
"""After so many refusals in a row a gated searcher gets its way."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What to try, and the number under which the searcher wants to hear of it."""

    number: int
    changes: Changes
    source: str = "search"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial showed: noisy objectives in seconds, or `None` and a violation above 0 where it did not start."""

    values: Values | None
    violation: float
    truth: Truth


class Searcher(Protocol):
    """Proposes and hears what came of it. `refused` counts what a gate turned away on the way."""

    refused: int

    def ask(self) -> Suggestion:
        """Propose the next trial."""
        ...

    def tell(self, suggestion: Suggestion, outcome: Outcome) -> None:
        """Hear what a trial showed."""
        ...


class Listed:
    """Tries a list that was made beforehand, and draws at random when it is through."""

    def __init__(self, problem: Problem, seed: int, points: Iterator[Changes]) -> None:
        self.refused = 0
        self._points = points
        self._random = _random_points(problem, seed + 7919)
        self._number = -1
        self._default: Changes | None = problem.default

    def ask(self) -> Suggestion:
        """Return the defaults, then the next of the list."""
        self._number += 1
        first, self._default = self._default, None
        return Suggestion(self._number, first or next(self._points, None) or next(self._random))

    def tell(self, suggestion: Suggestion, outcome: Outcome) -> None:
        """Learn nothing."""


def random_search(problem: Problem, seed: int) -> Searcher:
    """Draw every parameter evenly (on its own scale)."""
    return Listed(problem, seed, _random_points(problem, seed))


def sobol(problem: Problem, seed: int) -> Searcher:
    """Scrambled Sobol sequence."""
    return Listed(problem, seed, iter(design_points(problem.space, 256, seed)))


def grid(problem: Problem, seed: int) -> Searcher:
    """A grid over two parameters with everything else at its default, as `vllm bench sweep` is used; in random order.

    The two are max_num_seqs and max_num_batched_tokens, or the first two of a space that has others; 5 × 8 values.
    """
    wanted = [n for n in ("max_num_seqs", "max_num_batched_tokens") if n in problem.space] or list(problem.space)[:2]
    one, two = (_spread(problem.space[name], count) for name, count in zip(wanted, (5, 8), strict=True))
    cells = [{**problem.default, wanted[0]: a, wanted[1]: b} for a in one for b in two]
    order = np.random.default_rng(seed).permutation(len(cells))
    return Listed(problem, seed, iter([cells[i] for i in order]))


def _spread(parameter: Parameter, count: int) -> list[Any]:
    from tuner.design import value_at

    return list(dict.fromkeys(value_at(parameter, (i + 0.5) / count) for i in range(count)))


def _random_points(problem: Problem, seed: int) -> Iterator[Changes]:
    from tuner.design import value_at

    generator = np.random.default_rng(seed)
    while True:
        yield {name: value_at(p, float(generator.random())) for name, p in problem.space.items()}


@dataclass(frozen=True, slots=True)
class Manner:
    """How Optuna is used.

    Parameters
    ----------
    sampler:
        Makes Optuna's sampler from a seed.
    ordinal:
        Whether ordered choices are whole numbers instead of categories.
    log:
        Whether logarithms of the objectives are told.
    constraint:
        Whether a configuration that cannot start is told as a violation with the median of what is known, instead of
        as failed.
    """

    sampler: Callable[[int], optuna.samplers.BaseSampler]
    ordinal: bool
    log: bool
    constraint: bool


class OptunaSearcher:
    """Optuna through ask and tell, in memory."""

    def __init__(self, problem: Problem, seed: int, manner: Manner) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.refused = 0
        self._manner = manner
        self._space = problem.space
        self._distributions = {n: _distribution(p, ordinal=manner.ordinal) for n, p in problem.space.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._study = optuna.create_study(directions=["minimize"] * 2, sampler=manner.sampler(seed))
        first = {n: _encode(p, problem.default[n], ordinal=manner.ordinal) for n, p in problem.space.items()}
        self._study.enqueue_trial(first)
        self._trials: dict[int, optuna.Trial] = {}
        self._told: list[list[float]] = []

    def ask(self) -> Suggestion:
        """Ask Optuna."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = self._study.ask(self._distributions)
        self._trials[trial.number] = trial
        changes = {n: _decode(self._space[n], v, ordinal=self._manner.ordinal) for n, v in trial.params.items()}
        return Suggestion(trial.number, changes)

    def tell(self, suggestion: Suggestion, outcome: Outcome) -> None:
        """Tell Optuna."""
        import optuna

        trial = self._trials.pop(suggestion.number)
        if outcome.values is None and not self._manner.constraint:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
            return
        if self._manner.constraint:
            trial.set_constraint("starts", outcome.violation)
        if outcome.values is None:
            told = [statistics.median(column) for column in zip(*self._told, strict=True)] or [0.0, 0.0]
        else:
            told = [math.log(v) if self._manner.log else v for v in outcome.values]
            self._told.append(told)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._study.tell(trial, told)


def _nsga2(seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    return optuna.samplers.NSGAIISampler(population_size=10, seed=seed)


def _tpe_default(seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    return optuna.samplers.TPESampler(seed=seed)


def _tpe_tuned(seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    return optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=8)


def _gp(seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    return optuna.samplers.GPSampler(seed=seed, n_startup_trials=8, warn_independent_sampling=False)


MANNERS: Mapping[str, Manner] = {
    "nsga2": Manner(_nsga2, ordinal=False, log=False, constraint=True),
    "tpe-default": Manner(_tpe_default, ordinal=False, log=False, constraint=False),
    "tpe-tuned": Manner(_tpe_tuned, ordinal=True, log=True, constraint=True),
    "gp-optuna": Manner(_gp, ordinal=True, log=True, constraint=True),
}


class Gated:
    """The tuner's gate in front of a searcher."""

    def __init__(self, problem: Problem, inner: Searcher) -> None:
        self._inner = inner
        knowledge = problem.knowledge()
        self._base = knowledge.base
        self._records: list[Any] = []
        make = knowledge.gate
        self._gate = make(lambda: History(None, tuple(self._records), (), ())) if make else None
        self.refused = 0

    def ask(self) -> Suggestion:
        """Return the first proposal that the gate admits."""
        for _ in range(MOST_REFUSALS):
            suggestion = self._inner.ask()
            verdict = self._gate.check(self._base.with_args(suggestion.changes)) if self._gate else None
            if not isinstance(verdict, NotAdmitted):
                return suggestion
            self.refused += 1
            self._inner.tell(suggestion, Outcome(None, verdict.violation, Truth(None, verdict.violation, 0.0)))
        return self._inner.ask()

    def tell(self, suggestion: Suggestion, outcome: Outcome) -> None:
        """Pass it on; the gate learns whether it was right."""
        if self._gate is not None:
            config = self._base.with_args(suggestion.changes)
            prove(self._gate, config, started=outcome.values is not None)
            self._records.append(record(len(self._records), self._base, suggestion.changes, outcome.truth))
        self._inner.tell(suggestion, outcome)


def prove(gate: Any, config: Any, *, started: bool) -> None:
    """Tell a gate that verifies what came of a configuration which its memory model would have refused."""
    verdict = gate.check(config)
    if getattr(verdict, "predicted_failure", None) is not None:
        gate.proven(right=not started)


def _distribution(parameter: Parameter, *, ordinal: bool) -> optuna.distributions.BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if parameter.choices is not None:
        if ordinal and parameter.is_ordered:
            return IntDistribution(0, len(parameter.choices) - 1)
        return CategoricalDistribution([json.dumps(c) for c in parameter.ordered_choices])
    assert parameter.low is not None
    assert parameter.high is not None
    if parameter.step is not None:
        return FloatDistribution(parameter.low, parameter.high, step=parameter.step)
    if parameter.is_int:
        return IntDistribution(int(parameter.low), int(parameter.high), log=parameter.log)
    return FloatDistribution(parameter.low, parameter.high, log=parameter.log)


def _encode(parameter: Parameter, value: Any, *, ordinal: bool) -> Any:
    if parameter.choices is None:
        return value
    if ordinal and parameter.is_ordered:
        return parameter.ordered_choices.index(value)
    return json.dumps(value)


def _decode(parameter: Parameter, value: Any, *, ordinal: bool) -> Any:
    if parameter.choices is None:
        return value if parameter.step is None else parameter.nearest(value)
    if ordinal and parameter.is_ordered:
        return parameter.ordered_choices[value]
    return json.loads(value)
