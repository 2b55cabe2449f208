"""What a proposer says: what is to be tried, where a study stands, what is known of a trial."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.chooser import SearchEnd
from tuner.space import Value


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
        Whether it is one of the space's configurations, so that Optuna can be told what it shows.
    repeats:
        Number of the trial that it measures again; `None` for a configuration of its own.
    """

    number: int
    source: str
    changes: Mapping[str, Value]
    in_space: bool
    repeats: int | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a study stands in Optuna's store.

    Parameters
    ----------
    open:
        Trials that were asked for and never told.
    queued:
        Sources of what is queued and was not proposed yet.
    end:
        Why nothing more is to be tried, or worth it; `None` while something is.
    """

    open: tuple[Proposal, ...]
    queued: tuple[str, ...]
    end: SearchEnd | None


@dataclass(frozen=True, slots=True)
class Told:
    """What Optuna knows of one trial: its state in Optuna's words, its values, its violation of `starts`."""

    state: str
    values: tuple[float, ...]
    violation: float | None


def attributes_of(source: str, changes: Mapping[str, Value], *, in_space: bool) -> dict[str, Any]:
    """Return the attributes that say what a trial is."""
    return {"source": source, "changes": json.dumps(dict(changes)), "in_space": in_space}


def proposal_of(number: int, attributes: Mapping[str, Any]) -> Proposal:
    """Return the proposal that a trial's attributes say."""
    changes = json.loads(attributes["changes"])
    return Proposal(number, attributes["source"], changes, bool(attributes["in_space"]), attributes.get("repeats"))
