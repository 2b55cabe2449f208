"""Tracking beside a running study: a thread that syncs whenever it is woken, and that nothing ever waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from tuner.errors import StoreError
from tuner.ledger import History
from tuner.tracking.tracker import Tracker

FIRST_RETRY_S, LONGEST_RETRY_S = 5.0, 120.0
REST = 4.0
"""After a sync it rests so many times as long as that took: the driver of 64 engines has better uses for its core."""


class BackgroundTracker:
    """Keeps MLflow up to date behind a study.

    Parameters
    ----------
    read:
        Returns the history as it is now; called on the thread, so it reads the ledger from disk.
    tell:
        Called on the thread with one sentence when MLflow stops taking runs, and when it takes them again.
    """

    def __init__(
        self,
        tracker: Tracker,
        read: Callable[[], History],
        folder: Path,
        tell: Callable[[str], None],
        *,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        self._tracker = tracker
        self._read = read
        self._folder = folder
        self._tell = tell
        self._first_retry_s = first_retry_s
        self._retry_s: float | None = None
        self._woken = threading.Event()
        self._closing = threading.Event()
        self._done = threading.Event()
        self._up_to_date = False
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Say that the ledger has something new. Returns at once."""
        self._woken.set()

    def close(self, timeout_s: float = 60.0) -> bool:
        """Sync once more with final figures and end the thread; whether MLflow has everything after `timeout_s`.

        When it has not, the thread is left to die with the process: the ledger has it all.
        """
        self._closing.set()
        self._woken.set()
        self._done.wait(timeout_s)
        return self._done.is_set() and self._up_to_date

    def _work(self) -> None:
        try:
            while not self._closing.is_set():
                if self._retry_s is None:
                    self._woken.wait()
                else:
                    # While MLflow is away, further trials do not shorten the wait.
                    self._closing.wait(self._retry_s)
                if not self._closing.is_set():
                    self._woken.clear()
                    began_s = time.monotonic()
                    self._sync(final=False)
                    if self._retry_s is None:  # while MLflow is away, the wait before the next try is rest enough
                        self._closing.wait(REST * (time.monotonic() - began_s))
            self._sync(final=True)
        finally:
            self._done.set()

    def _sync(self, *, final: bool) -> None:
        started = time.monotonic()
        try:
            self._tracker.sync(self._read(), self._folder, live=not final, final=final)
        except StoreError as error:
            self._failed(str(error))
        except Exception as error:  # noqa: BLE001 - a fault of ours in the tracking must not end the night; it is told
            self._failed(f"tracking failed after {time.monotonic() - started:.0f} s: {type(error).__name__}: {error}")
        else:
            if self._retry_s is not None:
                self._tell("MLflow takes runs again and is up to date.")
            self._retry_s = None
            self._up_to_date = True

    def _failed(self, sentence: str) -> None:
        if self._retry_s is None:
            self._tell(sentence)
        self._up_to_date = False
        self._retry_s = min(LONGEST_RETRY_S, 2 * self._retry_s) if self._retry_s else self._first_retry_s
