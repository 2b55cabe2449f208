"""A `TokenSource` that follows a script, and an event loop whose time jumps instead of passing.

Together they make every time in a test of the load driver exact and every test instantaneous.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tuner.engine.protocol import TokenDelta
from tuner.workload.model import Request, Workload

T = TypeVar("T")


@dataclass(frozen=True)
class Event:
    """After `wait_s`, one delta or one exception."""

    wait_s: float
    what: TokenDelta | BaseException


Script = Callable[[Request, int], Sequence[Event]]
"""Request and its place in the workload -> what the engine does for it."""


def tokens(count: int, gap_s: float, first_s: float | None = None) -> list[Event]:
    """`count` single tokens, the last of them with a finish reason."""
    waits = [gap_s if first_s is None else first_s] + [gap_s] * (count - 1)
    return [
        Event(wait, TokenDelta(1, finish_reason="length" if i == count - 1 else None)) for i, wait in enumerate(waits)
    ]


@dataclass
class ScriptedSource:
    """Plays a script for each request and remembers when each came and how each ended."""

    script: Script | Mapping[int, Sequence[Event]]
    abort_s: float = 0.0
    abort_error: Exception | None = None
    sent_s: dict[int, float] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    in_flight: int = 0
    most_in_flight: int = 0

    async def generate(self, request: Request, request_id: str) -> AsyncIterator[TokenDelta]:
        loop = asyncio.get_running_loop()
        index = int(request_id.rpartition("-")[2])
        self.sent_s[index] = loop.time()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            for event in self.script[index] if isinstance(self.script, Mapping) else self.script(request, index):
                await asyncio.sleep(event.wait_s)
                if isinstance(event.what, BaseException):
                    self.ended[index] = "raised"
                    raise event.what
                yield event.what
            self.ended[index] = "finished"
        except (asyncio.CancelledError, GeneratorExit):
            self.ended[index] = "aborted"
            await asyncio.sleep(self.abort_s)
            if self.abort_error is not None:
                raise self.abort_error from None
            raise
        finally:
            self.in_flight -= 1


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no time: its clock jumps to the next timer."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now_s


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError("every task waits for something that no timer will bring")
        self._loop.now_s += timeout
        return ready


def in_jumping_time(main: Callable[[Callable[[], float]], Coroutine[Any, Any, T]]) -> T:
    """Run `main(clock)`; fails when it leaves a task behind."""

    async def watched() -> T:
        result = await main(asyncio.get_running_loop().time)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left behind: {left}"
        return result

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(watched())


def workload(*requests: Request, max_concurrency: int | None = None) -> Workload:
    return Workload("scripted", requests, vocabulary=(10, 20), seed=0, max_concurrency=max_concurrency)


def ask(arrival_s: float = 0.0, output_tokens: int = 3, user: int | None = None, think_s: float = 0.0) -> Request:
    return Request(arrival_s, (11, 12, 13), output_tokens, user=user, think_s=think_s)
