"""What is tried next: Optuna behind ask and tell.

The only module that imports Optuna. It translates between the study's space and Optuna's distributions (ordered choices
and steps of a range become whole numbers, true categories stay categories), tells objectives as logarithms, and tells a
configuration that could not run as a finite violation with the median of what is known in place of its values.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.design import design_points
from tuner.space import Parameter, Space, Value
from tuner.spec import Search

if TYPE_CHECKING:
    import optuna

MOST_WHOLE_NUMBERS = 64
"""Ranges with more values than this are searched as real numbers and rounded. Optuna's GP lists every whole number of a
range and tries them one by one: four fifths of the time of a trial's overhead, and gigabytes for a range of bytes."""
STARTS = "starts"
"""Name of Optuna's constraint for everything that keeps an engine from running: memory, or arguments vLLM refuses."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What to try next.

    Parameters
    ----------
    number:
        Of the trial, in Optuna and in the ledger alike.
    changes:
        What the trial sets beyond the study's fixed arguments; also arguments that are not searched.
    in_space:
        Whether it has a place in the space, so that what it shows can be told to the sampler.
    repeats:
        Number of the trial that it measures again; `None` for a configuration of its own.
    """

    number: int
    source: str
    changes: Mapping[str, Value]
    in_space: bool
    repeats: int | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """What Optuna knows of one trial: its state in Optuna's words, its values, its violation of `starts`."""

    state: str
    values: tuple[float, ...]
    violation: float | None


