"""What a study tries next beyond what the sampler proposes: what was interrupted, and measurements that are repeated.

The reference is measured again for the noise floor, to see the machine drift, and once beside a busy neighbour where
engines share a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tuner.config import EngineConfig
from tuner.drift import INTERFERENCE, beside_was_measured
from tuner.ledger import History, TrialRecord, TrialState
from tuner.night import NOT_A_CANDIDATE, is_open
from tuner.proposal import Proposal
from tuner.proposer import Proposer
from tuner.spec import Noise
from tuner.view import Objective, view

REFERENCE_TRIALS = 3
"""So many trials of one run may go into the reference, with which everything is compared, before it is done without."""


class Agenda:
    """Says what comes next. `under_way` are the records of trials that run or wait for an engine."""

    def __init__(self, proposer: Proposer, base: EngineConfig, noise: Noise, objectives: Sequence[Objective]) -> None:
        self._proposer = proposer
        self._base = base
        self._noise = noise
        self._objectives = objectives
        self._reference_trials = 1
        self._beside_was_asked = False

    def next(
        self,
        history: History,
        under_way: Sequence[TrialRecord],
        interrupted: Sequence[Proposal],
        *,
        has_queued: bool,
        explore: bool,
        has_neighbours: bool,
    ) -> Proposal:
        """Propose what comes next; what was interrupted goes first.

        Parameters
        ----------
        has_queued:
            Whether something is queued that was not proposed yet.
        """
        if interrupted:
            return interrupted[0]
        if not has_queued:
            self._queue_reference_again(history)
            if (sentinel := self._sentinel(history, under_way, has_neighbours)) is not None:
                return sentinel
        return self._proposer.ask(explore=explore)

    def repeat(self, history: History, source: str, number: int) -> Proposal:
        """Begin a further measurement of a trial's configuration, before anything that is queued."""
        record = _record(history, number)
        changes = {name: mine for name, (mine, _) in record.config.difference(self._base).items()}
        return self._proposer.repeat(source, changes, number)

    def last(self, history: History, has_time: Callable[[TrialRecord], bool]) -> Proposal | None:
        """Begin what a study that stops still owes: its noise floor, and a last word on a front that was disturbed."""
        return self._last_noise(history, has_time) or self._last_alone(history, has_time)

    def _last_noise(self, history: History, has_time: Callable[[TrialRecord], bool]) -> Proposal | None:
        """Measure the reference for the noise floor where the budget ended before it was measured again."""
        reference = history.reference
        if reference is None or reference.state is not TrialState.COMPLETE or not has_time(reference):
            return None
        if len(_sentinels(history, ())) >= self._noise.aa_runs:
            return None
        return self.repeat(history, "sentinel", reference.number)

    def _last_alone(self, history: History, has_time: Callable[[TrialRecord], bool]) -> Proposal | None:
        """Measure a member of the front that only ran beside busy neighbours, once these are known to disturb."""
        if not any(note.code == INTERFERENCE for note in history.notes):
            return None
        alone = {t.config.key() for t in history.finished if t.source == "alone" or not t.neighbours}
        for number in view(history, self._objectives).front:
            record = _record(history, number)
            if record.config.key() not in alone and has_time(record):
                return self.repeat(history, "alone", number)
        return None

    def wants_quiet(self, history: History, under_way: Sequence[TrialRecord], proposal: Proposal) -> bool:
        """Whether nothing else may run on its machine: the reference, the noise floor, a last word on the front."""
        if proposal.source == "sentinel":
            earlier = sum(number < proposal.number for number in _sentinels(history, under_way))
            return earlier < self._noise.aa_runs
        return proposal.source in ("reference", "alone")

    def _queue_reference_again(self, history: History) -> None:
        """Queue the reference once more where the machine failed it or its measurement is void."""
        reference = history.reference
        if reference is None or reference.state not in (TrialState.FAILED, TrialState.VOID):
            return
        if self._reference_trials < REFERENCE_TRIALS:
            self._reference_trials += 1
            self._proposer.enqueue_again(reference.number)

    def _sentinel(self, history: History, under_way: Sequence[TrialRecord], has_neighbours: bool) -> Proposal | None:
        """Measure the reference again where it is due: first for the noise floor, later to see the machine drift."""
        reference = history.reference
        if reference is None or reference.state is not TrialState.COMPLETE:
            return None
        repeats = _sentinels(history, under_way)
        since = _candidates_since(history, repeats[-1] if repeats else reference.number)
        if len(repeats) < self._noise.aa_runs or (self._noise.sentinel_every and since >= self._noise.sentinel_every):
            return self.repeat(history, "sentinel", reference.number)
        if self._noise.aa_runs and has_neighbours and not self._beside_was_asked:
            self._beside_was_asked = True  # once a run: whether a neighbour was busy then is seen afterwards
            if not beside_was_measured(history):
                return self.repeat(history, "sentinel", reference.number)
        return None


def _sentinels(history: History, under_way: Sequence[TrialRecord]) -> list[int]:
    """Numbers of the trials that measured the reference again, or do so now."""
    over = [t for t in history.finished if not is_open(t)]
    return sorted({t.number for t in (*over, *under_way) if t.source == "sentinel"})


def _candidates_since(history: History, number: int) -> int:
    return sum(t.engine_s > 0 and t.number > number and t.source not in NOT_A_CANDIDATE for t in history.finished)


def _record(history: History, number: int) -> TrialRecord:
    return next(t for t in history.trials if t.number == number)
