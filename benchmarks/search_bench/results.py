"""Finished runs as data, and what is read off them: hypervolume by trial, trials and hours to a share of the best."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from objectives.pareto import hypervolume
from search_bench.play import Run
from search_bench.problem import Problem, front_of

Array = NDArray[np.float64]
DATA = Path(__file__).parents[1] / "data" / "search"
ROOT = Path(__file__).parents[2]
DRAWS = 2000
FIRST = 5
"""Trials after which proposals should fit."""


def runs_of(problem: Problem) -> list[Run]:
    """Return every finished run on a problem as it is now; of runs that were made again, the last."""
    path = DATA / f"runs-{problem.name}.jsonl"
    if not path.exists():
        return []
    runs = [Run(**json.loads(line)) for line in path.read_text().splitlines()]
    runs = [run for run in runs if run.version.endswith(f"-{problem.version}")]
    return list({(r.searcher, r.seed, r.actors, len(r.values)): r for r in runs}.values())


def tidy(problem: Problem) -> None:
    """Forget runs that were made again or are of another problem; while nothing else runs."""
    path = DATA / f"runs-{problem.name}.jsonl"
    lines = [json.dumps(run.document(), separators=(",", ":")) for run in runs_of(problem)]
    path.write_text("".join(line + "\n" for line in lines))


def keep(run: Run) -> None:
    """Append a finished run."""
    path = DATA / f"runs-{run.problem}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(run.document(), separators=(",", ":")) + "\n")


def code_version(paths: Iterable[Path]) -> str:
    """Return 8 hex digits over what some modules do: their text without comments, docstrings and layout."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [s for s in body if not _is_text(s)] or [ast.Pass()]  # type: ignore[attr-defined]
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()[:8]


def _is_text(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


@lru_cache(maxsize=8)
def best_known(problem: Problem) -> tuple[float, int, int]:
    """Hypervolume of the best known front, over logarithms, from the problem's corner; members of the front, points."""
    points = problem.known_points()
    members = np.log(np.array([points[i] for i in front_of(points)]))
    return hypervolume(members, np.log(np.array(problem.corner()))), len(members), len(points)


def few_of_the_best(problem: Problem, count: int) -> float:
    """Share of the best known hypervolume that so many of its members make, each the one that adds most."""
    points = problem.known_points()
    members = np.log(np.array([points[i] for i in front_of(points)]))
    corner = np.log(np.array(problem.corner()))
    chosen = np.empty((0, 2))
    for _ in range(min(count, len(members))):
        gains = [hypervolume(np.vstack([chosen, m]), corner) for m in members]
        chosen = np.vstack([chosen, members[int(np.argmax(gains))]])
    return float(hypervolume(chosen, corner) / best_known(problem)[0])


def curve(run: Run, problem: Problem) -> Array:
    """Share of the best known hypervolume after each trial."""
    shares = np.zeros(len(run.values))
    known = np.empty((0, 2))
    corner = np.log(np.array(problem.corner()))
    for index, values in enumerate(run.values):
        if values is not None:
            point = np.log(np.array(values))
            if (point < corner).all() and not ((known <= point).all(axis=1)).any():
                known = np.vstack([known[~(known >= point).all(axis=1)], point])
        shares[index] = hypervolume(known, corner) if len(known) else 0.0
    return shares / best_known(problem)[0]


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean over seeds and its 95% interval by bootstrap."""
    sample = np.array(values)
    draws = np.random.default_rng(0).choice(sample, size=(DRAWS, len(sample))).mean(axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(sample.mean()), float(low), float(high)


def trials_to(shares: Array, goal: float) -> float:
    """Trials until a share is reached; infinite where it was not."""
    reached = np.flatnonzero(shares >= goal)
    return float(reached[0] + 1) if len(reached) else float("inf")


def hours_to(run: Run, shares: Array, goal: float) -> float:
    """Hours until a share is reached, starts included."""
    trials = trials_to(shares, goal)
    return run.finished_s[int(trials) - 1] / 3600 if np.isfinite(trials) else float("inf")


def infeasible_share(runs: Sequence[Run]) -> float:
    """Share of trials after the first few that did not start."""
    later: list[Any] = [v for r in runs for v in r.values[FIRST:]]
    return sum(v is None for v in later) / max(1, len(later))
