"""How often `tuner verify` is wrong, and how often it finds an improvement, with the noise of the real engine.

The noise is taken from measurements of one configuration on separate starts of the real engine: a study's repeats of
its reference, and either side of its verifications, kept in data/verify.json. Pooled over all of them it is the
covariance of the logarithms of the objectives.

Two things are simulated. First the real code path: `tuner.verify.verify` on an engine that is the twin with this noise
on the requests of every run, of the quickstart's defaults against themselves, and against a copy of them that is 15%
better. Then three ways to judge the same runs, over many more repetitions and with a machine that drifts:

- what `tuner verify` does: least squares on side and a straight line over the runs, Student's t;
- Student's t on the differences within rounds;
- the percentile bootstrap over those differences.

All three at the same confidence for both objectives together and with the same smallest change. The value of a run is
`exp(drift + noise + effect)`, the drift a random walk over the runs, which is how shared machines were seen to change.

    PYTHONPATH=. python benchmarks/verify.py [--drift 0.0 0.05] [--repetitions 2000] [--twin-repetitions 20]
    PYTHONPATH=. python benchmarks/verify.py --gather mlruns/studies/quickstart/ledger.jsonl

The second takes the noise from a study; `tuner verify quickstart --pick trial:0` adds runs of the defaults to it.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from objectives.measurement import Failure, Measurement, RequestRecord
from tuner.config import EngineConfig
from tuner.engine.protocol import MeasurePlan, Progress
from tuner.engine.twin.devices import find_device
from tuner.engine.twin.engine import TwinEngine
from tuner.judge import judge
from tuner.ledger import Ledger, TrialState, Verification, VerifiedRun
from tuner.opening import base_config, build_workload
from tuner.study_file import read
from tuner.verify import CONFIDENCE, DEFAULT_ROUNDS, NEGLIGIBLE, compare, plan_rounds, verify
from tuner.view import Objective
from tuner.workload.model import Workload

DATA = Path(__file__).parent / "data" / "verify.json"
STUDY = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
OBJECTIVES = (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s"))
IMPROVED = 0.85
LEVEL = 1.0 - (1.0 - CONFIDENCE) / len(OBJECTIVES)
KV_BYTES = 2**30

Array = NDArray[np.float64]
Rows = Sequence[VerifiedRun]
Judge = Callable[[Rows], list[str]]
"""Verdict for each objective."""


def main() -> None:
    options = _options()
    if options.gather:
        document = {"objectives": [o.name for o in OBJECTIVES], "groups": gather(options.gather)}
        DATA.write_text(json.dumps(document, indent=1) + "\n")
    covariance, groups, freedom = noise(json.loads(DATA.read_text())["groups"])
    one, other = np.sqrt(np.diag(covariance))
    correlation = covariance[0, 1] / (one * other) if one and other else 0.0
    print(f"noise of one run, from {groups} configurations measured again ({freedom} degrees of freedom): "
          f"TTFT p95 {one:.1%}, TPOT p95 {other:.1%}, correlation {correlation:+.2f}\n")  # fmt: skip
    for rounds in options.twin_rounds:
        _on_the_twin(covariance, rounds, options.twin_repetitions, options.seed)
    _by_judges(covariance, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Error rates of `tuner verify` by simulation")
    parser.add_argument("--gather", type=Path, metavar="LEDGER", help="take the noise from this study first")
    parser.add_argument("--drift", type=float, nargs="+", default=[0.0, 0.05], help="random step from run to run")
    parser.add_argument("--rounds", type=int, nargs="+", default=[3, 5, DEFAULT_ROUNDS])
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--twin-repetitions", type=int, default=20)
    parser.add_argument("--twin-rounds", type=int, nargs="+", default=[5, DEFAULT_ROUNDS])
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


# The noise of the real engine ---------------------------------------------------------------------------------------


def gather(ledger: Path) -> list[dict[str, object]]:
    """Return what a study measured more than once: the configuration, and the objectives of each run."""
    history = Ledger(ledger).history()
    groups: dict[str, list[list[float]]] = {}
    for trial in history.finished:
        if trial.state is TrialState.COMPLETE and trial.score is not None and not trial.predicted:
            key = f"trial {trial.number if trial.repeats is None else trial.repeats}, study"
            groups.setdefault(key, []).append([trial.score.values[o.name] for o in OBJECTIVES])
    for index, verification in enumerate(history.verifications):
        for run in verification.runs:
            groups.setdefault(_side(verification, index, run), []).append([run.values[o.name] for o in OBJECTIVES])
    return [{"what": key, "runs": runs} for key, runs in groups.items() if len(runs) > 1]


def _side(verification: Verification, index: int, run: VerifiedRun) -> str:
    """Name the group of a run; when the defaults are verified against themselves, both sides are one configuration."""
    side = "both sides" if verification.number == 0 else run.side
    how = "over HTTP" if verification.over_http else "in process"
    return f"verification {index + 1} of trial {verification.number}, {how}: {side}"


def noise(groups: Sequence[Mapping[str, object]]) -> tuple[Array, int, int]:
    """Pooled covariance of the logarithms within groups, how many groups there are, and its degrees of freedom."""
    total, freedom = np.zeros((len(OBJECTIVES), len(OBJECTIVES))), 0
    for group in groups:
        logs = np.log(np.array(group["runs"], dtype=np.float64))
        centred = logs - logs.mean(axis=0)
        total += centred.T @ centred
        freedom += len(logs) - 1
    return total / freedom, len(groups), freedom


# `tuner.verify.verify` on the twin ----------------------------------------------------------------------------------


class NoisyTwin:
    """The twin as a real engine: its times are those of the twin, each run with noise of its own.

    Parameters
    ----------
    planted:
        Key of a configuration -> factor on the latencies that it measures; 1 for all others.
    """

    def __init__(self, twin: TwinEngine, covariance: Array, planted: Mapping[str, float], seed: int) -> None:
        self._twin = twin
        self._covariance = covariance
        self._planted = planted
        self._draw = np.random.default_rng(seed)
        self._known: dict[str, Measurement | Failure] = {}

    def run(
        self, config: EngineConfig, workload: Workload, plan: MeasurePlan, progress: Progress
    ) -> Measurement | Failure:
        """Predict once, and disturb it anew for every run."""
        key = config.key()
        if key not in self._known:
            self._known[key] = self._twin.run(config, workload, plan, progress)
        known = self._known[key]
        if isinstance(known, Failure):
            return known
        factors = np.exp(self._draw.multivariate_normal(np.zeros(len(OBJECTIVES)), self._covariance))
        ttft, tpot = (float(f) * self._planted.get(key, 1.0) for f in factors)
        requests = tuple(_disturbed(r, ttft, tpot) for r in known.requests)
        return replace(known, requests=requests, predicted=False)

    def close(self) -> None:
        """Nothing outlives a run."""


def _disturbed(record: RequestRecord, ttft: float, tpot: float) -> RequestRecord:
    """Stretch a request: what comes before its first token by one factor, what comes after by the other."""
    if record.first_token_s is None or record.last_token_s is None:
        return record
    first_s = record.scheduled_s + (record.first_token_s - record.scheduled_s) * ttft

    def after(at_s: float) -> float:
        return first_s + (at_s - record.first_token_s) * tpot  # type: ignore[operator]  # it is not None: see above

    return replace(
        record,
        queued_s=None,
        first_scheduled_s=None,
        first_token_s=first_s,
        last_token_s=after(record.last_token_s),
        token_times_s=tuple(after(t) for t in record.token_times_s),
    )


def _on_the_twin(covariance: Array, rounds: int, repetitions: int, seed: int) -> None:
    file = read(STUDY)
    workload = build_workload(file).workload
    twin = TwinEngine(find_device("cpu"), Path(file.model))
    defaults = base_config(file).with_args({"kv_cache_memory_bytes": KV_BYTES})
    better = EngineConfig(defaults.args, {**defaults.env, "PLANTED": "1"})
    print(f"tuner.verify.verify on the twin, {rounds} rounds, {repetitions} repetitions")
    for what, pick in (("default against default", defaults), (f"planted {IMPROVED - 1:+.0%}", better)):
        verdicts: list[list[str]] = []
        for number in range(repetitions):
            engine = NoisyTwin(twin, covariance, {better.key(): IMPROVED}, seed + number)
            found = verify(
                engine,
                defaults,
                pick,
                workload,
                MeasurePlan(),
                number=1,
                rounds=rounds,
                objectives=OBJECTIVES,
                score=lambda m: judge(file, m, workload, None, {}),
                progress=lambda _: None,
                seed=number,
            )
            if isinstance(found, Failure):
                raise RuntimeError(found.message)
            verdicts.append([found.verdict[o.name] for o in OBJECTIVES])
        quiet = sum(set(v) == {"no difference"} for v in verdicts)
        print(f"  {what:<26} no difference in any objective: {quiet} of {repetitions}", end="")
        for index, objective in enumerate(OBJECTIVES):
            print(f"; {objective.name} better: {sum(v[index] == 'better' for v in verdicts)}", end="")
        print()
    print()


# Three ways to judge the same runs ----------------------------------------------------------------------------------


def _by_judges(covariance: Array, options: argparse.Namespace) -> None:
    draw = np.random.default_rng(options.seed)
    print(f"{'method':<34}{'rounds':>7}{'drift':>8}{'A/A: no difference':>20}{'planted: found':>16}")
    for drift, rounds in itertools.product(options.drift, options.rounds):
        same = [_simulate(draw, rounds, covariance, drift, 1.0) for _ in range(options.repetitions)]
        improved = [_simulate(draw, rounds, covariance, drift, IMPROVED) for _ in range(options.repetitions)]
        for name, judged in JUDGES.items():
            quiet = np.mean([set(judged(rows)) == {"no difference"} for rows in same])
            found = np.mean([verdict == "better" for rows in improved for verdict in judged(rows)])
            print(f"{name:<34}{rounds:>7}{drift:>8.1%}{quiet:>20.1%}{found:>16.1%}")


def _simulate(draw: np.random.Generator, rounds: int, covariance: Array, drift: float, factor: float) -> Rows:
    runs = plan_rounds(rounds, seed=0)
    walk = np.cumsum(draw.normal(0.0, drift, len(runs)))
    values = np.exp(walk[:, None] + draw.multivariate_normal(np.zeros(len(OBJECTIVES)), covariance, len(runs)))
    return [
        VerifiedRun(run.round, run.side, dict(_row(row * (factor if run.side == "pick" else 1.0))))
        for run, row in zip(runs, values, strict=True)
    ]


def _row(values: Array) -> Iterator[tuple[str, float]]:
    return ((o.name, float(v)) for o, v in zip(OBJECTIVES, values, strict=True))


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


def _differences(rows: Rows) -> list[Array]:
    """Difference of the logarithms, pick less default, for each objective and round."""
    logs = {(run.round, run.side): np.log([run.values[o.name] for o in OBJECTIVES]) for run in rows}
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
