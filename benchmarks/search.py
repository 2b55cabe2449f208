"""How good the search is: hypervolume relative to the best known, against other searchers, on four problems.

    PYTHONPATH=. python benchmarks/search.py [--limit-s 45] [--workers 2]    run what is missing, as far as time allows
    PYTHONPATH=. python benchmarks/search.py --show                          the tables, and figures/search.png
    PYTHONPATH=. python benchmarks/search.py --todo                          what is missing
    PYTHONPATH=. python benchmarks/search.py --table                         take what benchmarks/cpu_table.py measured
    PYTHONPATH=. python benchmarks/search.py --widen 45                      look for a better best known

Each (problem, searcher, seed, actors) is one unit, kept under data/search/ when it is finished; a unit whose searcher
or problem has changed since is run again. `--problem`, `--searcher`, `--seeds`, `--actors` and `--trials` choose units.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from search_bench import play, results, searchers, twin_problems
from search_bench.ours import PARTS, Tuner
from search_bench.problem import Problem
from search_bench.report import figure, tables
from search_bench.searchers import MANNERS, Gated, OptunaSearcher, Searcher
from search_bench.synthetic import Synthetic
from search_bench.table import Table, make_table
from search_bench.table_snapshot import SNAPSHOT
from search_bench.twin_problems import long_documents, shared_prefixes

FIGURE = Path(__file__).parent / "figures" / "search.png"
SEEDS = 10
TRIALS = 40
PROBLEMS: dict[str, Callable[[], Problem]] = {
    "cpu-table": Table,
    "a6000-long": long_documents,
    "a6000-shared": shared_prefixes,
    "synthetic": Synthetic,
}
BLIND = ("synthetic",)
"""Problems without knowledge, where a gate or twin changes nothing."""
LISTED: dict[str, Callable[[Problem, int], Searcher]] = {
    "random": searchers.random_search,
    "sobol": searchers.sobol,
    "grid": searchers.grid,
}
ORDER = (
    "tuner", "tuner-no-twin", "random", "sobol", "grid", "tpe-tuned", "tpe-default", "nsga2", "tpe-tuned-gated",
    "sobol-gated", "random-gated", "tuner-no-gate", "tuner-alone", "tuner-no-recipes", "tuner-no-design",
    "tuner-no-ordinal", "tuner-no-log", "tuner-no-twin-no-recipes", "tuner-no-twin-no-design",
    "gp-optuna", "gp-optuna-gated",
)  # fmt: skip
ALIKE = {
    "tuner-no-twin", "tuner-no-gate", "tuner-no-recipes", "tuner-no-twin-no-recipes", "tuner-no-twin-no-design",
    "tuner-alone",
}  # fmt: skip
"""The same as `tuner` where nothing is known."""
IN_PARALLEL = ("tuner", "tpe-tuned-gated", "tpe-tuned")
ACTORS = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class Unit:
    """One run."""

    problem: str
    searcher: str
    seed: int
    actors: int = 1
    trials: int = TRIALS


@lru_cache(maxsize=8)
def problem_named(name: str) -> Problem:
    """Return a problem, made once."""
    return PROBLEMS[name]()


def searcher_named(name: str, problem: Problem, seed: int, *, on_disk: bool = False) -> Searcher:
    """Make a searcher; on disk to measure the time that its proposals take in a study."""
    if name in PARTS:
        return Tuner(problem, seed, PARTS[name], on_disk=on_disk)
    if name.endswith("-gated"):
        return Gated(problem, searcher_named(name.removesuffix("-gated"), problem, seed))
    return LISTED[name](problem, seed) if name in LISTED else OptunaSearcher(problem, seed, MANNERS[name])


@lru_cache(maxsize=8)
def _code(own: bool, on_table: bool) -> str:
    top = Path(__file__).parents[1]
    bench, tuner = top / "benchmarks" / "search_bench", top / "tuner"
    used = [
        *(bench / name for name in ("play.py", "problem.py", "searchers.py")),
        tuner / "design.py",
        tuner / "gate.py",
    ]
    if on_table:
        used.append(bench / "table.py")
    if own:
        own_code = ("proposer.py", "proposal.py", "chooser.py", "guidance.py", "told.py")
        used += [bench / "ours.py", *(tuner / name for name in own_code), *(tuner / "search").glob("*.py")]
        used.append(top / "objectives" / "pareto.py")
        if on_table:
            used += [bench / "table_twin.py", tuner / "calibration.py", *(tuner / "engine" / "twin").glob("*.py")]
    return results.code_version(used)


def version_of(unit: Unit) -> str:
    """Return what a run's result hangs on: the code of its searcher and of what it is told, and its problem's data."""
    return f"{_code(unit.searcher in PARTS, unit.problem == Table.name)}-{problem_named(unit.problem).version}"


def units(arguments: argparse.Namespace) -> Iterator[Unit]:
    """Return everything that is to be run, what matters most first."""
    for seed, problem in itertools.product(range(arguments.seeds), arguments.problem):
        for searcher in arguments.searcher:
            if problem in BLIND and (searcher in ALIKE or searcher.endswith("-gated")):
                continue
            if problem == "cpu-table" and searcher.endswith("-no-recipes"):
                continue  # it has none
            for actors in arguments.actors:
                if actors == 1 or (searcher in IN_PARALLEL and seed < arguments.seeds):
                    yield Unit(problem, searcher, seed, actors, arguments.trials)


def missing(wanted: Sequence[Unit]) -> list[Unit]:
    """Return units that were not run, or on another version."""
    there = {
        (run.problem, run.searcher, run.seed, run.actors, len(run.values)): run.version
        for name in {u.problem for u in wanted}
        for run in results.runs_of(problem_named(name))
    }
    return [u for u in wanted if there.get((u.problem, u.searcher, u.seed, u.actors, u.trials)) != version_of(u)]


def perform(unit: Unit) -> str:
    """Run a unit and keep it."""
    began_s = time.monotonic()
    problem = problem_named(unit.problem)
    version = version_of(unit)
    run = play.play(
        problem,
        unit.searcher,
        searcher_named(unit.searcher, problem, unit.seed, on_disk=unit.trials > TRIALS),
        version=version,
        seed=unit.seed,
        trials=unit.trials,
        actors=unit.actors,
    )
    results.keep(run)
    took_s = time.monotonic() - began_s
    return f"{unit.problem:13} {unit.searcher:18} seed {unit.seed} × {unit.actors} ({took_s:.1f} s)"


def work(todo: Sequence[Unit], limit_s: float, workers: int) -> None:
    """Run units in processes until none is left or the time is used up; those that were begun are finished."""
    began_s = time.monotonic()
    queue = list(todo)
    with ProcessPoolExecutor(workers) as pool:
        running: set[Future[str]] = set()
        while queue or running:
            while queue and len(running) < workers and time.monotonic() - began_s < limit_s:
                running.add(pool.submit(perform, queue.pop(0)))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                print(future.result(), flush=True)
    print(f"{len(queue)} of {len(todo)} units are left", flush=True)


def widen(names: Sequence[str], limit_s: float) -> None:
    """Look around the best known front for better, so that the best known is not only what searchers found."""
    for name in names:
        problem = problem_named(name)
        if isinstance(problem, twin_problems.TwinProblem):
            print(name, problem.widen(time.monotonic() + limit_s / len(names)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", nargs="*", default=[n for n in PROBLEMS if n != "cpu-table" or SNAPSHOT.exists()])
    parser.add_argument("--searcher", nargs="*", default=list(ORDER))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--actors", type=int, nargs="*", default=[1])
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--part", default="0/1", help="every so-manieth unit from a certain one on, as in 0/2 and 1/2")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--tidy", action="store_true", help="forget runs that were made again")
    parser.add_argument("--todo", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--widen", type=float, metavar="SECONDS")
    arguments = parser.parse_args()
    problems = [problem_named(n) for n in arguments.problem] if not arguments.table else []
    if arguments.table:
        print(make_table())
    elif arguments.show:
        print(tables(problems, lambda run: run.version != version_of(Unit(run.problem, run.searcher, run.seed))))
        figure(problems, FIGURE)
    elif arguments.tidy:
        for problem in problems:
            results.tidy(problem)
    elif arguments.widen:
        widen(arguments.problem, arguments.widen)
    else:
        part, of = (int(x) for x in arguments.part.split("/"))
        todo = missing(list(units(arguments))[part::of])
        if arguments.todo:
            print(f"{len(todo)} units are missing")
        else:
            work(todo, arguments.limit_s, arguments.workers)


if __name__ == "__main__":
    main()