class Proposer:
    """Proposes configurations and learns from their results.

    Parameters
    ----------
    storage_url:
        Optuna's storage, such as `sqlite:///mlruns/studies/NAME/optuna.db`.
    constraints:
        Names of the study's own constraints, in a fixed order.
    objectives:
        For each objective whether its logarithm is modelled, and +1 to minimise or -1 to maximise it.
    """

    def __init__(
        self,
        storage_url: str,
        study: str,
        space: Space,
        search: Search,
        *,
        constraints: Sequence[str],
        objectives: Sequence[tuple[bool, int]],
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = space
        self._search = search
        self._constraints = tuple(constraints)
        self._objectives = tuple(objectives)
        self._distributions = {name: _distribution(parameter) for name, parameter in space.items()}
        self._study = optuna.create_study(
            storage=storage_url,
            study_name=study,
            directions=["minimize"] * len(objectives),
            load_if_exists=True,
        )

    def enqueue(self, source: str, changes: Mapping[str, Value], place: Mapping[str, Value] | None = None) -> None:
        """Queue a configuration to be proposed before anything else, in order.

        Parameters
        ----------
        place:
            Its coordinates where they are more than `changes`: vLLM's defaults for what it does not set.
        """
        where = {**(place or {}), **changes}
        in_space = all(name in where and self._space[name].contains(where[name]) for name in self._space)
        in_space = in_space and all(name in self._space for name in changes)
        fixed = {name: _encode(self._space[name], where[name]) for name in self._space} if in_space else {}
        self._study.enqueue_trial(
            fixed, user_attrs={"source": source, "changes": json.dumps(dict(changes)), "in_space": in_space}
        )

    def enqueue_repeat(self, source: str, changes: Mapping[str, Value], repeats: int) -> None:
        """Queue a further measurement of the configuration of trial `repeats`; nothing of it is told to the sampler."""
        attributes = {"source": source, "changes": json.dumps(dict(changes)), "in_space": False, "repeats": repeats}
        self._study.enqueue_trial({}, user_attrs=attributes)

    def enqueue_again(self, number: int) -> None:
        """Queue the configuration of a trial that nothing could be learned from once more, if it is not queued yet."""
        trials = self._study.get_trials(deepcopy=False)
        attributes = dict(trials[number].user_attrs)
        if not any(t.state.name == "WAITING" and t.user_attrs == attributes for t in trials):
            self._study.enqueue_trial(trials[number].params, user_attrs=attributes)

    def has_queued(self) -> bool:
        """Whether something is queued that was not proposed yet."""
        return any(t.state.name == "WAITING" for t in self._study.get_trials(deepcopy=False))

    def ask(self, *, explore: bool = False) -> Proposal:
        """Propose the next trial. The same history gives the same proposal, whatever was interrupted before.

        `explore` draws at random where the sampler would decide: it may insist on what is known already.
        """
        history = self._study.get_trials(deepcopy=False)
        waiting = next((t for t in history if t.state.name == "WAITING"), None)
        if waiting is None and self._count_told(history) < self._search.startup_trials:
            self.enqueue("design", self._design_point(sum(t.user_attrs.get("source") == "design" for t in history)))
            return self.ask()
        in_space = waiting is None or bool(waiting.user_attrs["in_space"])
        self._study.sampler = _sampler(
            "random" if explore else self._search.sampler, _seed(self._search.seed, len(history))
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that GPSampler is experimental, and which values lie outside a range
            trial = self._study.ask(fixed_distributions=self._distributions if in_space else None)
        if waiting is None:
            self._describe(trial, "sampler", {n: _decode(self._space[n], v) for n, v in trial.params.items()})
        return _proposal(trial)

    def _describe(self, trial: optuna.Trial, source: str, changes: Mapping[str, Value]) -> None:
        trial.set_user_attr("source", source)
        trial.set_user_attr("changes", json.dumps(dict(changes)))
        trial.set_user_attr("in_space", True)

    def _count_told(self, history: Sequence[optuna.trial.FrozenTrial]) -> int:
        return sum(t.state.name == "COMPLETE" for t in history)

    def _design_point(self, index: int) -> dict[str, Value]:
        """Point `index` of a sequence that fills the space evenly from the first point on."""
        return design_points(self._space, index + 1, self._search.seed)[index]

    def tell_measured(self, number: int, values: Sequence[float], violations: Mapping[str, float]) -> None:
        """Tell what a trial measured: raw objective values, and the signed violations of memory and own constraints."""
        told = [_transformed(v, *how) for v, how in zip(values, self._objectives, strict=True)]
        self._tell(number, told, violations["memory"], violations)

    def tell_violation(self, number: int, violation: float) -> None:
        """Tell that a configuration cannot run: a finite violation > 0, and the median of what is known as values."""
        known = [t.values for t in self._study.get_trials(deepcopy=False) if t.state.name == "COMPLETE"]
        columns = list(zip(*known, strict=True)) or [(0.0,)] * len(self._objectives)
        self._tell(number, [statistics.median(c) for c in columns], max(violation, 1e-6), {})

    def tell_unusable(self, number: int) -> None:
        """Close a trial from which nothing can be learned: the machine's fault, void, or outside the space."""
        import optuna

        self._study.tell(number, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)

    def _tell(self, number: int, values: list[float], starts: float, violations: Mapping[str, float]) -> None:
        trial = self._study.get_trials(deepcopy=False)[number]
        if trial.state.is_finished():
            return
        if not trial.user_attrs["in_space"]:
            self.tell_unusable(number)
            return
        self._constrain(trial, STARTS, starts)
        for name in self._constraints:
            self._constrain(trial, name, violations.get(name, 0.0))
        self._study.tell(number, values)

    def _constrain(self, trial: optuna.trial.FrozenTrial, name: str, violation: float) -> None:
        import optuna

        if name not in trial.constraints:
            optuna.Trial(self._study, trial._trial_id).set_constraint(name, violation)

    def told(self) -> dict[int, Told]:
        """What Optuna knows of every trial, by number."""
        return {
            t.number: Told(t.state.name, tuple(t.values or ()), t.constraints.get(STARTS))
            for t in self._study.get_trials(deepcopy=False)
        }

    def open_trials(self) -> list[Proposal]:
        """Trials that were asked for and never told: an interrupted run left them."""
        return [
            _proposal(t)
            for t in self._study.get_trials(deepcopy=False)
            if t.state.name == "RUNNING" and "source" in t.user_attrs
        ]

    def close_unnamed(self) -> None:
        """Close trials that were interrupted before it was written down what they are."""
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state.name == "RUNNING" and "source" not in trial.user_attrs:
                self.tell_unusable(trial.number)

    def sources(self) -> set[str]:
        """Who proposed the trials so far, the queued ones included."""
        return {t.user_attrs.get("source", "") for t in self._study.get_trials(deepcopy=False)}


def _proposal(trial: optuna.Trial | optuna.trial.FrozenTrial) -> Proposal:
    attributes = trial.user_attrs
    changes = json.loads(attributes["changes"])
    return Proposal(
        trial.number, attributes["source"], changes, bool(attributes["in_space"]), attributes.get("repeats")
    )


def _sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        match name:
            case "gp":
                return optuna.samplers.GPSampler(seed=seed, n_startup_trials=1, warn_independent_sampling=False)
            case "tpe":
                return optuna.samplers.TPESampler(seed=seed, n_startup_trials=1, multivariate=True)
            case _:
                return optuna.samplers.RandomSampler(seed=seed)


def _seed(seed: int, position: int) -> int:
    """Derive the seed of one proposal, so that it depends on nothing but the history."""
    return int.from_bytes(hashlib.sha256(f"{seed} {position}".encode()).digest()[:4], "little")


def _transformed(value: float, log: bool, sign: int) -> float:
    """Return what Optuna minimises: ratios matter in times and rates, so their logarithm is modelled."""
    return sign * (math.log(max(value, 1e-9)) if log else value)


def _distribution(parameter: Parameter) -> optuna.distributions.BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if parameter.choices is not None:
        if parameter.is_ordered:
            return IntDistribution(0, len(parameter.choices) - 1)
        return CategoricalDistribution([json.dumps(c, sort_keys=True) for c in parameter.choices])
    assert parameter.low is not None
    assert parameter.high is not None
    if parameter.cardinality > MOST_WHOLE_NUMBERS:
        return FloatDistribution(parameter.low, parameter.high, log=parameter.log)
    if parameter.step is not None:
        return IntDistribution(0, int(parameter.cardinality) - 1)
    return IntDistribution(int(parameter.low), int(parameter.high), log=parameter.log)


def _encode(parameter: Parameter, value: Value) -> Any:
    """Turn a value of the space into Optuna's."""
    if parameter.cardinality > MOST_WHOLE_NUMBERS:
        return float(value)
    if parameter.step is not None:
        return parameter.step_of(value)
    if parameter.choices is None:
        return int(value)
    if parameter.is_ordered:
        return parameter.ordered_choices.index(value)
    return json.dumps(parameter.as_choice(value), sort_keys=True)


def _decode(parameter: Parameter, value: Any) -> Value:
    """Turn Optuna's value into one of the space."""
    if parameter.cardinality > MOST_WHOLE_NUMBERS:
        return parameter.nearest(value)
    if parameter.step is not None:
        return parameter.at_step(value)
    if parameter.choices is None:
        return value
    return parameter.ordered_choices[value] if parameter.is_ordered else json.loads(value)
