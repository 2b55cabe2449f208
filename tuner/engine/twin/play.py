"""`VirtualRun`: one repeat of a workload, played through the scheduler on a clock that the step cost advances.

Mirrors the engine core's loop: take what has arrived, schedule, execute, hand out tokens. A request that arrives
during a step is queued when the step ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from objectives.measurement import Failure, FailureKind, RequestRecord, Stage, StepRecord
from tuner.engine.twin.client import Sent, VirtualClient
from tuner.engine.twin.memory import KvPool
from tuner.engine.twin.steptime import KernelChoice, StepCost
from tuner.engine.twin.vllm_scheduler import Resolved, ScheduledStep, VirtualScheduler
from tuner.workload.model import Request, Workload

_EMPTY_STEPS_ALLOWED = 3
"""A step that only preempts schedules nothing; more than a few in a row mean that nothing ever will be."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A configuration that fits: how it schedules, its KV pool, and what its steps cost."""

    resolved: Resolved
    pool: KvPool
    pool_blocks: int
    kernels: KernelChoice
    cost: StepCost


@dataclass(slots=True)
class _Flight:
    """One request on its way."""

    request: Request
    sent: Sent
    queued_s: float | None = None
    first_scheduled_s: float | None = None
    cached_tokens: int | None = None
    preemptions: int = 0
    error: str | None = None
    token_times_s: list[float] = field(default_factory=list)


class VirtualRun:
    """One run of a workload on a scheduler."""

    def __init__(self, scheduler: VirtualScheduler, prepared: Prepared, workload: Workload, repeat: int) -> None:
        self._scheduler = scheduler
        self._prepared = prepared
        self._workload = workload
        self._repeat = repeat
        self._client = VirtualClient(workload)
        self._flights: dict[str, _Flight] = {}
        self._now_s = 0.0
        self.steps: list[StepRecord] = []

    def play(self, budget_s: float) -> Failure | None:
        """Run to the last token. A `Failure` if the scheduler cannot go on or the budget is spent."""
        empty = 0
        while True:
            for sent in self._client.send(self._now_s):
                self._hand_over(sent)
            next_s = self._client.next_s
            if not self._scheduler.unfinished:
                if next_s is None:
                    return None
                self._now_s = max(self._now_s, next_s)
                continue
            step = self._scheduler.step()
            self._account(step)
            empty = 0 if step.load.prefill_tokens or step.load.decodes else empty + 1
            if empty > _EMPTY_STEPS_ALLOWED:
                if next_s is None:
                    return Failure(
                        FailureKind.HUNG, Stage.RUN, "Predicted: requests wait for KV blocks that never come free."
                    )
                self._now_s, empty = max(self._now_s, next_s), 0
            if self._now_s > budget_s:
                return Failure(
                    FailureKind.HUNG, Stage.RUN, f"Predicted: the run takes longer than its budget of {budget_s:.0f} s."
                )

    @property
    def duration_s(self) -> float:
        """From the first scheduled arrival to the last token."""
        first_s = min((f.sent.scheduled_s for f in self._flights.values()), default=0.0)
        last_s = max((f.token_times_s[-1] for f in self._flights.values() if f.token_times_s), default=first_s)
        return last_s - first_s

    def records(self) -> list[RequestRecord]:
        """One record a request, in the workload's order."""
        return [self._record(name, flight) for name, flight in sorted(self._flights.items(), key=_workload_order)]

    def _hand_over(self, sent: Sent) -> None:
        request = self._workload.requests[sent.index]
        name = f"{self._repeat}-{sent.index}"
        flight = _Flight(request, sent)
        self._flights[name] = flight
        resolved = self._prepared.resolved
        limit = resolved.max_model_len
        if request.prompt_tokens >= limit:
            flight.error = f"prompt of {request.prompt_tokens} tokens does not fit max_model_len {limit}"
            self._client.ended(request, self._now_s)
            return
        flight.queued_s = self._now_s
        blocks = shared_blocks(request, resolved.block_tokens) if resolved.prefix_caching else ()
        self._scheduler.add(name, request.prompt_tokens, request.output_tokens, self._now_s, blocks)

    def _account(self, step: ScheduledStep) -> None:
        start_s = self._now_s
        busy = step.load.prefill_tokens or step.load.decodes
        duration_s = self._prepared.cost(step.load) if busy else 0.0
        end_s = start_s + duration_s
        self._now_s = end_s
        flights = self._flights
        hits = queries = 0
        for name, cached in step.started:
            flight = flights[name]
            flight.first_scheduled_s = start_s
            flight.cached_tokens = cached
            queries += flight.request.prompt_tokens if self._prepared.resolved.prefix_caching else 0
            hits += cached
        for name in step.preempted:
            flights[name].preemptions += 1
        for name in step.emitted:
            flights[name].token_times_s.append(end_s)
        for name in step.finished:
            self._client.ended(flights[name].request, end_s)
        if busy or step.preempted:
            self.steps.append(
                StepRecord(
                    start_s,
                    duration_s,
                    step.prompt_tokens,
                    step.load.prefill_tokens + step.load.decodes - step.prompt_tokens,
                    step.running,
                    step.waiting,
                    step.kv_usage,
                    len(step.preempted),
                    queries,
                    hits,
                    self._repeat,
                )
            )

    def _record(self, name: str, flight: _Flight) -> RequestRecord:
        times = tuple(flight.token_times_s)
        asked = flight.request.output_tokens
        error = flight.error or (f"{len(times)} of {asked} tokens arrived" if len(times) != asked else None)
        return RequestRecord(
            request_id=name,
            prompt_tokens=flight.request.prompt_tokens,
            output_tokens=len(times),
            scheduled_s=flight.sent.scheduled_s,
            sent_s=flight.sent.sent_s,
            queued_s=flight.queued_s,
            first_scheduled_s=flight.first_scheduled_s,
            first_token_s=times[0] if times else None,
            last_token_s=times[-1] if times else None,
            cached_tokens=flight.cached_tokens,
            finish_reason=None if flight.error else "length",
            error=error,
            preemptions=flight.preemptions,
            token_times_s=times,
            repeat=self._repeat,
        )


def _workload_order(item: tuple[str, _Flight]) -> int:
    return item[1].sent.index


def shared_blocks(request: Request, block_tokens: int) -> list[bytes]:
    """Identities of the leading blocks that lie wholly in the shared prefix: equal for equal tokens so far."""
    identity = 0
    blocks = []
    for end in range(block_tokens, request.shared_tokens + 1, block_tokens):
        identity = hash((identity, request.prompt_token_ids[end - block_tokens : end]))
        blocks.append(b"shared:" + identity.to_bytes(8, "big", signed=True))
    return blocks
