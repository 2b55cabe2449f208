"""Whether ending hopeless runs early ever loses a member of the front, and what it saves, on recorded runs.

Takes the table of the real CPU engine (data/cpu_table, made by cpu_table.py): its runs are taken in many random orders,
as studies might have; each is held, request by request, against the front of those before it, exactly as a running
engine's would be. A run that is ended early is no member of the front from then on. Two engine starts differ by noise,
which the recorded runs have in them.

    PYTHONPATH=. python benchmarks/early_end.py [--orders 500]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

from cpu_table import DATA, figures

from objectives.early_end import MARGIN, bar
from objectives.measurement import RequestRecord
from objectives.pareto import front
from tuner.artifacts import load
from tuner.engine.race import Race

NAMES = ("ttft_p95_s", "tpot_p95_s")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One measured configuration; `others_s` is what its trial took besides the run."""

    values: tuple[float, float]
    requests: tuple[RequestRecord, ...]
    run_s: float
    others_s: float


def recorded(workload: str) -> list[Recorded]:
    """Every configuration that was measured, its requests in the order in which they were over."""
    found = []
    for folder in sorted((DATA / workload).iterdir()):
        if "-again" in folder.name:
            continue
        measured = load(folder)
        facts = measured.engine
        found.append(
            Recorded(
                figures(measured),
                tuple(sorted(measured.requests, key=lambda r: r.last_token_s or 0.0)),
                sum(measured.duration_s),
                facts.start_s + facts.warmup_s + facts.stop_s,
            )
        )
    return found


def ended_at_s(run: Recorded, members: Sequence[tuple[int, tuple[float, float]]]) -> float | None:
    """Seconds into the run after which it is ended, `None` when it goes on to its end."""
    bars = [bar(number, dict(zip(NAMES, values, strict=True)), {}) for number, values in members]
    race = Race(bars, len(run.requests))
    for record in run.requests:
        if race.is_lost_after(record):
            return record.last_token_s
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orders", type=int, default=500)
    options = parser.parse_args()
    print(f"margin {MARGIN:.0%}; {options.orders} orders")
    print("workload     runs  on the front  ended early  members lost  saved of the runs  saved of the trials")
    for workload in sorted(p.name for p in DATA.iterdir() if p.is_dir()):
        runs = recorded(workload)
        best = set(front([r.values for r in runs]))
        ended, lost, saved_s, spent_s, all_s = 0, 0, 0.0, 0.0, 0.0
        for seed in range(options.orders):
            order = list(range(len(runs)))
            random.Random(seed).shuffle(order)
            members: list[tuple[int, tuple[float, float]]] = []
            for number in order:
                run = runs[number]
                at_s = ended_at_s(run, members)
                spent_s += run.run_s
                all_s += run.run_s + run.others_s
                if at_s is not None:
                    ended += 1
                    lost += number in best
                    saved_s += run.run_s - at_s
                    continue
                members.append((number, run.values))
                members = [members[i] for i in front([values for _, values in members])]
        share = ended / options.orders / len(runs)
        print(
            f"{workload:12} {len(runs):4}  {len(best):12}  {share:11.0%}  {lost:12}  {saved_s / spent_s:17.0%}  "
            f"{saved_s / all_s:19.0%}"
        )


if __name__ == "__main__":
    main()
