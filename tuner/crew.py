"""The engines of a study at work: each on a thread of its own, what they say on one queue.

Whoever holds the crew decides alone: nothing here touches the ledger, the proposer or the listener. Engines on one
machine may disturb each other, so a trial may ask to be alone on its machine.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from objectives.measurement import Failure, FailureKind, Measurement
from tuner.engine.protocol import EnginePool, MeasurePlan, Seat
from tuner.gate import Admitted
from tuner.ledger import Attempt, TrialRecord
from tuner.proposal import Proposal
from tuner.workload.model import Workload

ATTEMPTS = 2
"""A void or machine-failed trial is tried once more."""
NODES = 3
"""A trial whose machine left the cluster costs nothing by that, but what ended so many machines may be the cause."""
FAILURES_IN_A_ROW = 3
"""An engine that the machine failed so often in a row gets no further trial: it would only fail on."""


@dataclass(slots=True, eq=False)
class Job:
    """One trial on its way to a finished record.

    Parameters
    ----------
    alone:
        Whether it must have its machine for itself.
    attempts:
        Those that are over, without the last.
    neighbours:
        Other engines that worked on its machine at the same time, at most.
    seat:
        Where it runs, or ran last.
    """

    proposal: Proposal
    verdict: Admitted
    record: TrialRecord
    alone: bool = False
    attempts: list[Attempt] = field(default_factory=list)
    engine_s: float = 0.0
    neighbours: int = 0
    seat: Seat | None = None

    @property
    def measurements(self) -> int:
        """Attempts so far that came to measure: not those whose machine left."""
        return sum(not _left(attempt.failure) for attempt in self.attempts)

    def may_try_again(self, failure: Failure | None) -> bool:
        """Whether another attempt is due after one that failed like this, or was void."""
        lost = sum(_left(a.failure) for a in self.attempts) + _left(failure)
        return lost < NODES if _left(failure) else len(self.attempts) + 1 - lost < ATTEMPTS


def _left(failure: Failure | None) -> bool:
    return failure is not None and failure.kind is FailureKind.NODE_LOST


@dataclass(frozen=True, slots=True)
class Progressed:
    """A running trial entered a new stage."""

    job: Job
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt is over; an exception is a fault of ours or an interruption, not the engine's."""

    job: Job
    outcome: Measurement | Failure | BaseException
    seconds: float


class Crew:
    """Who works on what.

    Parameters
    ----------
    pool:
        Asked again and again: engines come and go.
    """

    def __init__(self, pool: EnginePool, workload: Workload) -> None:
        self._pool = pool
        self._workload = workload
        self._events: queue.SimpleQueue[Progressed | Ended] = queue.SimpleQueue()
        self._failures: dict[Seat, int] = {}
        self._unlucky: list[Seat] = []
        """A seat for each failure since any of them last had a success."""
        self.running: list[Job] = []

    @property
    def seats(self) -> Sequence[Seat]:
        """Seats that may get a trial, busy or not."""
        return [seat for seat in self._pool.seats() if self._failures.get(seat, 0) < FAILURES_IN_A_ROW]

    def place_for(self, job: Job) -> Seat | None:
        """Find a seat for a trial that waits; after a failure of the machine another, where there is one at all."""
        free = self._free()
        if job.attempts and job.attempts[-1].failure is not None and any(s is not job.seat for s in self.seats):
            free = [seat for seat in free if seat is not job.seat]
        if job.alone:
            quiet = [seat for seat in free if not self._busy_on(seat.machine)]
            return quiet[0] if quiet else None
        held = self._held_machines()
        return next((seat for seat in free if seat.machine not in held), None)

    def has_place(self, waiting: Sequence[Job]) -> bool:
        """Whether a further trial could begin now, beside those that wait for a machine of their own."""
        held = self._held_machines()
        if any(job.alone for job in waiting):
            held |= self._quietest()
        return any(seat.machine not in held for seat in self._free())

    def _free(self) -> list[Seat]:
        taken = [job.seat for job in self.running]
        return [seat for seat in self.seats if seat not in taken]

    def _held_machines(self) -> set[str]:
        """Machines that a trial has for itself."""
        return {job.seat.machine for job in self.running if job.alone and job.seat is not None}

    def _quietest(self) -> set[str]:
        """Find the machine that will be free first for a trial that must be alone: nothing new begins on it."""
        machines = dict.fromkeys(seat.machine for seat in self.seats)
        return {min(machines, key=lambda machine: len(self._busy_on(machine)))} if machines else set()

    def _busy_on(self, machine: str) -> list[Job]:
        return [job for job in self.running if job.seat is not None and job.seat.machine == machine]

    def launch(self, job: Job, seat: Seat, plan: MeasurePlan) -> None:
        """Begin an attempt on a free seat; its end comes out of `hear`."""
        beside = self._busy_on(seat.machine)
        job.seat = seat
        self.running.append(job)
        job.neighbours = len(beside)
        for other in beside:
            other.neighbours = max(other.neighbours, len(beside))
        name = f"trial-{job.record.number}"
        threading.Thread(target=self._work, args=(job, seat, plan), daemon=True, name=name).start()

    def _work(self, job: Job, seat: Seat, plan: MeasurePlan) -> None:
        began_s = time.monotonic()
        said = ""

        def progress(text: str) -> None:
            nonlocal said
            if text != said:  # an engine says where it is again and again
                said = text
                self._events.put(Progressed(job, text))

        outcome: Measurement | Failure | BaseException
        try:
            outcome = seat.engine.run(job.record.config, self._workload, plan, progress)
        except BaseException as error:  # noqa: BLE001  # carried to the thread that hears, which raises it
            outcome = error
        self._events.put(Ended(job, outcome, time.monotonic() - began_s))

    def hear(self, timeout_s: float) -> Progressed | Ended | None:
        """Wait for what happens next; `None` when nothing did."""
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def release(self, job: Job) -> None:
        """Have the seat of an attempt that ended free for the next."""
        self.running.remove(job)

    def count(self, seat: Seat, *, failed: bool) -> bool:
        """Note whether the machine failed an attempt on this seat, and return whether it gets no further trial now."""
        self._failures[seat] = self._failures.get(seat, 0) + 1 if failed else 0
        self._unlucky = [*self._unlucky, seat] if failed else []
        return self._failures[seat] >= FAILURES_IN_A_ROW

    @property
    def failures_in_a_row(self) -> int:
        """Failures of the machine since any engine last had a success."""
        return len(self._unlucky)

    @property
    def is_worn_out(self) -> bool:
        """Whether going on is no use: every engine there is failed too often, or that many failed with no success."""
        return len(set(self._unlucky)) >= FAILURES_IN_A_ROW or (bool(self._pool.seats()) and not self.seats)

    @property
    def has_neighbours(self) -> bool:
        """Whether two engines share a machine."""
        machines = [seat.machine for seat in self.seats]
        return len(set(machines)) < len(machines)
