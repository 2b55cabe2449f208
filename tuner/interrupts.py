"""Ctrl-C and SIGTERM that cannot be lost.

Python raises an interruption wherever its main thread happens to be. Where that is a finalizer or a callback of a C
library, the exception is printed and dropped, and a study that was told to stop would go on all night.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def remembered() -> Iterator[Callable[[], None]]:
    """Remember that the process was asked to stop; yield what to call between steps: it raises where that was lost.

    Signals still do at once what they did before. Only a process's main thread hears signals: on another thread there
    is nothing to remember, and what is yielded never raises.

    Raises
    ------
    KeyboardInterrupt
        From what is yielded, once SIGINT or SIGTERM came and something dropped what was raised then.
    """
    asked = False
    before: dict[int, Callable[[int, FrameType | None], object]] = {}

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        before[number](number, frame)

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        before = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    for number in before:
        signal.signal(number, note)
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
