"""How often `tuner verify` is wrong, and how often it finds an improvement, by simulation.

Each simulated verification has the order of runs of `tuner.verify.plan_rounds`. The value of a run is
`exp(drift + noise + effect)`: noise is normal and independent between runs, half of its variance shared by the two
objectives; drift is a random walk over the runs, which is how shared machines were seen to change. Compared are

- what `tuner verify` does: least squares on side and a straight line over the runs, Student's t;
- Student's t on the differences within rounds;
- the percentile bootstrap over those differences.

All three at the same confidence for both objectives together and with the same smallest change.

    PYTHONPATH=. python benchmarks/verify.py [--noise 0.05] [--drift 0.0 0.05] [--repetitions 2000]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from tuner.verify import CONFIDENCE, DEFAULT_ROUNDS, NEGLIGIBLE, Run, compare, plan_rounds
from tuner.view import Objective

OBJECTIVES = (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s"))
IMPROVED = 0.85
LEVEL = 1.0 - (1.0 - CONFIDENCE) / len(OBJECTIVES)

Rows = Sequence[tuple[Run, Mapping[str, float]]]
Judge = Callable[[Rows], list[str]]
"""Verdict for each objective."""


def main() -> None:
    options = _options()
    draw = np.random.default_rng(options.seed)
    print(f"noise {options.noise:.1%} a run; pick planted at {IMPROVED - 1:+.0%} on both objectives")
    print(f"{'method':<34}{'rounds':>7}{'drift':>8}{'A/A: no difference':>20}{'planted: found':>16}")
    for drift, rounds in itertools.product(options.drift, options.rounds):
        same = [_simulate(draw, rounds, options.noise, drift, 1.0) for _ in range(options.repetitions)]
        improved = [_simulate(draw, rounds, options.noise, drift, IMPROVED) for _ in range(options.repetitions)]
        for name, judge in JUDGES.items():
            quiet = np.mean([set(judge(rows)) == {"no difference"} for rows in same])
            found = np.mean([verdict == "better" for rows in improved for verdict in judge(rows)])
            print(f"{name:<34}{rounds:>7}{drift:>8.1%}{quiet:>20.1%}{found:>16.1%}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Error rates of `tuner verify` by simulation")
    parser.add_argument("--noise", type=float, default=0.05, help="standard deviation of log(value) of one run")
    parser.add_argument("--drift", type=float, nargs="+", default=[0.0, 0.05], help="random step from run to run")
    parser.add_argument("--rounds", type=int, nargs="+", default=[3, 4, DEFAULT_ROUNDS, 8])
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _simulate(draw: np.random.Generator, rounds: int, noise: float, drift: float, factor: float) -> Rows:
    runs = plan_rounds(rounds, seed=0)
    walk = np.cumsum(draw.normal(0.0, drift, len(runs)))
    shared = draw.normal(0.0, noise * np.sqrt(0.5), len(runs))
    own = draw.normal(0.0, noise * np.sqrt(0.5), (len(runs), len(OBJECTIVES)))
    values = np.exp(walk[:, None] + shared[:, None] + own)
    return [
        (
            run,
            {o.name: float(v) * (factor if run.side == "pick" else 1.0) for o, v in zip(OBJECTIVES, row, strict=True)},
        )
        for run, row in zip(runs, values, strict=True)
    ]


def _as_shipped(rows: Rows) -> list[str]:
    return [compared.verdict for compared in compare(rows, OBJECTIVES).values()]


def _paired_t(rows: Rows) -> list[str]:
    verdicts = []
    for differences in _differences(rows):
        error = differences.std(ddof=1) / np.sqrt(len(differences))
        half = error * stats.t.ppf((1 + LEVEL) / 2, len(differences) - 1)
        verdicts.append(_verdict(differences.mean() - half, differences.mean() + half))
    return verdicts


def _bootstrap(rows: Rows) -> list[str]:
    draw = np.random.default_rng(0)
    verdicts = []
    for differences in _differences(rows):
        means = draw.choice(differences, (1000, len(differences))).mean(axis=1)
        low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        verdicts.append(_verdict(float(low), float(high)))
    return verdicts


def _differences(rows: Rows) -> list[NDArray[np.float64]]:
    """Difference of the logarithms, pick less default, for each objective and round."""
    logs = {(run.round, run.side): np.log([values[o.name] for o in OBJECTIVES]) for run, values in rows}
    rounds = sorted({number for number, _ in logs})
    return list(np.array([logs[r, "pick"] - logs[r, "default"] for r in rounds]).T)


def _verdict(low: float, high: float) -> str:
    if np.expm1(high) >= -NEGLIGIBLE and np.expm1(low) <= NEGLIGIBLE:
        return "no difference"
    return "better" if high < 0 else "worse"


JUDGES: Mapping[str, Judge] = {
    "least squares with a line": _as_shipped,
    "t within rounds": _paired_t,
    "bootstrap over rounds": _bootstrap,
}

if __name__ == "__main__":
    main()
