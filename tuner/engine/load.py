"""The load driver: sends a workload to a running engine at the workload's own times and notes when each token arrives.

It knows a `TokenSource`, not vLLM. An open loop keeps its times whatever the engine does; what the driver itself is
late by is recorded apart from what the cap on concurrency made a request wait. The work for a token is one clock
reading and one append, however many streams are open; memory grows with tokens and nothing else.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from objectives.measurement import RequestRecord
from tuner.engine.protocol import EngineDiedError, Progress, TokenDelta, TokenSource
from tuner.workload.model import Request, Workload

Clock = Callable[[], float]
"""Seconds on a clock that never goes back. `time.monotonic` is the one that vLLM stamps its own events with."""

_TIMER_SLACK_S = 1e-6
"""A timer that fires this much too early is on time; waiting for so little again would cost a whole timer tick."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What the client saw of one repeat. Times in seconds; those of the records count from `started_s`.

    Parameters
    ----------
    records:
        One a request that was sent, in the order of the workload.
    started_s:
        Reading of the driver's clock at the start of the repeat: the zero of every record.
    duration_s:
        From the first scheduled arrival to the last token, or to the end of the load when no token came.
    lateness_s:
        One a record: how much later than it could the driver sent the request, the cap's wait not counted. This is
        the client's own fault, and the evidence for or against its having kept the arrival times.
    held_back_s:
        One a record: how long the cap on concurrency kept the request waiting; 0 for most.
    unsent:
        Requests that were never sent, because the load was stopped or the engine died.
    stopped:
        Whether the load was told to stop before it was done.
    """

    records: tuple[RequestRecord, ...]
    started_s: float
    duration_s: float
    lateness_s: tuple[float, ...]
    held_back_s: tuple[float, ...]
    unsent: int = 0
    stopped: bool = False


class LoadAbortedError(EngineDiedError):
    """The engine died under load. `partial` holds what was seen until then: evidence, never a measurement."""

    def __init__(self, message: str, partial: LoadResult) -> None:
        self.partial = partial
        super().__init__(message)

    def __reduce__(self) -> tuple[type[LoadAbortedError], tuple[str, LoadResult]]:
        """An exception is copied to another process by its message alone, which `__init__` does not take."""
        return type(self), (str(self), self.partial)


async def run_load(
    source: TokenSource,
    workload: Workload,
    *,
    id_prefix: str,
    repeat: int = 0,
    clock: Clock = time.monotonic,
    stop: asyncio.Event | None = None,
    on_progress: Progress | None = None,
    is_enough: Callable[[RequestRecord], bool] | None = None,
) -> LoadResult:
    """Send every request of `workload` to `source` and return what came back.

    Requests without a `user` form an open loop that follows `arrival_s`; those with one form a closed loop in which a
    user's next request is scheduled `think_s` after the end of the one before. Returns only when no task of this load
    is left, also when it raises or is cancelled.

    Parameters
    ----------
    id_prefix:
        Request ids are `PREFIX-REPEAT-INDEX`; must be fresh for each load on one engine.
    repeat:
        Written into every record.
    clock:
        Must be the clock of the engine's stamps, so that both can be shifted onto the run's own.
    stop:
        When set, nothing more is sent, what is in flight is cancelled and the result is returned.
    on_progress:
        Told `run DONE/TOTAL` after each request.
    is_enough:
        Shown each request that is over; when it returns true the load ends as if it had been stopped.

    Raises
    ------
    LoadAbortedError
        When the engine died. Everything in flight has been cancelled.
    """
    cut_short = False
    with _frozen_heap():
        load = _Load(source, workload, id_prefix, repeat, clock, on_progress, is_enough)
        try:
            await load.drive(stop)
        except* _EndLoad:
            cut_short = True
    result = load.result(stopped=cut_short and load.death is None)
    if load.death is not None:
        raise LoadAbortedError(str(load.death) or "the engine died under load", result) from load.death
    return result


class _EndLoad(Exception):  # noqa: N818  a signal between the tasks of one load, not an error
    """Ends every task of the load: the engine died, the load was told to stop, or enough was seen."""


@dataclass(slots=True)
class _Sent:
    """A request that was handed to the engine. Times as the clock reads them."""

    scheduled_s: float
    earliest_s: float
    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    last: TokenDelta | None = None
    error: str | None = None


class _Load:
    """One repeat under way."""

    def __init__(
        self,
        source: TokenSource,
        workload: Workload,
        id_prefix: str,
        repeat: int,
        clock: Clock,
        on_progress: Progress | None,
        is_enough: Callable[[RequestRecord], bool] | None,
    ) -> None:
        self.death: EngineDiedError | None = None
        self._source = source
        self._requests = workload.requests
        self._id_prefix = id_prefix
        self._repeat = repeat
        self._clock = clock
        self._on_progress = on_progress
        self._is_enough = is_enough
        self._slots = _Slots(workload.max_concurrency, clock)
        self._sent: list[_Sent | None] = [None] * len(workload.requests)
        self._done = 0
        self._start_s = clock()

    async def drive(self, stop: asyncio.Event | None) -> None:
        """Send everything and wait for its end. The groups see to it that no task outlives this call."""
        open_loop, users = _by_user(self._requests)
        async with asyncio.TaskGroup() as outer:
            watcher = outer.create_task(_end_when_set(stop)) if stop is not None else None
            async with asyncio.TaskGroup() as senders:
                senders.create_task(self._open_loop(open_loop, senders))
                for turns in users:
                    senders.create_task(self._closed_loop(turns))
            if watcher is not None:
                watcher.cancel()

    async def _open_loop(self, indices: Sequence[int], senders: asyncio.TaskGroup) -> None:
        """One task keeps the whole timetable: absolute deadlines, so that no lateness carries over to the next."""
        for index in indices:
            scheduled_s = self._start_s + self._requests[index].arrival_s
            await self._sleep_until(scheduled_s)
            earliest_s = await self._slots.enter(scheduled_s)
            senders.create_task(self._serve(index, scheduled_s, earliest_s))

    async def _closed_loop(self, turns: Sequence[int]) -> None:
        """One user: thinks, asks, waits for the answer, thinks again."""
        ended_s: float | None = None
        for index in turns:
            request = self._requests[index]
            scheduled_s = self._start_s + request.arrival_s
            if ended_s is not None:
                scheduled_s = max(scheduled_s, ended_s + request.think_s)
            await self._sleep_until(scheduled_s)
            earliest_s = await self._slots.enter(scheduled_s)
            await self._serve(index, scheduled_s, earliest_s)
            ended_s = self._clock()

    async def _sleep_until(self, deadline_s: float) -> None:
        while (wait_s := deadline_s - self._clock()) > _TIMER_SLACK_S:
            await asyncio.sleep(wait_s)

    async def _serve(self, index: int, scheduled_s: float, earliest_s: float) -> None:
        """Run one request to its end. Only the engine's death and a cancellation leave this method."""
        sent = _Sent(scheduled_s, earliest_s, self._clock())
        self._sent[index] = sent
        try:
            await self._consume(self._requests[index], f"{self._id_prefix}-{self._repeat}-{index}", sent)
        except EngineDiedError as death:
            sent.error = f"the engine died: {death}"
            self.death = self.death or death
            raise _EndLoad from death
        except asyncio.CancelledError:
            sent.error = "cancelled before its last token"
            raise
        except Exception as error:  # whatever one request met is a fact about that request
            sent.error = f"{type(error).__name__}: {error}"
            if _is_cancelled():  # an abort that failed must not turn the cancellation into a request that failed
                raise asyncio.CancelledError from error
        finally:
            self._slots.leave()
        self._done += 1
        if self._on_progress is not None:
            self._on_progress(f"run {self._done}/{len(self._requests)}")
        if self._is_enough is not None and self._is_enough(self._record(index, sent)):
            raise _EndLoad

    async def _consume(self, request: Request, request_id: str, sent: _Sent) -> None:
        """Note the arrival of every token. A delta of k tokens is k equal times; an empty one is no token."""
        clock, times = self._clock, sent.token_times_s
        async for delta in self._source.generate(request, request_id):
            times += [clock()] * delta.token_count
            if delta.finish_reason is not None:
                sent.last = delta
        sent.error = _shortfall(request, sent)

    def result(self, *, stopped: bool) -> LoadResult:
        """Put together what was seen, on the run's own clock."""
        sent = [(index, s) for index, s in enumerate(self._sent) if s is not None]
        ended_s = max((s.token_times_s[-1] for _, s in sent if s.token_times_s), default=self._clock())
        return LoadResult(
            records=tuple(self._record(index, s) for index, s in sent),
            started_s=self._start_s,
            duration_s=ended_s - min((s.scheduled_s for _, s in sent), default=ended_s),
            lateness_s=tuple(s.sent_s - s.earliest_s for _, s in sent),
            held_back_s=tuple(s.earliest_s - s.scheduled_s for _, s in sent),
            unsent=len(self._sent) - len(sent),
            stopped=stopped,
        )

    def _record(self, index: int, sent: _Sent) -> RequestRecord:
        zero = self._start_s
        times = tuple(t - zero for t in sent.token_times_s)
        last = sent.last or TokenDelta(token_count=0)
        return RequestRecord(
            request_id=f"{self._id_prefix}-{self._repeat}-{index}",
            prompt_tokens=self._requests[index].prompt_tokens,
            output_tokens=len(times),
            scheduled_s=sent.scheduled_s - zero,
            sent_s=sent.sent_s - zero,
            queued_s=None if last.queued_s is None else last.queued_s - zero,
            first_scheduled_s=None if last.first_scheduled_s is None else last.first_scheduled_s - zero,
            first_token_s=times[0] if times else None,
            last_token_s=times[-1] if times else None,
            cached_tokens=last.cached_tokens,
            finish_reason=last.finish_reason,
            error=sent.error,
            preemptions=last.preemptions or 0,
            token_times_s=times,
            repeat=self._repeat,
        )


