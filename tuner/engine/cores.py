"""Cores for engines that share a machine: each gets some of its own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")
THREADS = Path("/proc/self/task")


def take_share(index: int, of: int) -> frozenset[int]:
    """Bind this process, and all that it will start, to its share of the cores, and return them.

    vLLM's CPU build binds its threads to the cores that its process may use. Linux only; elsewhere nothing is bound.
    """
    if not hasattr(os, "sched_setaffinity"):
        return frozenset()
    mine = share(sorted(os.sched_getaffinity(0), key=_position), index, of)
    for thread in THREADS.iterdir():  # a thread hands its cores on to what it starts, each has its own
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), mine)
    return mine


def share(cores: list[int], index: int, of: int) -> frozenset[int]:
    """Return part `index` of `of` parts of some cores in order; parts differ by one core at most.

    Raises
    ------
    ValueError
        When there are fewer cores than parts.
    """
    if len(cores) < of:
        raise ValueError(f"{len(cores)} cores cannot be dealt out to {of} engines")
    low, high = index * len(cores) // of, (index + 1) * len(cores) // of
    return frozenset(cores[low:high])


def _position(core: int) -> tuple[int, int, int]:
    """Order cores by socket and physical core, so that the two threads of one stay together."""
    topology = TOPOLOGY / f"cpu{core}" / "topology"

    def number(name: str) -> int:
        try:
            return int((topology / name).read_text())
        except (OSError, ValueError):
            return core

    return number("physical_package_id"), number("core_id"), core
