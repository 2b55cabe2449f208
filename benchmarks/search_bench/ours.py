"""The tuner's own search, driven as its loop drives it: queue, gate, known configurations, violations, random draws.

`PARTS` names what can be left out, one at a time, for the ablation; a part is left out by building the search without
it, not by a switch of the tuner.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from search_bench.problem import Changes, Knowledge, Predictor, Problem, record
from search_bench.searchers import Outcome, Suggestion
from tuner.chooser import Foresight
from tuner.gate import Admitted, NotAdmitted
from tuner.guidance import Predict
from tuner.ledger import History
from tuner.proposal import Proposal
from tuner.proposer import Proposer
from tuner.space import Parameter, Space, in_order
from tuner.spec import Search
from tuner.study import INSISTS, REFUSALS_IN_A_ROW

STARTUP_TRIALS = Search().startup_trials


@dataclass(frozen=True, slots=True)
class Parts:
    """What the search has."""

    twin: bool = True
    gate: bool = True
    log: bool = True
    ordinal: bool = True
    recipes: bool = True
    startup: int = STARTUP_TRIALS
    sampler: str = "gp"


PARTS: Mapping[str, Parts] = {
    "tuner": Parts(),
    "tuner-no-twin": Parts(twin=False),
    "tuner-no-gate": Parts(gate=False),
    "tuner-no-log": Parts(log=False),
    "tuner-no-ordinal": Parts(ordinal=False),
    "tuner-no-recipes": Parts(recipes=False),
    "tuner-no-design": Parts(startup=1),
    "tuner-no-twin-no-recipes": Parts(twin=False, recipes=False),
    "tuner-no-twin-no-design": Parts(twin=False, startup=1),
    "tuner-alone": Parts(twin=False, gate=False, recipes=False),
}


class Tuner:
    """The tuner's proposer behind the benchmark's interface.

    Parameters
    ----------
    on_disk:
        Whether Optuna's storage is a database, as in a study, or in memory: the same proposals in half the time.
    ahead:
        Whether the twin is asked while trials run, as in a study: the same proposals, found elsewhere.
    """

    def __init__(
        self, problem: Problem, seed: int, parts: Parts, *, on_disk: bool = False, ahead: bool = False
    ) -> None:
        import optuna

        knowledge = _without(problem.knowledge(), parts)
        self.refused = 0
        self._base = knowledge.base
        self._naming = _Naming(in_order(problem.space), ordinal=parts.ordinal)
        self._records: list[Any] = []
        history = lambda: History(None, tuple(self._records), (), ())  # noqa: E731
        self._gate = knowledge.gate(history) if knowledge.gate else None
        self._folder = tempfile.TemporaryDirectory(prefix="search-benchmark-")
        search = Search(sampler=parts.sampler, startup_trials=parts.startup, seed=seed)
        self._proposer = Proposer(
            f"sqlite:///{self._folder.name}/optuna.db" if on_disk else optuna.storages.InMemoryStorage(),
            problem.name,
            self._naming.space,
            search,
            constraints=[],
            objectives=[(parts.log, 1)] * 2,
            admits=self._admits,
            foresight=Foresight(self._naming.predictions(knowledge.predictor(history)), ahead, knowledge.effort)
            if knowledge.predictor
            else None,
        )
        for source, changes in (("reference", problem.default), *knowledge.first):
            place = {**problem.default, **knowledge.effective}
            self._proposer.enqueue(source, self._naming.inner(changes), self._naming.inner(place))
        self._known: dict[str, Outcome] = {}
        self._keys: dict[int, str] = {}
        self._proposals: dict[int, tuple[Proposal, Admitted]] = {}

    def ask(self) -> Suggestion:
        """Return the next proposal that needs an engine."""
        refusals = 0
        while True:
            proposal = self._proposer.ask(explore=refusals >= INSISTS)
            changes = self._naming.outer(proposal.changes)
            config = self._base.with_args(changes)
            verdict = self._gate.check(config) if self._gate else Admitted(config.key(), {})
            if isinstance(verdict, NotAdmitted):
                self.refused += 1
                self._proposer.tell_violation(proposal.number, verdict.violation)
            elif verdict.key in self._known:
                self._told(proposal, self._known[verdict.key])
            elif verdict.key in self._keys.values() and refusals < REFUSALS_IN_A_ROW:
                self._proposer.tell_unusable(proposal.number)  # another actor is at it
            else:
                self._keys[proposal.number] = verdict.key
                self._proposals[proposal.number] = (proposal, verdict)
                return Suggestion(proposal.number, changes, proposal.source)
            refusals += 1
            if refusals > REFUSALS_IN_A_ROW:
                raise RuntimeError(f"{refusals} proposals in a row needed no engine")

    def rest(self, *, now: bool) -> None:
        """Predict nothing in the background for now."""
        self._proposer.rest_predictions(now=now)

    def _admits(self, changes: Changes) -> float:
        """Signed violation that the gate expects, as the study's opening gives it to the proposer."""
        if self._gate is None:
            return 0.0
        return self._gate.check(self._base.with_args(self._naming.outer(changes))).expected_violation

    def tell(self, suggestion: Suggestion, outcome: Outcome) -> None:
        """Tell the proposer, and the gate what came of what it would have refused."""
        self._known[self._keys.pop(suggestion.number)] = outcome
        proposal, verdict = self._proposals.pop(suggestion.number)
        self._told(proposal, outcome)
        self._records.append(record(len(self._records), self._base, suggestion.changes, outcome.truth))
        if self._gate is not None and verdict.predicted_failure is not None:
            self._gate.proven(right=outcome.values is None)

    def _told(self, proposal: Proposal, outcome: Outcome) -> None:
        if outcome.values is None:
            self._proposer.tell_violation(proposal.number, outcome.violation)
        else:
            self._proposer.tell_measured(proposal.number, outcome.values, {"memory": outcome.violation})


def _without(knowledge: Knowledge, parts: Parts) -> Knowledge:
    return replace(
        knowledge,
        gate=knowledge.gate if parts.gate else None,
        predictor=knowledge.predictor if parts.twin else None,
        first=[f for f in knowledge.first if parts.recipes or not f[0].startswith("recipe:")],
    )


class _Naming:
    """The space as the proposer sees it; without order, numbers to choose from become words."""

    def __init__(self, space: Space, *, ordinal: bool) -> None:
        self._words: dict[str, dict[str, Any]] = {}
        self.space: dict[str, Parameter] = {}
        for name, parameter in space.items():
            self.space[name] = parameter
            if not ordinal and parameter.choices is not None:
                self._words[name] = {str(c): c for c in parameter.choices}
                self.space[name] = Parameter(choices=tuple(self._words[name]))

    def inner(self, changes: Changes) -> dict[str, Any]:
        """Return changes as the proposer knows them."""
        return {n: str(v) if n in self._words else v for n, v in changes.items()}

    def outer(self, changes: Changes) -> dict[str, Any]:
        """Return changes as the problem knows them."""
        return {n: self._words[n].get(v, v) if n in self._words else v for n, v in changes.items()}

    def predictions(self, predict: Predictor) -> Predict:
        """Return the problem's predictor as the proposer asks it."""

        def predicted(configurations: Sequence[Changes], basis: int) -> Sequence[Sequence[float] | None]:
            return [predict(self.outer(changes), basis) for changes in configurations]

        return predicted
