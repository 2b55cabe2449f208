"""How many engine starts do not fit, with and without the gate, on the twin of four A6000 and a 32B model.

The problem is (b) of benchmarks/search.py: a third of the space is out of memory, and the engine has less memory for
its KV cache than the memory model says, so that a start may fail that the gate let through. Runs are shared with that
benchmark: what it has run is not run again.

    PYTHONPATH=. python benchmarks/infeasible.py [--seeds 10] [--limit-s 45]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from search import SEEDS, Unit, missing, problem_named, work
from search_bench.play import Run
from search_bench.results import FIRST, runs_of

PROBLEM = "a6000-long"
SEARCHERS = {
    "random": "random",
    "tpe-default": "TPE, Optuna's defaults, OOM as FAIL",
    "tpe-tuned": "TPE with violations",
    "tpe-tuned-gated": "the same, gate in front",
    "tuner-no-gate": "tuner, gate off",
    "tuner": "tuner",
}


def interval(wrong: int, trials: int) -> tuple[float, float]:
    """95% interval of a share (Wilson, Probable inference, 1927)."""
    z, share = 1.96, wrong / trials
    middle = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * (share * (1 - share) / trials + z**2 / (4 * trials**2)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


def row(name: str, runs: Sequence[Run]) -> str:
    first = sum(v is None for r in runs for v in r.values[:FIRST]) / len(runs)
    later = [v is None for r in runs for v in r.values[FIRST:]]
    low, high = interval(sum(later), len(later))
    refused = sum(r.refused for r in runs) / len(runs)
    share = f"{sum(later) / len(later):.1%} ({low:.1%}–{high:.1%})"
    return f"| {SEARCHERS[name]} | {len(runs)} | {first:.1f} | {share} of {len(later)} | {refused:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    arguments = parser.parse_args()
    wanted = [Unit(PROBLEM, name, seed) for name in SEARCHERS for seed in range(arguments.seeds)]
    if todo := missing(wanted):
        work(todo, arguments.limit_s, workers=2)
    runs = [r for r in runs_of(problem_named(PROBLEM)) if r.actors == 1 and r.seed < arguments.seeds]
    print("| search | seeds | did not fit, first 5 | did not fit, after | refused without an engine, a study |")
    print("|---|---|---|---|---|")
    for name in SEARCHERS:
        if mine := [r for r in runs if r.searcher == name]:
            print(row(name, mine))


if __name__ == "__main__":
    main()