class _Slots:
    """The cap on requests in the engine, first come first served."""

    def __init__(self, limit: int | None, clock: Clock) -> None:
        self._semaphore = None if limit is None else asyncio.Semaphore(limit)
        self._clock = clock
        self._opened_s = float("-inf")

    async def enter(self, scheduled_s: float) -> float:
        """Wait for a slot and return the earliest time at which a perfect client could have sent the request."""
        if self._semaphore is None:
            return scheduled_s
        was_full = self._semaphore.locked()
        await self._semaphore.acquire()
        if was_full:
            self._opened_s = self._clock()
        return max(scheduled_s, self._opened_s)

    def leave(self) -> None:
        """Give the slot to the next one."""
        if self._semaphore is not None:
            self._semaphore.release()


def _by_user(requests: Sequence[Request]) -> tuple[list[int], list[list[int]]]:
    """Split into the open loop, in order of arrival, and one list of turns a closed-loop user: indices of requests."""
    open_loop: list[int] = []
    users: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        (open_loop if request.user is None else users.setdefault(request.user, [])).append(index)
    return sorted(open_loop, key=lambda index: requests[index].arrival_s), list(users.values())


def _shortfall(request: Request, sent: _Sent) -> str | None:
    """Why a stream that ended by itself is not a whole answer, or `None`. The engine was asked for an exact number."""
    tokens = len(sent.token_times_s)
    if sent.last is None:
        return f"the stream ended without a finish reason after {tokens} of {request.output_tokens} tokens"
    if tokens != request.output_tokens:
        return f"{tokens} of {request.output_tokens} tokens arrived (finish reason {sent.last.finish_reason!r})"
    return None


async def _end_when_set(stop: asyncio.Event) -> None:
    await stop.wait()
    raise _EndLoad


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Keep the garbage collector's full passes off everything that was there before.

    One such pass over what vLLM's front end imports (0.7 million objects) takes 0.38 s on the CPU that this was written
    on, and stops every stream at once; over a frozen heap it takes microseconds. The collector itself stays on, so that
    a front end in the same process cannot pile up garbage. A heap that the caller froze is the caller's to unfreeze.
    """
    if gc.get_freeze_count() > 0:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
