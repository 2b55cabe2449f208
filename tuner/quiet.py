"""Nothing of the tuner's own works beside a measurement on a machine that has no core to spare."""

from __future__ import annotations

import os
from typing import Protocol

from tuner.ledger import History, TrialRecord
from tuner.proposal import Proposal
from tuner.study import Listener
from tuner.study_file import StudyFile

CORES_TO_SPARE = 8
"""An engine on a GPU keeps a few cores busy: its core, a worker for each device, the load driver."""
_MEASURES = ("warm up", "probe", "run")
"""Stages of a trial that must not be disturbed, as engines name them."""


class Rest(Protocol):
    """Told whether to rest now."""

    def __call__(self, *, now: bool) -> None:
        """Rest, or go on."""
        ...


def needs_quiet(file: StudyFile) -> bool:
    """Whether other work would be seen in what this machine measures."""
    return file.spec.resources.gpus_per_engine == 0 or (os.cpu_count() or 1) < CORES_TO_SPARE


class Considerate:
    """A listener that has something rest while any trial is measured, and passes on everything that it hears."""

    def __init__(self, listener: Listener, rest: Rest) -> None:
        self._listener = listener
        self._rest = rest
        self._measured: set[int] = set()

    def began(self, proposal: Proposal, of_trials: int | None, ends_at: float | None) -> None:
        """Pass it on."""
        self._listener.began(proposal, of_trials, ends_at)

    def progressed(self, number: int, text: str) -> None:
        """Rest from the warm-up of a trial to the end of its measurement."""
        if text.startswith(_MEASURES):
            self._measured.add(number)
        else:
            self._measured.discard(number)
        self._rest(now=bool(self._measured))
        self._listener.progressed(number, text)

    def finished(self, record: TrialRecord, history: History) -> None:
        """Go on, unless another trial is measured."""
        self._measured.discard(record.number)
        self._rest(now=bool(self._measured))
        self._listener.finished(record, history)

    def noted(self, text: str) -> None:
        """Pass it on."""
        self._listener.noted(text)
