"""One run: a searcher on a problem with a seed, by one actor or several at once, on a virtual clock."""

from __future__ import annotations

import heapq
import time
from dataclasses import asdict, dataclass
from typing import Any

from search_bench.problem import Problem, Truth, measured
from search_bench.searchers import Outcome, Searcher, Suggestion


@dataclass(frozen=True, slots=True)
class Run:
    """What happened, a list entry a trial, in the order in which trials ended.

    Parameters
    ----------
    values:
        Noise-free objectives in seconds; `None` where it did not start.
    finished_s:
        Virtual time of the end, with starts; proposing is taken to be hidden behind what runs.
    propose_s:
        Real seconds of each proposal, refusals on the way included.
    refused:
        Proposals that a gate turned away.
    """

    problem: str
    searcher: str
    seed: int
    actors: int
    version: str
    values: list[list[float] | None]
    finished_s: list[float]
    propose_s: list[float]
    sources: list[str]
    refused: int

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def play(problem: Problem, name: str, searcher: Searcher, *, version: str, seed: int, trials: int, actors: int) -> Run:
    """Run so many trials; a new one is proposed whenever an actor is free, whatever still runs."""
    now_s = 0.0
    running: list[tuple[float, int, Suggestion, Truth]] = []
    run = Run(problem.name, name, seed, actors, version, [], [], [], [], 0)
    asked = 0
    while len(run.values) < trials:
        while len(running) < actors and asked < trials:
            began_s = time.perf_counter()
            suggestion = searcher.ask()
            run.propose_s.append(round(time.perf_counter() - began_s, 4))
            truth = problem.truth(suggestion.changes)
            problem.note(suggestion.changes)
            heapq.heappush(running, (now_s + truth.engine_s, asked, suggestion, truth))
            asked += 1
        now_s, _, suggestion, truth = heapq.heappop(running)
        noisy = measured(problem, truth, suggestion.changes, seed)
        searcher.tell(suggestion, Outcome(noisy, truth.violation, truth))
        run.values.append(None if truth.values is None else [float(f"{v:.5g}") for v in truth.values])
        run.finished_s.append(round(now_s, 1))
        run.sources.append(suggestion.source)
    return Run(**{**run.document(), "refused": searcher.refused})
