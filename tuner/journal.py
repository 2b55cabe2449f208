"""One structured log a study: what happened when, as JSON lines beside the ledger, for people and machines that watch.

Nothing reads it back: the ledger alone says what a study knows. It is rotated, so that a year of nights fills no disk,
and a disk that is full costs log lines, never the study.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tuner.ledger import History, TrialRecord
from tuner.proposal import Proposal
from tuner.secrets import mask_tree, secret_values

NAME = "log.jsonl"
MOST_BYTES = 4 * 2**20
"""Of one file; a trial writes about 2 KiB, so that this holds two thousand of them."""
KEPT = 4
"""Full files that are kept beside the one that is written to."""
_COUNTS = re.compile(r"\s*\d+/\d+.*")


@dataclass(frozen=True, slots=True)
class _Busy:
    """What a trial is doing, and since when (`time.monotonic`)."""

    stage: str
    stage_since_s: float
    since_s: float


class Journal:
    """A `Listener` that writes the log of one study.

    Parameters
    ----------
    folder:
        Of the study. Nothing is written while it does not exist.
    env:
        Environment variables of the study file: values of secrets among them are masked.
    """

    def __init__(self, folder: Path, env: Mapping[str, str], *, most_bytes: int = MOST_BYTES) -> None:
        self._path = folder / NAME
        self._secrets = secret_values() + secret_values(env)
        self._most_bytes = most_bytes
        self._busy: dict[int, _Busy] = {}
        self._lock = threading.Lock()

    def began(self, proposal: Proposal, of_trials: int | None, ends_at: float | None) -> None:
        """Write that a trial begins."""
        now_s = time.monotonic()
        self._busy[proposal.number] = _Busy("", now_s, now_s)
        self.write(
            "trial_begun",
            trial=proposal.number,
            source=proposal.source,
            changes=dict(proposal.changes),
            repeats=proposal.repeats,
            ends_at=None if ends_at is None else _stamp(ends_at),
        )

    def progressed(self, number: int, text: str) -> None:
        """Write that a trial has left a stage; how far it is within one is for the display."""
        stage = _COUNTS.sub("", text)
        busy = self._busy.get(number)
        if busy is None or busy.stage == stage:
            return
        self._left_stage(number, busy)
        self._busy[number] = _Busy(stage, time.monotonic(), busy.since_s)

    def finished(self, record: TrialRecord, history: History) -> None:
        """Write what became of a trial."""
        busy = self._busy.pop(record.number, None)
        if busy is not None:
            self._left_stage(record.number, busy)
        failure, score = record.failure, record.score
        self.write(
            "trial_finished",
            trial=record.number,
            state=record.state.value,
            duration_s=None if busy is None else round(time.monotonic() - busy.since_s, 3),
            engine_s=round(record.engine_s, 3),
            attempts=len(record.attempts) + 1,
            failure=None if failure is None else {"kind": failure.kind.value, "stage": failure.stage.value},
            message=None if failure is None else failure.message,
            void=[reason.code for reason in score.void] if score is not None else [],
        )

    def noted(self, text: str) -> None:
        """Write what concerns the study as a whole."""
        self.write("note", text=text)

    def _left_stage(self, number: int, busy: _Busy) -> None:
        if busy.stage:
            seconds = round(time.monotonic() - busy.stage_since_s, 3)
            self.write("stage", trial=number, stage=busy.stage, duration_s=seconds)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; what is `None` is left out. A file system that refuses costs the line."""
        known = {name: value for name, value in fields.items() if value is not None}
        entry = {"at": _stamp(time.time()), "event": event, **mask_tree(known, self._secrets)}
        line = json.dumps(entry, default=str).encode() + b"\n"
        with self._lock, suppress(OSError):
            if self._path.parent.is_dir():
                self._rotate(len(line))
                descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                try:
                    os.write(descriptor, line)
                finally:
                    os.close(descriptor)

    def _rotate(self, more_bytes: int) -> None:
        """Put a full file aside, the oldest of those before it away."""
        if not self._path.exists() or self._path.stat().st_size + more_bytes <= self._most_bytes:
            return
        for index in range(KEPT, 0, -1):
            older = self._path.with_name(f"log.{index}.jsonl")
            newer = self._path.with_name(f"log.{index - 1}.jsonl") if index > 1 else self._path
            if newer.exists():
                newer.replace(older)


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
