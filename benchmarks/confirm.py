"""Does the winner's luck decide? What measuring the front again (`confirm.rounds`) does to it, by simulation.

Configurations along a trade-off are measured once each, with the noise of one run that `benchmarks/verify.py` takes
from the real engine. Members of the front are then measured again, whole rounds one after the other, until each member
of the front as it is then has its rounds: as a study does. Front and values are those of `tuner.view.view`.

- optimism: how much better than the truth the members of the front look, mean over members and objectives;
- beaten: share of the members that another configuration truly beats in every objective, by more than 1%;
- regret: by how much another configuration is truly better than the one that looks best, by the product of both
  objectives.

    PYTHONPATH=. python benchmarks/confirm.py [--noise 0.05] [--repetitions 100]
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from objectives.score import Score
from tuner.config import EngineConfig
from tuner.ledger import History, TrialRecord, TrialState
from tuner.view import Objective, StudyView, view

OBJECTIVES = (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s"))
CONFIGURATIONS = 30
BEATEN_BY = 0.01

Array = NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=float, default=0.05, help="standard deviation of log(value) of one run")
    parser.add_argument("--repetitions", type=int, default=100)
    options = parser.parse_args()
    print(f"{CONFIGURATIONS} configurations, {options.noise:.0%} noise a run, {options.repetitions} repetitions")
    print(f"{'rounds':>6}{'further runs':>14}{'front':>7}{'optimism':>10}{'beaten':>8}{'regret':>8}")
    for rounds in range(4):
        draw = np.random.default_rng(0)
        rows = [figures(draw, rounds, options.noise) for _ in range(options.repetitions)]
        runs, members, optimism, beaten, regret = np.mean(rows, axis=0)
        print(f"{rounds:>6}{runs:>14.1f}{members:>7.1f}{optimism:>10.2%}{beaten:>8.1%}{regret:>8.2%}")


def figures(draw: np.random.Generator, rounds: int, noise: float) -> tuple[float, ...]:
    """Simulate one study: further runs, members of the front, optimism, share beaten, regret."""
    true = _truth(draw)
    trials = [_trial(number, number, true, noise, draw) for number in range(CONFIGURATIONS)]
    study = _view(trials)
    while missing := _missing(study, rounds):
        again = _trial(len(trials), missing[0], true, noise, draw)
        trials.append(replace(again, source="confirm", repeats=missing[0]))
        study = _view(trials)
    front = list(study.front)
    shown = np.log([[study.results[n].values[o.name] for o in OBJECTIVES] for n in front])
    beaten = [bool(np.any(np.all(true < true[n] - BEATEN_BY, axis=1))) for n in front]
    best = front[int(shown.sum(axis=1).argmin())]
    regret = float(true[best].sum() - true.sum(axis=1).min())
    return len(trials) - CONFIGURATIONS, len(front), float((true[front] - shown).mean()), float(np.mean(beaten)), regret


def _truth(draw: np.random.Generator) -> Array:
    """Logarithms of the objectives, shape (configurations, 2): along a trade-off (factor 3), or worse."""
    along = draw.uniform(0.0, 1.1, CONFIGURATIONS)
    return np.column_stack([along, 1.1 - along]) + draw.exponential(0.15, (CONFIGURATIONS, 2))


def _trial(number: int, configuration: int, true: Array, noise: float, draw: np.random.Generator) -> TrialRecord:
    values = np.exp(true[configuration] + draw.normal(0.0, noise, len(OBJECTIVES)))
    score = Score({o.name: float(v) for o, v in zip(OBJECTIVES, values, strict=True)}, {}, {"memory": -0.1})
    config = EngineConfig({"max_num_seqs": configuration})
    return TrialRecord(number, TrialState.COMPLETE, "sampler", {}, config, 0.0, finished_at=0.0, score=score)


def _view(trials: list[TrialRecord]) -> StudyView:
    return view(History(None, tuple(trials), (), ()), OBJECTIVES)


def _missing(study: StudyView, rounds: int) -> list[int]:
    """Members of the front that have fewer further measurements than asked for, those with the fewest first."""
    done = {n: study.results[n].measurements - 1 for n in study.front}
    return sorted((n for n in study.front if done[n] < rounds), key=lambda n: done[n])


if __name__ == "__main__":
    main()
