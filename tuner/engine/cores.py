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


def bind_engine(index: int, of: int) -> None:
    """Bind this process to its share, and tell vLLM's CPU build what it does not find out by itself.

    It looks for cores on the first memory node only, and keeps one core free for its scheduler: of a share of one core
    nothing would be left to compute with (both in `vllm/utils/ompmultiprocessing.py` of 0.32).
    """
    mine = take_share(index, of)
    if nodes := sorted({int(n.name.removeprefix("node")) for core in mine for n in _cpu(core).glob("node[0-9]*")}):
        os.environ.setdefault("CPU_VISIBLE_MEMORY_NODES", ",".join(map(str, nodes)))
    if len(mine) == 1:
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")


def _cpu(core: int) -> Path:
    return TOPOLOGY / f"cpu{core}"


def _position(core: int) -> tuple[int, int, int]:
    """Order cores by socket and physical core, so that the two threads of one stay together."""
    topology = _cpu(core) / "topology"

    def number(name: str) -> int:
        try:
            return int((topology / name).read_text())
        except (OSError, ValueError):
            return core

    return number("physical_package_id"), number("core_id"), core
