"""The runs as one table a problem and one figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from search_bench.play import Run
from search_bench.problem import Problem
from search_bench.results import (
    Array,
    best_known,
    curve,
    few_of_the_best,
    hours_to,
    infeasible_share,
    mean_interval,
    runs_of,
    trials_to,
)

AT = (10, 20, 40)
LONG = 100
FEW = 8
LEAST_FOR_INTERVAL = 5
"""A bootstrap over fewer seeds says nothing."""
NAMES = {
    "random": "random",
    "random-gated": "random, gate in front",
    "sobol": "Sobol",
    "sobol-gated": "Sobol, gate in front",
    "grid": "grid of two parameters",
    "nsga2": "NSGA-II (population 10)",
    "tpe-default": "TPE, Optuna's defaults, OOM as FAIL",
    "tpe-tuned": "TPE tuned",
    "tpe-tuned-gated": "TPE tuned, gate in front",
    "gp-optuna": "GP of Optuna, ordinal, log",
    "gp-optuna-gated": "GP of Optuna, gate in front",
    "tuner-alone": "**tuner's sampler alone**",
    "tuner-no-twin": "**tuner without twin**",
    "tuner": "**tuner**",
    "tuner-no-gate": "tuner without gate",
    "tuner-no-log": "tuner without logarithms",
    "tuner-no-ordinal": "tuner without order of choices",
    "tuner-no-recipes": "tuner without recipes",
    "tuner-no-design": "tuner without design",
    "tuner-no-twin-no-recipes": "tuner without twin, without recipes",
    "tuner-no-twin-no-design": "tuner without twin, without design",
}
MAIN = [n for n in NAMES if not n.startswith("tuner-no-")] + ["tuner-no-twin"]
DRAWN = ("random", "sobol", "grid", "nsga2", "tpe-default", "tpe-tuned", "gp-optuna", "tuner-no-twin", "tuner")


def tables(problems: Sequence[Problem], is_stale: Callable[[Run], bool]) -> str:
    """Return Markdown: a table a problem, the ablation, and search in parallel.

    Parameters
    ----------
    is_stale:
        Whether the searcher has changed since a run; such runs are shown, and said to be.
    """
    parts = [
        *(_table(p, is_stale) for p in problems),
        _ablation(problems, is_stale),
        _parallel(problems, is_stale),
        _longer(problems, is_stale),
        _long(problems, is_stale),
    ]
    return "\n\n".join(parts)


@lru_cache(maxsize=8)
def _alone(problem: Problem) -> dict[str, list[Run]]:
    """Return runs of 40 trials by one actor, by searcher."""
    found: dict[str, list[Run]] = {}
    for run in runs_of(problem):
        if run.actors == 1 and len(run.values) <= max(AT):
            found.setdefault(run.searcher, []).append(run)
    return found


def _table(problem: Problem, is_stale: Callable[[Run], bool]) -> str:
    runs = _alone(problem)
    lines = [
        f"### {problem.title}",
        "",
        f"Best known: {best_known(problem)[1]} members of a front of {best_known(problem)[2]} configurations; the best "
        f"{FEW} of them make {few_of_the_best(problem, FEW):.0%} of its hypervolume.",
        "",
        "| search | seeds | at 10 | at 20 | at 40 | trials to 90% | to 95% | hours to 90% | to 95% | do not fit | "
        "s to propose |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in MAIN:
        if name in runs:
            lines.append(_row(problem, name, runs[name], _counted(runs[name], is_stale)))
    return "\n".join(lines)


@lru_cache(maxsize=8)
def _curves(problem: Problem) -> dict[int, Array]:
    """Return the curve of every run, by the identity of the run as `_alone` holds it."""
    return {id(run): curve(run, problem) for runs in _alone(problem).values() for run in runs}


def _row(problem: Problem, name: str, runs: Sequence[Run], seeds: str) -> str:
    shares = [_curves(problem)[id(run)] for run in runs]
    at = [_interval([s[min(n, len(s)) - 1] for s in shares]) for n in AT]
    trials = [_median([trials_to(s, goal) for s in shares], "{:.0f}") for goal in (0.9, 0.95)]
    pairs = list(zip(runs, shares, strict=True))
    hours = [_median([hours_to(r, s, goal) for r, s in pairs], "{:.1f}") for goal in (0.9, 0.95)]
    propose = [s for run in runs for s in run.propose_s]
    cells = [NAMES[name], seeds, *at, *trials, *hours, f"{infeasible_share(runs):.0%}"]
    return "| " + " | ".join([*cells, f"{np.median(propose):.2f}, max {max(propose):.1f}"]) + " |"


def _interval(values: Sequence[float]) -> str:
    mean, low, high = mean_interval(values)
    return f"{mean:.2f} ({low:.2f}–{high:.2f})" if len(values) >= LEAST_FOR_INTERVAL else f"{mean:.2f}"


def _counted(runs: Sequence[Run], is_stale: Callable[[Run], bool]) -> str:
    old = sum(is_stale(run) for run in runs)
    return f"{len(runs)}" + (f" ({old} earlier)" if old else "")


def _median(values: Sequence[float], form: str) -> str:
    """Median over seeds; a dash where fewer than half of them came that far within their trials."""
    middle = float(np.median(values))
    return form.format(middle) if np.isfinite(middle) else "–"


def _ablation(problems: Sequence[Problem], is_stale: Callable[[Run], bool]) -> str:
    names = [n for n in NAMES if n == "tuner" or n.startswith("tuner-no-")]
    lines = [
        "### One part left out",
        "",
        "Share of the best known hypervolume at 20 / 40 trials; in brackets the difference at 20 to the whole (of "
        "those without twin and more, to the one without twin), over the same seeds. Runs of an earlier state of the "
        "search are left out.",
        "",
        "| search | " + " | ".join(p.title for p in problems) + " |",
        "|---|" + "---|" * len(problems),
    ]
    for name in names:
        cells = [_ablated(problem, name, is_stale) for problem in problems]
        lines.append(f"| {NAMES[name]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ablated(problem: Problem, name: str, is_stale: Callable[[Run], bool]) -> str:
    runs = _alone(problem)
    mine = {r.seed: _curves(problem)[id(r)] for r in runs.get(name, []) if not is_stale(r)}
    against = "tuner-no-twin" if name.startswith("tuner-no-twin-") else "tuner"
    whole = {r.seed: _curves(problem)[id(r)] for r in runs.get(against, []) if not is_stale(r)}
    seeds = sorted(mine.keys() & whole.keys())
    if not seeds:
        return "–"
    text = f"{np.mean([mine[s][19] for s in seeds]):.2f} / {np.mean([mine[s][-1] for s in seeds]):.2f}"
    if name == "tuner":
        return text
    mean, low, high = mean_interval([mine[s][19] - whole[s][19] for s in seeds])
    interval = f", {low:+.3f} to {high:+.3f}" if len(seeds) >= LEAST_FOR_INTERVAL else f", {len(seeds)} seeds"
    return f"{text} ({mean:+.3f}{interval})"


def _headed(title: str, head: str) -> list[str]:
    """Return the lines with which a table begins."""
    return [f"### {title}", "", head, "|" + "---|" * (head.count("|") - 1)]


def _parallel(problems: Sequence[Problem], is_stale: Callable[[Run], bool]) -> str:
    lines = _headed("Several actors at equal trials", "| problem | search | actors | seeds | at 10 | at 20 | at 40 |")
    for problem in problems:
        groups = _grouped([run for run in runs_of(problem) if len(run.values) <= max(AT)], lambda run: run.actors)
        wanted = {name for name, actors in groups if actors > 1}
        for (name, actors), runs in sorted(groups.items()):
            if name in wanted:
                curves = [curve(run, problem) for run in runs]
                at = " | ".join(_interval([c[min(n, len(c)) - 1] for c in curves]) for n in AT)
                lines.append(f"| {problem.title} | {NAMES[name]} | {actors} | {_counted(runs, is_stale)} | {at} |")
    return "\n".join(lines)


def _longer(problems: Sequence[Problem], is_stale: Callable[[Run], bool]) -> str:
    lines = _headed("Longer runs", "| problem | search | seeds | trials | at the end | trials to 90% | to 95% |")
    for problem in problems:
        long = [run for run in runs_of(problem) if run.actors == 1 and len(run.values) > max(AT)]
        for (name, trials), runs in sorted(_grouped(long, lambda run: len(run.values)).items()):
            curves = [curve(run, problem) for run in runs]
            to = " | ".join(_median([trials_to(c, goal) for c in curves], "{:.0f}") for goal in (0.9, 0.95))
            ends, seeds = _interval([c[-1] for c in curves]), _counted(runs, is_stale)
            lines.append(f"| {problem.title} | {NAMES[name]} | {seeds} | {trials} | {ends} | {to} |")
    return "\n".join(lines)


def _long(problems: Sequence[Problem], is_stale: Callable[[Run], bool]) -> str:
    lines = _headed("Seconds to propose, trials 91 to 100", "| problem | search | seeds | median | max |")
    for problem in problems:
        late = [run for run in runs_of(problem) if len(run.propose_s) >= LONG and run.actors == 1]
        for (name, _), runs in sorted(_grouped(late, lambda _: 1).items()):
            seconds = [run.propose_s[90:LONG] for run in runs]
            line = f"| {problem.title} | {NAMES[name]} | {_counted(runs, is_stale)} | {np.median(seconds):.2f} "
            lines.append(line + f"| {np.max(seconds):.2f} |")
    return "\n".join(lines)


def _grouped(runs: Sequence[Run], key: Callable[[Run], int]) -> dict[tuple[str, int], list[Run]]:
    """Return runs by their searcher and a number."""
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.searcher, key(run)), []).append(run)
    return groups


def figure(problems: Sequence[Problem], into: Path) -> None:
    """Draw mean and 95% interval of the hypervolume by trial, a panel a problem."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plots, axes = plt.subplots(1, len(problems), figsize=(5 * len(problems), 4.2), squeeze=False)
    colours = {name: plt.get_cmap("tab10")(i) for i, name in enumerate(DRAWN)}
    for panel, problem in zip(axes[0], problems, strict=True):
        for name, runs in _alone(problem).items():
            if name not in colours:
                continue
            curves = np.array(
                [np.pad(c, (0, max(AT) - len(c)), mode="edge") for r in runs for c in [_curves(problem)[id(r)]]]
            )
            x = np.arange(1, max(AT) + 1)
            wide = 2.4 if name == "tuner" else 1.2
            panel.plot(x, curves.mean(axis=0), color=colours[name], lw=wide, label=NAMES[name].strip("*"))
            bands = np.array([mean_interval(column)[1:] for column in curves.T])
            panel.fill_between(x, bands[:, 0], bands[:, 1], color=colours[name], alpha=0.12, lw=0)
        panel.set(title=problem.title, xlabel="trials", ylim=(0, 1.02))
        panel.axhline(0.95, color="grey", lw=0.6, ls=":")
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel("hypervolume / best known")
    drawn = {label: line for p in axes[0] for line, label in zip(*p.get_legend_handles_labels(), strict=True)}
    plots.legend(drawn.values(), drawn.keys(), fontsize=8, loc="lower center", ncols=len(drawn))
    plots.tight_layout(rect=(0, 0.06, 1, 1))
    into.parent.mkdir(parents=True, exist_ok=True)
    plots.savefig(into, dpi=110)
    plt.close(plots)
