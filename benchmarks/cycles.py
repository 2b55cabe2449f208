"""Does anything stay behind when engines come and go? N starts and stops of vLLM's CPU engine in one actor.

Every cycle starts an engine, runs three requests and stops it, through `RayTrialEngine` as a study does. Counted after
each stop: what the actor's process and everything below it holds (children, listening ports, temporary files), the
shared-memory segments of this user, and the resident memory of the actor. The first cycle imports vLLM, so that memory
is held against the state after it; everything else against the state before it.

    PYTHONPATH=. python benchmarks/cycles.py [--cycles 20] [--markdown]

Exit status 1 when something is left or the memory moves by more than 5%.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from objectives.measurement import Failure
from tuner.config import EngineConfig
from tuner.engine.cluster import Wanted
from tuner.engine.processes import ProcessIdentity, ResourceSnapshot
from tuner.engine.protocol import MeasurePlan
from tuner.engine.ray_pool import RayEnginePool
from tuner.workload.model import Request, Workload

MODEL = Path(__file__).parents[1] / "models" / "smollm2-135m-instruct"
CONFIG = EngineConfig(
    {
        "model": str(MODEL),
        "max_model_len": 128,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 2**25,
    },
    {"HF_HUB_OFFLINE": "1"},
)
WORKLOAD = Workload("tiny", tuple(Request(0.0, tuple(range(100 + i, 132 + i)), 4) for i in range(3)), (100, 49_000), 0)
STEADY = 0.05


@dataclass(frozen=True)
class State:
    """What is there after a number of cycles: counts, GiB of the actor's process; and what the last cycle took."""

    cycle: int
    children: int
    segments: int
    ports: int
    temp_files: int
    rss_gib: float
    start_s: float = 0.0
    stop_s: float = 0.0

    @property
    def counts(self) -> tuple[int, ...]:
        """Everything that must be what it was."""
        return self.children, self.segments, self.ports, self.temp_files


class Watch:
    """Finds the engine's actor among the processes that the engine names, and counts what it holds."""

    def __init__(self, temp: Path) -> None:
        self._temp = temp
        self.actor: ProcessIdentity | None = None

    def note(self, processes: list[ProcessIdentity]) -> None:
        """Take the actor out of the engine's processes."""
        if self.actor is None or not self.actor.is_alive():
            self.actor = next((p for p in processes if _name(p).startswith("ray::EngineHost")), None)

    def state(self, cycle: int, start_s: float = 0.0, stop_s: float = 0.0) -> State:
        """Count."""
        assert self.actor is not None, "the engine has named its actor by now"
        held = ResourceSnapshot.take(self.actor.pid, {})
        assert held.rss_gib is not None, "the actor lives through all cycles"
        files = [p for p in self._temp.rglob("*") if not p.is_relative_to(self._temp / "ray") and not p.is_dir()]
        sizes = len(held.processes), len(held.shared_memory), len(held.ports), len(files)
        return State(cycle, *sizes, held.rss_gib, start_s, stop_s)


def _name(identity: ProcessIdentity) -> str:
    process = identity.process()
    try:
        return process.name() if process is not None else ""
    except psutil.Error:
        return ""


def measure_cycles(cycles: int, temp: Path) -> list[State]:
    """Run the cycles in an actor of their own and return the state before the first and after each."""
    watch = Watch(temp)
    pool = RayEnginePool(engines=1, wanted=Wanted(gpus=0), note_processes=watch.note)
    engine = pool.first()
    try:
        states: list[State] = []

        def before_first(_: str) -> None:
            if not states and watch.actor is not None:
                states.append(watch.state(0))

        for cycle in range(1, cycles + 1):
            plan = MeasurePlan(salt=cycle, speed_probe=False, log_path=temp.parent / "engine.log")
            began_s = time.monotonic()
            outcome = engine.run(CONFIG, WORKLOAD, plan, before_first)
            if isinstance(outcome, Failure):
                raise RuntimeError(f"cycle {cycle}: {outcome.kind} at {outcome.stage}: {outcome.message}")
            states.append(watch.state(cycle, outcome.engine.start_s, outcome.engine.stop_s))
            print(f"{states[-1]}  {time.monotonic() - began_s:.1f} s", file=sys.stderr, flush=True)
        return states
    finally:
        pool.close()


def table(states: list[State], markdown: bool) -> str:
    """Show a row a state."""
    rows = [["after cycle", "children", "segments", "ports", "temporary files", "RSS, GiB", "start, s", "stop, s"]]
    if markdown:
        rows.append(["---:"] * len(rows[0]))
    for s in states:
        times = [f"{s.start_s:.1f}", f"{s.stop_s:.1f}"] if s.cycle else ["", ""]
        rows.append([str(s.cycle), *(str(count) for count in s.counts), f"{s.rss_gib:.3f}", *times])
    if markdown:
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n".join("  ".join(cell.rjust(15) for cell in row) for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        temp = Path(folder) / "t"
        temp.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(temp)
        states = measure_cycles(options.cycles, temp)
    first, warmed = states[0], states[1:]
    moved = max(abs(s.rss_gib / warmed[0].rss_gib - 1) for s in warmed)
    clean = all(s.counts == first.counts for s in warmed)
    print(table(states, options.markdown))
    print(f"\nleft behind: {'nothing' if clean else 'something, see the table'}; RSS of the actor moved {moved:.1%}")
    return 0 if clean and moved <= STEADY else 1


if __name__ == "__main__":
    sys.exit(main())
