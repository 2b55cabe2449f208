"""What is tried next: Optuna as the store behind ask and tell, and who decides.

The only module that imports Optuna. It translates between the study's space and Optuna's distributions (ordered choices
and steps of a range become whole numbers, true categories stay categories), tells objectives as logarithms, and tells a
configuration that could not run as a finite violation with the median of what is known in place of its values. After
the first trials `tuner.search` decides, or one of Optuna's samplers.
"""

from __future__ import annotations

import json
import statistics
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tuner.chooser import FOLLOWS, GAIN, NOISE, Choice, Chooser, Foresight, seed_of
from tuner.errors import StoreError
from tuner.proposal import Proposal, Standing, Told, attributes_of, proposal_of
from tuner.search.border import Admits
from tuner.search.encoding import MOST_WHOLE_NUMBERS, decode, encode
from tuner.search.suggest import Past
from tuner.space import Parameter, Space, Value, active, is_active
from tuner.spec import Search
from tuner.told import BESIDE, CENSORED, LEARNED, STARTS, modelled, past_of

if TYPE_CHECKING:
    import optuna

_AT_ONCE = "at_once"
LOCKED_S = 120.0
"""So long another process may hold the storage: a backup of a large one takes a minute."""


class Proposer:
    """Proposes configurations and learns from their results. Any thread may call it; one at a time is served.

    Parameters
    ----------
    storage:
        Optuna's, or its address, such as `sqlite:///mlruns/studies/NAME/optuna.db`.
    constraints:
        Names of the study's own constraints, in a fixed order.
    objectives:
        For each objective whether its logarithm is modelled, and +1 to minimise or -1 to maximise it.
    admits:
        What is known of a configuration without an engine: what is not admitted is neither a point of the design nor
        proposed by the model.
    foresight:
        Predictions, of which a model learns how measured objectives differ.
    noted:
        Told, in a sentence, when predictions are no longer followed, or are again.
    """

    def __init__(
        self,
        storage: optuna.storages.BaseStorage | str,
        study: str,
        space: Space,
        search: Search,
        *,
        constraints: Sequence[str],
        objectives: Sequence[tuple[bool, int]],
        admits: Admits = lambda _: 0.0,
        foresight: Foresight | None = None,
        noted: Callable[[str], None] = lambda _: None,
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = space
        self._search = search
        self._constraints = tuple(constraints)
        self._objectives = tuple(objectives)
        self._chooser = Chooser(
            space,
            search,
            objectives=len(objectives),
            model=self._modelled,
            admits=admits,
            foresight=foresight,
            noted=noted,
        )
        self._lock = threading.RLock()
        self._distributions = {name: _distribution(parameter) for name, parameter in space.items()}
        self._study = optuna.create_study(
            storage=_patient(storage),
            study_name=study,
            directions=["minimize"] * len(objectives),
            load_if_exists=True,
        )

    def enqueue(
        self,
        source: str,
        changes: Mapping[str, Value],
        place: Mapping[str, Value] | None = None,
        *,
        at_once: bool = False,
    ) -> bool:
        """Queue a configuration to be proposed before anything else, in order; return whether it teaches anything.

        That is so where it is one of the space's, or lies beside it: between two values of a parameter, or beyond them.

        Parameters
        ----------
        place:
            What vLLM sets where `changes` does not: coordinates in the space, and what does not change a thing.
        at_once:
            Before what was queued without it.
        """
        where = {**(place or {}), **changes}
        coordinates = {name: where[name] for name in self._space if name in where}
        searched = [name for name in self._space if is_active(self._space, name, where)]
        in_space = all(name in where and self._space[name].contains(where[name]) for name in searched)
        in_space = in_space and all(name in searched for name in changes)
        fixed = {name: encode(self._space[name], where[name]) for name in searched} if in_space else {}
        described = attributes_of(source, changes, in_space=in_space)
        more = [name for name in changes if name not in searched and changes[name] != (place or {}).get(name)]
        is_beside = not in_space and not more and self._chooser.coordinates.place(coordinates) is not None
        if is_beside:
            described[BESIDE] = json.dumps(coordinates)
        if at_once:
            described[_AT_ONCE] = True
        self._study.enqueue_trial(fixed, user_attrs=described)
        return in_space or is_beside

    def repeat(self, source: str, changes: Mapping[str, Value], repeats: int) -> Proposal:
        """Begin a further measurement of the configuration of trial `repeats`, whatever is queued.

        Nothing of it is told to the sampler.
        """
        with self._lock:
            proposal = self._begun({}, {**attributes_of(source, changes, in_space=False), "repeats": repeats})
            self._look_ahead()
            return proposal

    def enqueue_again(self, number: int) -> None:
        """Queue the configuration of a trial that nothing could be learned from once more, if it is not queued yet."""
        trials = self._study.get_trials(deepcopy=False)
        attributes = dict(trials[number].user_attrs)
        if not any(t.state.name == "WAITING" and t.user_attrs == attributes for t in trials):
            self._study.enqueue_trial(trials[number].params, user_attrs=attributes)

    def queued(self, source: str) -> list[Mapping[str, Value]]:
        """Configurations that somebody queued and that were not proposed yet."""
        trials = self._study.get_trials(deepcopy=False)
        waiting = [t.user_attrs for t in trials if t.state.name == "WAITING"]
        return [json.loads(told["changes"]) for told in waiting if told.get("source") == source]

    def standing(self) -> Standing:
        """Return where the study stands, in one look at the store: each costs as much as there are trials under way."""
        trials = self._study.get_trials(deepcopy=False)
        under_way = _open(trials)
        over = [t.user_attrs for t in trials if GAIN in t.user_attrs and t.state.is_finished()]
        return Standing(
            open=tuple(under_way),
            queued=tuple(t.user_attrs.get("source", "") for t in trials if t.state.name == "WAITING"),
            end=self._chooser.end([(told[GAIN], told.get(NOISE, 0.0)) for told in over], len(under_way)),
        )

    def ask(self, *, explore: bool = False) -> Proposal:
        """Propose the next trial. The same history gives the same proposal, whatever was interrupted before.

        Trials that were asked for and not told yet count as pending: nothing next to them is proposed in ignorance.
        `explore` draws at random where one of Optuna's samplers would decide: it may insist on what is known already.
        """
        with self._lock:
            history = self._study.get_trials(deepcopy=False)
            queue = [t for t in history if t.state.name == "WAITING"]
            waiting = min(queue, key=lambda t: (_AT_ONCE not in t.user_attrs, t.number), default=None)
            choice = self._choice(history) if waiting is None else None
            if choice is None:
                proposal = self._drawn(history, waiting, explore=explore)
            else:
                described = attributes_of(choice.source, choice.changes, in_space=True)
                proposal = self._begun(choice.changes, {**described, **choice.attributes})
            self._look_ahead()
            return proposal

    def _look_ahead(self) -> None:
        if self._chooser.looks_ahead:
            history = self._study.get_trials(deepcopy=False)
            self._chooser.look_ahead(self._past(history), seed_of(self._search.seed, len(history)))

    def _drawn(
        self,
        history: Sequence[optuna.trial.FrozenTrial],
        waiting: optuna.trial.FrozenTrial | None,
        *,
        explore: bool,
    ) -> Proposal:
        """Have Optuna begin what waits, or what its sampler draws."""
        import optuna

        sampler = self._search.sampler if waiting is None and not explore else "random"
        self._study.sampler = _sampler(sampler, seed_of(self._search.seed, len(history)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which values lie outside a range
            if waiting is None:
                trial = self._study.ask(fixed_distributions=self._distributions)
            else:  # `Study.ask` would begin what waits longest; nobody else begins anything, the study is locked
                running = optuna.trial.TrialState.RUNNING
                self._study._storage.set_trial_state_values(waiting._trial_id, state=running)
                trial = optuna.Trial(self._study, waiting._trial_id)
                for name in waiting.system_attrs.get("fixed_params", {}):
                    trial._suggest(name, self._distributions[name])
        if waiting is None:
            changes = active(self._space, {n: decode(self._space[n], v) for n, v in trial.params.items()})
            for key, value in attributes_of("sampler", changes, in_space=True).items():
                trial.set_user_attr(key, value)
        return proposal_of(trial.number, trial.user_attrs)

    def _begun(self, place: Mapping[str, Value], attributes: Mapping[str, object]) -> Proposal:
        """Begin a trial at a place of the space, or at none: in one transaction, where queueing takes many."""
        import optuna

        trial = optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params={name: encode(self._space[name], value) for name, value in place.items()},
            distributions={name: self._distributions[name] for name in place},
            user_attrs=dict(attributes),
        )
        storage = self._study._storage  # `Study.add_trial` does not say which number it has given
        number = storage.get_trial_number_from_id(storage.create_new_trial(self._study._study_id, trial))
        return proposal_of(number, attributes)

    def _choice(self, history: Sequence[optuna.trial.FrozenTrial]) -> Choice | None:
        followed = next((t.user_attrs[FOLLOWS] for t in reversed(history) if FOLLOWS in t.user_attrs), True)
        seed = seed_of(self._search.seed, len(history))
        return self._chooser.choose(self._past(history), seed, followed=bool(followed))

    def rest_predictions(self, *, now: bool) -> None:
        """Predict nothing in the background for now: something is measured that must not be disturbed."""
        self._chooser.rest(now=now)

    def _past(self, history: Sequence[optuna.trial.FrozenTrial]) -> Past:
        logarithmic = [log for log, _ in self._objectives]
        return past_of(history, self._chooser.coordinates, logarithmic, (STARTS, *self._constraints))

    def tell_measured(
        self,
        number: int,
        values: Sequence[float],
        violations: Mapping[str, float],
        intervals: Sequence[tuple[float, float] | None] = (),
    ) -> None:
        """Tell what a trial measured.

        Parameters
        ----------
        values:
            Of the objectives, as measured.
        violations:
            Signed, of memory and the study's own constraints.
        intervals:
            Of the objectives, where they are known; empty where none is.
        """
        with self._lock:
            told = self._modelled(values)
            widths = [
                None if ends is None else abs(modelled(ends[1], *how) - modelled(ends[0], *how))
                for ends, how in zip(intervals, self._objectives, strict=False)
            ]
            attributes = {"widths": widths} if any(widths) else {}
            self._tell(number, told, violations["memory"], violations, attributes)

    def tell_censored(self, number: int, at_least: Sequence[float]) -> None:
        """Tell of a trial that was ended early how far its objectives had come, in their own units."""
        with self._lock:
            self._tell(number, self._modelled(at_least), 0.0, {}, {CENSORED: True})

    def _modelled(self, values: Sequence[float]) -> list[float]:
        return [modelled(v, *how) for v, how in zip(values, self._objectives, strict=True)]

    def tell_violation(self, number: int, violation: float) -> None:
        """Tell that a configuration cannot run: a finite violation > 0, and the median of what is known as values."""
        with self._lock:
            known = [t.values for t in self._study.get_trials(deepcopy=False) if t.state.name == "COMPLETE"]
            columns = list(zip(*known, strict=True)) or [(0.0,)] * len(self._objectives)
            medians = [statistics.median(c) for c in columns]
            self._tell(number, medians, max(violation, 1e-6), {}, {"imputed": True})

    def tell_unusable(self, number: int) -> None:
        """Close a trial from which nothing can be learned: the machine's fault, void, or outside the space."""
        import optuna

        with self._lock:
            self._study.tell(number, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)

    def _tell(
        self,
        number: int,
        values: list[float],
        starts: float,
        violations: Mapping[str, float],
        attributes: Mapping[str, object],
    ) -> None:
        import optuna

        storage = self._study._storage
        trial = storage.get_trial(storage.get_trial_id_from_study_id_trial_number(self._study._study_id, number))
        if trial.state.is_finished():
            return
        signed = {STARTS: starts, **{name: violations.get(name, 0.0) for name in self._constraints}}
        if BESIDE in trial.user_attrs:
            attributes = {**attributes, LEARNED: {"values": values, "violations": signed}}
        for key, value in attributes.items():
            optuna.Trial(self._study, trial._trial_id).set_user_attr(key, value)
        if not trial.user_attrs["in_space"]:
            self.tell_unusable(number)
            return
        for name, violation in signed.items():
            if name not in trial.constraints:
                optuna.Trial(self._study, trial._trial_id).set_constraint(name, violation)
        self._study.tell(number, values)

    def told(self) -> dict[int, Told]:
        """What Optuna knows of every trial, by number."""
        return {
            t.number: Told(t.state.name, tuple(t.values or ()), t.constraints.get(STARTS))
            for t in self._study.get_trials(deepcopy=False)
        }

    def open_trials(self) -> list[Proposal]:
        """Trials that were asked for and never told: an interrupted run left them."""
        return _open(self._study.get_trials(deepcopy=False))

    def close_unnamed(self) -> None:
        """Close trials that were interrupted before it was written down what they are."""
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state.name == "RUNNING" and "source" not in trial.user_attrs:
                self.tell_unusable(trial.number)

    def sources(self) -> set[str]:
        """Who proposed the trials so far, the queued ones included."""
        return {t.user_attrs.get("source", "") for t in self._study.get_trials(deepcopy=False)}


def _patient(storage: optuna.storages.BaseStorage | str) -> optuna.storages.BaseStorage | str:
    """Optuna's storage; a local one waits for another process that holds it rather than fail after five seconds."""
    import optuna

    if not isinstance(storage, str) or not storage.startswith("sqlite:"):
        return storage
    return optuna.storages.RDBStorage(storage, engine_kwargs={"connect_args": {"timeout": LOCKED_S}})


@contextmanager
def storage_faults(place: str) -> Iterator[None]:
    """Turn whatever Optuna's storage raises inside into a sentence.

    Raises
    ------
    StoreError
        When the storage cannot be read or written.
    """
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
        said = " ".join(str(getattr(cause, "orig", None) or cause).split())[:200]
        raise StoreError(f"{place}: Optuna's storage cannot be used ({said}); free or mend it and go on") from error


def _open(trials: Sequence[optuna.trial.FrozenTrial]) -> list[Proposal]:
    begun = [t for t in trials if t.state.name == "RUNNING" and "source" in t.user_attrs]
    return [proposal_of(t.number, t.user_attrs) for t in begun]


def _sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "tpe":
            return optuna.samplers.TPESampler(seed=seed, n_startup_trials=1, multivariate=True)
        return optuna.samplers.RandomSampler(seed=seed)


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
