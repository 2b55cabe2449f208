"""The load driver on a virtual clock: when each request of a workload is due and handed to the engine.

Open loop: at its scheduled arrival. Closed loop: after the same user's previous request has ended and the think time
has passed. A concurrency cap holds requests back in order; their scheduled arrival stays, so that the wait counts.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass

from tuner.workload.model import Request, Workload


@dataclass(frozen=True, slots=True)
class Sent:
    """A request handed to the engine: its position in the workload, and when it was due and sent."""

    index: int
    scheduled_s: float
    sent_s: float


class VirtualClient:
    """Hands out the requests of one repeat of a workload."""

    def __init__(self, workload: Workload) -> None:
        self._requests = workload.requests
        self._cap = workload.max_concurrency
        self._in_engine = 0
        self._free_since_s = 0.0
        self._due: list[tuple[float, int]] = []
        self._turns: dict[int, deque[int]] = defaultdict(deque)
        for index, request in enumerate(self._requests):
            if request.user is None:
                self._due.append((request.arrival_s, index))
            else:
                self._turns[request.user].append(index)
        for turns in self._turns.values():
            first = turns.popleft()
            self._due.append((self._requests[first].arrival_s, first))
        heapq.heapify(self._due)

    @property
    def next_s(self) -> float | None:
        """When the next request can be sent, as far as it is known now."""
        if not self._due or self._full:
            return None
        return max(self._due[0][0], self._free_since_s)

    def send(self, now_s: float) -> list[Sent]:
        """Take the requests that are due by now, as far as the cap lets them."""
        sent: list[Sent] = []
        while self._due and not self._full and self._due[0][0] <= now_s:
            scheduled_s, index = heapq.heappop(self._due)
            self._in_engine += 1
            sent.append(Sent(index, scheduled_s, max(scheduled_s, self._free_since_s)))
        return sent

    def ended(self, request: Request, now_s: float) -> None:
        """Say that a request has got its last token or was refused."""
        if self._full:
            self._free_since_s = now_s
        self._in_engine -= 1
        turns = self._turns.get(request.user) if request.user is not None else None
        if turns:
            following = turns.popleft()
            due_s = max(self._requests[following].arrival_s, now_s + self._requests[following].think_s)
            heapq.heappush(self._due, (due_s, following))

    @property
    def _full(self) -> bool:
        return self._cap is not None and self._in_engine >= self._cap
