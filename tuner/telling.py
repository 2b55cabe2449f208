"""What Optuna is told of a trial that is over."""

from __future__ import annotations

from collections.abc import Sequence

from objectives.memory import UNKNOWN_SHORTAGE
from tuner.ledger import TrialRecord, TrialState
from tuner.proposal import Proposal
from tuner.proposer import Proposer
from tuner.view import Objective


def tell(proposer: Proposer, objectives: Sequence[Objective], proposal: Proposal, record: TrialRecord) -> None:
    """Tell Optuna. Predicted and measured alike; what the machine did wrong is never held against anything.

    Of a run that was ended early it is told how far it had come: that is beaten with a margin, and the truth is worse.
    """
    score = record.score
    if record.state is TrialState.CENSORED and record.failure is not None:
        proposer.tell_censored(proposal.number, [record.failure.at_least[o.name] for o in objectives])
    elif record.state in (TrialState.FAILED, TrialState.VOID) or score is None or proposal.repeats is not None:
        proposer.tell_unusable(proposal.number)
    elif record.engine is None:
        proposer.tell_violation(proposal.number, score.violations.get("memory", UNKNOWN_SHORTAGE))
    else:
        values = [score.values[o.name] for o in objectives]
        intervals = [score.intervals.get(o.name) for o in objectives]
        proposer.tell_measured(proposal.number, values, score.violations, intervals)
