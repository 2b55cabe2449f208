"""How long a study waits for its next proposal, with the twin asked while a trial runs.

    PYTHONPATH=. python benchmarks/propose.py [--after 90] [--trials 11] [--trial-s 60] [--seed 100]

Problem (b) of benchmarks/search.py, with a seed of its own, so that the twin is asked what no other run asked. The
first trials take no time; then each takes `--trial-s` on the clock on the wall, an eighth of what a trial of it takes,
in which what the next proposal needs is predicted in the background. Optuna's storage is a database, as in a study.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from search_bench.ours import PARTS, Tuner
from search_bench.problem import measured
from search_bench.searchers import Outcome
from search_bench.twin_problems import long_documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--after", type=int, default=90)
    parser.add_argument("--trials", type=int, default=11)
    parser.add_argument("--trial-s", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=100)
    arguments = parser.parse_args()
    problem = long_documents()
    tuner = Tuner(problem, arguments.seed, PARTS["tuner"], on_disk=True, ahead=True)
    tuner.rest(now=True)
    waited: list[float] = []
    for number in range(arguments.after + arguments.trials):
        began_s = time.monotonic()
        suggestion = tuner.ask()
        if number > arguments.after:  # what the one before needs was not predicted while a trial ran
            waited.append(time.monotonic() - began_s)
            print(f"trial {number}: {waited[-1]:.2f} s", flush=True)
        if number >= arguments.after:
            tuner.rest(now=False)
            time.sleep(arguments.trial_s)
        truth = problem.truth(suggestion.changes)
        values = measured(problem, truth, suggestion.changes, arguments.seed)
        tuner.tell(suggestion, Outcome(values, truth.violation, truth))
    print(f"{len(waited)} proposals: median {np.median(waited):.2f} s, at most {max(waited):.2f} s")


if __name__ == "__main__":
    main()
