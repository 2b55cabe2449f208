"""The processes of all engines of a pool, read from one look at the process table and noted in one place."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from tuner.engine.processes import ProcessIdentity, descendants, families

LOOK_EVERY_S = 0.5
"""The table is read at most so often, however many engines ask."""


class Families:
    """Knows who belongs to which engine while they can still be found: the dead have no children.

    Parameters
    ----------
    note:
        Called with every process of every engine and of this process, so that a later run can end what a crash leaves.
    """

    def __init__(self, note: Callable[[list[ProcessIdentity]], None]) -> None:
        self._note = note
        self._lock = threading.Lock()
        self._known: dict[ProcessIdentity, list[ProcessIdentity]] = {}
        self._looked_s: float | None = None

    def watch(self, root: ProcessIdentity) -> None:
        """Watch what belongs to an engine's process on this machine."""
        with self._lock:
            self._known[root] = [root]
            self._look()

    def look(self, *, now: bool = False) -> None:
        """Read the table again, unless that was done a moment ago."""
        with self._lock:
            late = self._looked_s is None or time.monotonic() - self._looked_s > LOOK_EVERY_S
            if now or late:
                self._look()

    def _look(self) -> None:
        found = families([root.pid for root in self._known])
        for root, known in self._known.items():
            self._known[root] = [p for p in {root, *known, *found[root.pid]} if p.is_alive()]
        self._note([*(p for known in self._known.values() for p in known), *descendants(os.getpid())])
        self._looked_s = time.monotonic()

    def of(self, root: ProcessIdentity) -> list[ProcessIdentity]:
        """Return what is known to belong to an engine's process."""
        with self._lock:
            return list(self._known.get(root, []))

    def unwatch(self, root: ProcessIdentity) -> None:
        """Forget an engine's process, which has ended."""
        with self._lock:
            self._known.pop(root, None)

    def forget(self) -> None:
        """Note that nothing is left."""
        with self._lock:
            self._known.clear()
            self._note([])
