"""The twin against the table of the real CPU engine: calibrated on three configurations, it predicts the others.

    PYTHONPATH=. python benchmarks/twin.py [--choices 100]

Reads what `cpu_table.py` measured and starts no engine. The three are chosen by a rule and not by how well they do:
of the plain configurations of the quickstart (eager, default block size, prefix caching on, whole chunks) the widest,
which is next to vLLM's defaults, the one with the smallest chunks, and the one with the fewest requests at once. Beside
it stands the spread over random choices of three. Every prediction is for the speed that the trial's own probes show,
since the machine drifts. Two more columns say what that does: predictions without it, and at the speed that the steps
of the run itself show, which is not known before a run: what is then still missing is the fault of the step model.

Printed as markdown: what is promised and seen, by group of configurations, and how well a measurement repeats itself,
which no prediction can beat.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cpu_table import DATA, STUDY, Case, cases, figures, is_there, workloads
from numpy.typing import NDArray
from scipy.stats import spearmanr

from objectives.measurement import Failure
from objectives.pareto import front, hypervolume
from tuner.artifacts import load
from tuner.config import EngineConfig
from tuner.engine.protocol import MeasurePlan
from tuner.engine.twin.calibrate import Followed, fit_sets, follow, own_speed, speed_among
from tuner.engine.twin.coefficient_sets import CoefficientSets
from tuner.engine.twin.devices import find_device
from tuner.engine.twin.engine import TwinEngine
from tuner.engine.twin.replay import MeasuredTrial, replay
from tuner.opening import base_config
from tuner.study_file import read

Array = NDArray[np.float64]

MODEL = Path(__file__).parents[1] / "tests" / "data" / "models" / "smollm2-135m"
FIGURES = ("TTFT p95", "TPOT p95")
PLAIN = frozenset({"max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"})
SEED = 20261130


@dataclass(frozen=True, slots=True)
class Row:
    """One measured configuration: as a trial, as equations, and its p95 of TTFT and TPOT in seconds."""

    case: Case
    trial: MeasuredTrial
    followed: Followed
    agreement: float
    values: tuple[float, float]

    @property
    def key(self) -> str:
        """Name of the measurement: a configuration may have been measured on both workloads."""
        return f"{self.case.workload}/{self.case.name}"

    @property
    def configuration(self) -> str:
        """Name of the configuration, the same for every measurement of it."""
        return self.case.name.partition("-again")[0]

    @property
    def group(self) -> str:
        """What of the grid is changed."""
        args = self.case.args
        if args.get("enforce_eager") is False:
            return "compiled"
        if "block_size" in args:
            return f"block size {args['block_size']}"
        if args.get("enable_prefix_caching") is False:
            return "prefix caching off"
        if "long_prefill_token_threshold" in args:
            return "long prompts limited"
        return "plain, 192 MiB of KV" if args["kv_cache_memory_bytes"] < 256 * 2**20 else "plain, 1 GiB of KV"


@dataclass(frozen=True, slots=True)
class Prediction:
    """p95 of TTFT and TPOT in seconds, for three answers to how fast the machine was.

    Parameters
    ----------
    at_speed:
        As fast as the trial's probes show: `speed`, relative to the trials of the calibration.
    common:
        As fast as for the calibration.
    at_own:
        As fast as the trial's own steps show on average (`own_speed`): what the model of a step is worth by itself.
    """

    at_speed: tuple[float, float]
    common: tuple[float, float]
    at_own: tuple[float, float]
    speed: float
    own_speed: float


def read_rows(twin: TwinEngine) -> list[Row]:
    """Read everything that was measured."""
    base = base_config(read(STUDY)).args
    built = workloads()
    rows = []
    for case in (case for case in cases() if is_there(case)):
        measured = load(DATA / case.workload / case.name)
        trial = MeasuredTrial(EngineConfig({**base, **case.args}), built[case.workload], measured)
        followed = follow(trial, twin)
        prepared = twin.prepare(trial.config, measured.engine.kv_tokens)
        if followed is None or isinstance(prepared, Failure):
            raise SystemExit(f"{case.workload}/{case.name}: the twin cannot follow it")
        rows.append(Row(case, trial, followed, replay(trial, prepared).agreement, figures(measured)))
    return rows


def three(rows: Sequence[Row]) -> list[Row]:
    """Choose by the rule that the module states."""
    plain = [r for r in rows if r.case.args.keys() == PLAIN]

    def seqs(row: Row) -> int:
        return int(row.case.args["max_num_seqs"])

    def tokens(row: Row) -> int:
        return int(row.case.args["max_num_batched_tokens"])

    chosen: list[Row] = []
    for better in (
        lambda r: (tokens(r) * seqs(r), tokens(r)),
        lambda r: (-tokens(r), seqs(r)),
        lambda r: (-seqs(r), tokens(r)),
    ):
        chosen.append(max((r for r in plain if r not in chosen), key=better))
    return chosen


def predict(row: Row, twin: TwinEngine, coefficients: CoefficientSets, chosen: Sequence[Row]) -> Prediction:
    """Play the configuration at the machine's speed by three answers."""
    speed = _speed(row, twin, coefficients, chosen)
    own = own_speed(row.followed, coefficients.of(twin.key(row.trial.config)))
    at_speed, common, at_own = (_play(row, twin, coefficients.scaled(answer)) for answer in (speed, 1.0, own))
    return Prediction(at_speed, common, at_own, speed, own)


