"""When `search.stop_when_gain_below` would end a search, and how good the front is then.

    PYTHONPATH=. python benchmarks/search_end.py [--problem cpu-table] [--seeds 6] [--trials 40]

Problems of benchmarks/search.py, whole runs: each choice says by how much it was expected to grow the front, and how
much noise alone changes it. For each limit the first trial after which three choices in a row were below it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from search import PROBLEMS, problem_named
from search_bench.ours import PARTS, Tuner
from search_bench.play import play
from search_bench.results import curve

from tuner.chooser import GAIN, NOISE, PATIENCE

LIMITS: tuple[float | str, ...] = ("noise", 0.01, 0.004)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", choices=list(PROBLEMS), default="cpu-table")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--trials", type=int, default=40)
    arguments = parser.parse_args()
    problem = problem_named(arguments.problem)
    ends: dict[float | str, list[tuple[int, float]]] = {limit: [] for limit in LIMITS}
    whole = []
    for seed in range(arguments.seeds):
        tuner = Tuner(problem, seed, PARTS["tuner"])
        run = play(problem, "tuner", tuner, version="", seed=seed, trials=arguments.trials, actors=1)
        shares = curve(run, problem)
        whole.append(float(shares[-1]))
        # What a choice promises is kept with its trial in Optuna's store, which the searcher has for itself.
        told = [t.user_attrs for t in tuner._proposer._study.get_trials(deepcopy=False)]
        for limit in LIMITS:
            if (trials := ended_after(told, limit)) is not None:
                ends[limit].append((trials, float(shares[min(trials, len(shares)) - 1])))
    for limit, found in ends.items():
        trials, at = (np.array([end[i] for end in found]) for i in (0, 1))
        print(
            f"{arguments.problem} {limit}: {len(found)} of {arguments.seeds} end after {trials.min():.0f} to "
            f"{trials.max():.0f} trials (median {np.median(trials):.0f}) with {at.min():.2f} to {at.max():.2f} of "
            f"the best known (mean {at.mean():.2f}; after {arguments.trials} trials {np.mean(whole):.2f})"
            if found
            else f"{arguments.problem} {limit}: none ends"
        )


def ended_after(told: Sequence[dict[str, Any]], limit: float | str) -> int | None:
    """Return the number of trials after which a search with this limit is over; `None` where it is not."""
    chosen = [(number, said) for number, said in enumerate(told) if GAIN in said]
    below = [said[GAIN] < (said[NOISE] if limit == "noise" else limit) for _, said in chosen]
    for last in range(PATIENCE - 1, len(chosen)):
        if all(below[last - PATIENCE + 1 : last + 1]):
            return chosen[last][0] + 1
    return None


if __name__ == "__main__":
    main()
