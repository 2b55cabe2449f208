"""When `search.stop_when_gain_below` would end a search, and how good the front is then.

    PYTHONPATH=. python benchmarks/search_end.py [--problem cpu-table] [--seeds 6] [--trials 40]

Problems of benchmarks/search.py, whole runs: each choice says by how much it was expected to grow the front, and how
much noise alone changes it. For each limit the first trial after which three choices in a row were below it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from search import PROBLEMS, problem_named
from search_bench.ours import PARTS, Tuner
from search_bench.play import play
from search_bench.problem import Problem
from search_bench.results import curve
from search_bench.searchers import Suggestion

from tuner.chooser import GAIN, NOISE, PATIENCE


class Numbered(Tuner):
    """The tuner, which remembers what number each trial has in Optuna's store, where a choice's promise is kept."""

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__(problem, seed, PARTS["tuner"])
        self.numbers: list[int] = []

    def ask(self) -> Suggestion:
        """Return the next proposal that needs an engine."""
        suggestion = super().ask()
        self.numbers.append(suggestion.number)
        return suggestion

    def promises(self) -> list[tuple[float, float] | None]:
        """Return gain and noise of each trial, `None` where nobody chose it."""
        stored = self._proposer._study.get_trials(deepcopy=False)
        said = [stored[number].user_attrs for number in self.numbers]
        return [(s[GAIN], s[NOISE]) if GAIN in s else None for s in said]


LIMITS: tuple[float | str, ...] = ("noise", 0.01, 0.004)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", choices=list(PROBLEMS), default="cpu-table")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--trials", type=int, default=40)
    arguments = parser.parse_args()
    problem = problem_named(arguments.problem)
    trials: dict[float | str, list[float]] = {limit: [] for limit in LIMITS}
    at: dict[float | str, list[float]] = {limit: [] for limit in LIMITS}
    for seed in range(arguments.seeds):
        tuner = Numbered(problem, seed)
        run = play(problem, "tuner", tuner, version="", seed=seed, trials=arguments.trials, actors=1)
        shares, promises = curve(run, problem), tuner.promises()
        for limit in LIMITS:
            ended = ended_after(promises, limit)
            trials[limit].append(float("inf") if ended is None else ended)
            at[limit].append(float(shares[(ended or len(shares)) - 1]))
        at.setdefault("never", []).append(float(shares[-1]))
    for limit in LIMITS:
        after, share = trials[limit], at[limit]
        print(
            f"{arguments.problem} {limit}: ends after {min(after):.0f} to {max(after):.0f} trials (median "
            f"{np.median(after):.0f}) with {min(share):.2f} to {max(share):.2f} of the best known (mean "
            f"{np.mean(share):.2f}; after {arguments.trials} trials {np.mean(at['never']):.2f})"
        )


def ended_after(promises: Sequence[tuple[float, float] | None], limit: float | str) -> int | None:
    """Return the number of trials after which a search with this limit is over; `None` where it is not.

    Parameters
    ----------
    promises:
        Of each trial: expected gain, and what noise alone does; `None` where the search did not choose it.
    """
    in_a_row = 0
    for number, promise in enumerate(promises):
        if promise is None:
            continue
        gain, noise = promise
        in_a_row = in_a_row + 1 if gain < (noise if isinstance(limit, str) else limit) else 0
        if in_a_row == PATIENCE:
            return number + 1
    return None


if __name__ == "__main__":
    main()