def _speed(row: Row, twin: TwinEngine, coefficients: CoefficientSets, chosen: Sequence[Row]) -> float:
    return speed_among(row.trial, [r.trial for r in chosen], twin.with_coefficients(coefficients)) or 1.0


def _play(row: Row, twin: TwinEngine, coefficients: CoefficientSets) -> tuple[float, float]:
    engine = twin.with_coefficients(coefficients)
    outcome = engine.run(row.trial.config, row.trial.workload, MeasurePlan(), lambda _: None)
    if isinstance(outcome, Failure):
        raise SystemExit(f"{row.case.name}: {outcome.message}")
    return figures(outcome)


def score(rows: Sequence[Row], values: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Spearman and median relative error of both figures, and the share of the measured front's hypervolume."""
    predicted = np.array(values)
    measured = np.array([r.values for r in rows])
    found = {}
    for column, name in enumerate(FIGURES):
        errors = np.abs(predicted[:, column] / measured[:, column] - 1)
        found[f"Spearman {name}"] = float(spearmanr(predicted[:, column], measured[:, column])[0])
        found[f"median error {name}"] = float(np.median(errors))
        found[f"error {name}, nine in ten below"] = float(np.quantile(errors, 0.9))
    found["hypervolume of its front"] = picked_share(predicted, measured)
    return found


def _scores(rows: Sequence[Row], predictions: Mapping[str, Prediction]) -> tuple[dict[str, float], ...]:
    """Score at the speed of the probes, at one common speed and at that of the runs' own steps."""
    by_row = [predictions[r.key] for r in rows]
    answers = ([p.at_speed for p in by_row], [p.common for p in by_row], [p.at_own for p in by_row])
    return tuple(score(rows, values) for values in answers)


def picked_share(predicted: Array, measured: Array) -> float:
    """Hypervolume that the predicted front has when measured, over that of the measured front.

    In logarithms, so that ratios count the same, from the corner of the worst values measured.
    """
    points, corner = np.log(measured), np.log(measured.max(axis=0))
    return hypervolume(points[front(predicted)], corner) / hypervolume(points, corner)


def repeats(rows: Sequence[Row], predictions: Mapping[str, Prediction]) -> list[str]:
    """Say how far measurements of one configuration are apart, as they are and at one speed."""
    lines = []
    by_configuration: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_configuration[row.configuration].append(row)
    several = [group for group in by_configuration.values() if len(group) > 1]
    if not several:
        return ["No configuration was measured twice yet."]
    for column, name in enumerate(FIGURES):
        apart, corrected = [], []
        for group in several:
            values = [r.values[column] for r in group]
            at_one = [
                r.values[column] * p.common[column] / p.at_speed[column]
                for r, p in ((r, predictions[r.key]) for r in group)
            ]
            apart.append(max(values) / min(values) - 1)
            corrected.append(max(at_one) / min(at_one) - 1)
        lines.append(
            f"{len(several)} configurations measured again, {name}: largest over smallest, median "
            f"{statistics.median(apart):.0%} (up to {max(apart):.0%}) as measured, "
            f"{statistics.median(corrected):.0%} (up to {max(corrected):.0%}) at one speed of the machine."
        )
    return lines


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table as markdown."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--choices", type=int, default=100, help="random choices of three beside the rule's")
    parser.add_argument("--rows", action="store_true", help="print every configuration too")
    arguments = parser.parse_args()
    twin = TwinEngine(find_device("cpu"), MODEL)
    rows = read_rows(twin)
    quickstart = [r for r in rows if r.case.workload == "quickstart"]
    single = [r for r in quickstart if r.configuration == r.case.name]
    shared = [r for r in rows if r.case.workload == "shared"]

    chosen = three(single)
    began_s = time.perf_counter()
    coefficients = fit_sets([r.followed for r in chosen], twin)
    fit_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    predictions = {r.key: predict(r, twin, coefficients, chosen) for r in rows}
    play_s = (time.perf_counter() - began_s) / (3 * len(rows))
    others = [r for r in single if r not in chosen]

    print(f"{len(single)} configurations of the quickstart, {len(shared)} on shared documents; replay agrees with "
          f"{min(r.agreement for r in rows):.1%} of the steps of the worst trial, "
          f"{sum(len(r.followed.measured_s) for r in rows)} steps in all. Fit in {fit_s:.2f} s, a prediction in "
          f"{play_s * 1000:.0f} ms.")  # fmt: skip
    shared_set = coefficients.shared
    print(f"Calibrated on {', '.join(r.case.name for r in chosen)}: "
          + ", ".join(f"{n} {shared_set.values[n]:.2f}" for n in shared_set.fitted))  # fmt: skip
    speeds = np.log([(p.speed, p.own_speed) for p in predictions.values()])
    probes, steps = (_range(np.exp(column)) for column in speeds.T)
    print(f"Speed of the machine, 1 being that of the calibration: {probes} by the probes, {steps} by the steps of the "
          f"run; correlation {np.corrcoef(speeds.T)[0, 1]:.2f}, one over the other off by "
          f"{np.std(speeds[:, 0] - speeds[:, 1]):.1%} (standard deviation).\n")  # fmt: skip

    seen, common, own = _scores(others, predictions)
    promised = {name: 0.9 if "Spearman" in name else 0.15 for name in seen if "nine" not in name}
    promised["hypervolume of its front"] = 0.95
    drawn = spread(single, twin, arguments.choices)
    body = []
    for name, value in seen.items():
        bound = promised.get(name)
        met = "" if bound is None else "met" if (value <= bound if "error" in name else value >= bound) else "missed"
        sign = "" if bound is None else f"{'≤' if 'error' in name else '≥'} {_text(name, bound)}"
        body.append(
            [name, sign, _text(name, value), met, drawn[name], _text(name, common[name]), _text(name, own[name])]
        )
    if len(shared) > 2:
        seen, *answers = _scores(shared, predictions)
        for name, value in seen.items():
            bound = 0.85 if "Spearman" in name else None
            met = "" if bound is None else "met" if value >= bound else "missed"
            rest = [_text(name, by_answer[name]) for by_answer in answers]
            body.append([f"shared: {name}", f"≥ {bound}" if bound else "", _text(name, value), met, "", *rest])
    choices = f"{arguments.choices} random choices: median (5–95%)"
    print(table(["figure", "promised", "seen", "", choices, "without the speed", "speed of the run's steps"], body))

    print()
    print(table(["group", "configurations", *(f"predicted / measured {name}" for name in FIGURES)],
                [*_groups(others, predictions), *_groups(shared, predictions, "shared: ")]))  # fmt: skip
    print()
    print("\n".join(repeats(quickstart, predictions)))
    if arguments.rows:
        print("\n".join(line(r, predictions[r.key]) for r in rows))
    return int(any("missed" in cells for cells in body))


def line(row: Row, predicted: Prediction) -> str:
    """Say one configuration in a line: measured values, and predicted over measured by the probes and its own steps."""
    cells = [
        f"{name} {value:7.3f} s, × {predicted.at_speed[i] / value:.2f}, × {predicted.at_own[i] / value:.2f}"
        for i, (name, value) in enumerate(zip(FIGURES, row.values, strict=True))
    ]
    speeds = f"speed {predicted.speed:.2f}, of its steps {predicted.own_speed:.2f}"
    return f"{row.case.workload:10} {row.case.name:46} {speeds}  {'  '.join(cells)}"


def spread(rows: Sequence[Row], twin: TwinEngine, choices: int) -> dict[str, str]:
    """Score random choices of three eager configurations on all others: median and 5–95% of each figure."""
    draw = random.Random(SEED)
    eager = [r for r in rows if r.case.args.get("enforce_eager") is not False]
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(choices):
        chosen = draw.sample(eager, 3)
        coefficients = fit_sets([r.followed for r in chosen], twin)
        others = [r for r in rows if r not in chosen]
        values = [_play(r, twin, coefficients.scaled(_speed(r, twin, coefficients, chosen))) for r in others]
        for name, value in score(others, values).items():
            found[name].append(value)
    return {name: _range(values, name) for name, values in found.items()}


def _groups(rows: Sequence[Row], predictions: Mapping[str, Prediction], prefix: str = "") -> list[list[str]]:
    by_group: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_group[row.group].append(row)
    return [
        [
            prefix + group,
            str(len(members)),
            *(_range([predictions[r.key].at_speed[i] / r.values[i] for r in members]) for i in range(2)),
        ]
        for group, members in sorted(by_group.items())
    ]


def _range(values: Sequence[float], name: str = "") -> str:
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
    return f"{_text(name, middle)} ({_text(name, low)}–{_text(name, high)})"


def _text(name: str, value: float) -> str:
    return f"{value:.1%}" if "error" in name or "hypervolume" in name else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
