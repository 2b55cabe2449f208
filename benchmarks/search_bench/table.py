"""Problem (a): a table of the real CPU engine, measured by `benchmarks/cpu_table.py`.

The table is a snapshot of what the campaign has measured: raw p95 values, the speed of the machine at that time (the
measured probe over the probe that the calibrated twin expects of the same configuration), and the values divided by it.
What was measured more than once, as the front was, is worth the mean.

While the grid is not whole, a configuration that was not measured is worth what the measured one nearest to it is, in
steps of the ordered parameters as shares of their ranges; the best known is the front of the measured ones. Two sizes
of the KV cache are too small to start (180 MiB are needed) and were not measured: they are the infeasible half.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from search_bench.problem import CALIBRATED_ON, Changes, Knowledge, Predictor, Truth, Values, corner_of, parameter
from tuner.artifacts import load, write_json
from tuner.design import design_points
from tuner.gate import Gate
from tuner.ledger import History
from tuner.opening import base_config, build_workload, machine_of, memory_predictor
from tuner.search.guide import BRIEF
from tuner.study_file import StudyFile, read

ROOT = Path(__file__).parents[2]
MEASURED = Path(__file__).parents[1] / "data" / "cpu_table" / "quickstart"
SNAPSHOT = Path(__file__).parents[1] / "data" / "search" / "cpu-table.json"
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
MIB = 2**20

SPACE: dict[str, list[int]] = {
    "max_num_seqs": [1, 2, 4, 8, 16, 32],
    "max_num_batched_tokens": [64, 128, 256, 512, 1024, 2048, 4096],
    "kv_cache_memory_bytes": [96 * MIB, 128 * MIB, 192 * MIB, 1024 * MIB],
    "long_prefill_token_threshold": [0, 128, 512],
}
DEFAULT = dict(zip(SPACE, (32, 4096, 1024 * MIB, 0), strict=True))
NEEDED_MIB = 180.0
"""KV cache of one request of max_model_len = 8192 tokens: 22.5 KiB a token of 30 layers, 3 heads of 64, bfloat16."""
START_S, STOP_S, REFUSED_S = 22.0, 5.0, 17.0
"""Seen in the campaign; a start that ends at the KV cache has loaded the model and not warmed up."""
NOISE_UNTIL_REPEATED = 0.05


def calibrating() -> list[Changes]:
    """Return what is measured after the default and calibrates the twin with it: the first of an even design that fit.

    The same in every run, so that all runs ask the same twin.
    """
    points = design_points({name: parameter(values) for name, values in SPACE.items()}, 16, 0)
    fit = [point for point in points if point["kv_cache_memory_bytes"] >= NEEDED_MIB * MIB]
    return fit[: CALIBRATED_ON - 1]


class Table:
    """The problem."""

    name = "cpu-table"
    title = "(a) real CPU engine, table"

    def __init__(self) -> None:
        self._kept: dict[str, Any] = json.loads(SNAPSHOT.read_text())
        self.version = hashlib.sha256(SNAPSHOT.read_bytes()).hexdigest()[:8]
        self.default: Changes = DEFAULT
        self.noise: float = self._kept["noise"]
        self._rows: list[dict[str, Any]] = self._kept["configurations"]
        self._places = np.array([_place(row["args"]) for row in self._rows])

    @cached_property
    def file(self) -> StudyFile:
        """The quickstart study with the table's space."""
        document = yaml.safe_load(QUICKSTART.read_text())
        document |= {"study": self.name, "space": SPACE, "recipes": []}
        document["model"] = "../../../models/smollm2-135m-instruct"
        path = SNAPSHOT.with_name(f"{self.name}.yaml")
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        return read(path)

    @cached_property
    def space(self) -> Any:
        """The study's space, in the order in which everybody else's search has it."""
        return {name: parameter(values) for name, values in SPACE.items()}

    def truth(self, changes: Changes) -> Truth:
        """Look a configuration up, or its nearest neighbour."""
        pool_mib = changes["kv_cache_memory_bytes"] / MIB
        if pool_mib < NEEDED_MIB:
            return Truth(None, NEEDED_MIB / pool_mib - 1, REFUSED_S)
        row = self._rows[self._nearest(changes)]
        trial_s = START_S + row["duration_s"] / row["speed"] + STOP_S
        return Truth((row["ttft_s"], row["tpot_s"]), NEEDED_MIB / pool_mib - 1, trial_s)

    def _nearest(self, changes: Changes) -> int:
        return int(np.argmin(np.abs(self._places - _place(changes)).sum(axis=1).round(9)))

    def note(self, changes: Changes) -> None:
        """Everything is known already."""

    def knowledge(self) -> Knowledge:
        """Return the memory model as a gate, and the calibrated twin."""
        base = base_config(self.file)
        first = [("calibration", c) for c in calibrating()]
        return Knowledge(base, self._gate, self._predictor(), BRIEF, first)

    def _gate(self, history: Callable[[], History]) -> Gate:
        predict = memory_predictor(self.file, machine_of(self.file), history)
        return Gate(None, predict, longest_tokens=3532, memory="verify")

    def _predictor(self) -> Predictor:
        predicted = {tuple(args): values for args, values in self._kept["predicted"]}

        def predict(changes: Changes, basis: int) -> Values | None:
            values = predicted.get(tuple(_canonical(changes).values()))
            return None if values is None or basis < CALIBRATED_ON else (values[0], values[1])

        return predict

    def known_points(self) -> list[Values]:
        """Return everything that was measured."""
        return [(row["ttft_s"], row["tpot_s"]) for row in self._rows]

    def corner(self) -> Values:
        """Return the reference point."""
        return corner_of(self.known_points())


def _canonical(args: Changes) -> dict[str, Any]:
    """Return the configuration of the grid that schedules the same."""
    same = {name: args.get(name, 0) for name in SPACE}
    if same["long_prefill_token_threshold"] >= same["max_num_batched_tokens"]:
        same["long_prefill_token_threshold"] = 0
    if same["max_num_seqs"] == 1 and same["kv_cache_memory_bytes"] >= NEEDED_MIB * MIB:
        same["kv_cache_memory_bytes"] = 1024 * MIB
    return same


def _place(args: Changes) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Position of a configuration, each parameter 0 to 1 in equal steps; no limit on long prompts is the loosest."""
    same = _canonical(args)
    places = [SPACE[name].index(value) / (len(SPACE[name]) - 1) for name, value in list(same.items())[:3]]
    return np.array([*places, [128, 512, 0].index(same["long_prefill_token_threshold"]) / 2])


# The snapshot ---------------------------------------------------------------------------------------------------------


def make_snapshot() -> str:
    """Take what the campaign has measured into the snapshot; says in a line what is in it.

    Raises
    ------
    RuntimeError
        When too little was measured.
    """
    from tuner.engine.protocol import MeasurePlan
    from tuner.engine.twin.calibrate import calibrate_by_probe, probe_speed
    from tuner.engine.twin.devices import find_device
    from tuner.engine.twin.engine import TwinEngine
    from tuner.engine.twin.replay import MeasuredTrial
    from tuner.model_files import config_folder

    file = read(QUICKSTART)
    base, folder = base_config(file), config_folder(file)
    assert folder is not None
    workload = build_workload(file, Path("/tmp") / "search-benchmark").workload
    measured = [
        (args, MeasuredTrial(base.with_args(args), workload, load(path), 1.0), again)
        for path, args, again in _folders()
    ]
    grid = [(args, trial) for args, trial, again in measured if not again]
    if len(grid) < 10:
        raise RuntimeError(f"{MEASURED}: only {len(grid)} configurations of the grid were measured")
    twin = TwinEngine(find_device("cpu"), folder)
    fitted = twin.with_coefficients(calibrate_by_probe([t for _, t in grid[:24]], twin))
    speeds = np.array([probe_speed(t, fitted) or 1.0 for _, t, _ in measured])
    speeds /= np.exp(np.log(speeds).mean())
    rows = [
        {"args": args, "again": again, "speed": round(float(s), 4), **_corrected(_raw(t.measurement), float(s))}
        for (args, t, again), s in zip(measured, speeds, strict=True)
    ]
    places = np.array([_place(args) for args, _ in grid])
    nearest = [int(np.argmin(np.abs(places - _place(c)).sum(axis=1))) for c in (DEFAULT, *calibrating())]
    knowing = twin.with_coefficients(calibrate_by_probe([grid[i][1] for i in nearest], twin))
    predicted = []
    for args in _cells():
        outcome = knowing.run(base.with_args(args), workload, MeasurePlan(speed_probe=False), lambda _: None)
        values = None if not hasattr(outcome, "requests") else list(_raw(outcome).values())[:2]
        predicted.append([list(args.values()), values])
    noise, basis = _noise(rows)
    write_json(
        SNAPSHOT,
        {
            "configurations": [_averaged(group) for group in _by_configuration(rows)],
            "measurements": rows,
            "noise": noise,
            "noise_basis": basis,
            "calibrated_on": [list(_canonical(grid[i][0]).values()) for i in nearest],
            "predicted": predicted,
        },
    )
    return f"{len(grid)} of {len(_cells())} configurations of the grid, noise {noise:.3f} ({basis})"


def _folders() -> Iterator[tuple[Path, dict[str, Any], bool]]:
    """Return (folder, arguments, whether it is a repeat) of everything of the grid that was measured."""
    for path in sorted(MEASURED.iterdir()):
        if not (path / "case.json").exists():
            continue
        args = json.loads((path / "case.json").read_text())["args"]
        cell = {"long_prefill_token_threshold": 0, **args}
        if cell.keys() == SPACE.keys() and all(cell[n] in SPACE[n] for n in SPACE):
            yield path, {n: cell[n] for n in SPACE}, "-again" in path.name


def _cells() -> list[dict[str, Any]]:
    """Return every configuration of the grid that can start and schedules like no other."""
    cells = (dict(zip(SPACE, values, strict=True)) for values in itertools.product(*SPACE.values()))
    return [c for c in cells if _canonical(c) == c and c["kv_cache_memory_bytes"] >= NEEDED_MIB * MIB]


def _raw(measurement: Any) -> dict[str, float]:
    from objectives.intervals import percentile
    from objectives.latency import is_served, tpot_s, ttft_s

    served = [r for r in measurement.requests if is_served(r)]
    ttft = percentile([t for r in served if (t := ttft_s(r)) is not None], 95)
    tpot = percentile([t for r in served if (t := tpot_s(r)) is not None], 95)
    return {"raw_ttft_s": ttft, "raw_tpot_s": tpot, "duration_s": sum(measurement.duration_s)}


def _corrected(raw: dict[str, float], speed: float) -> dict[str, float]:
    """Divide by the speed, as `objectives.speed.correct` does: of first order, queues grow faster."""
    values = {**raw, "ttft_s": raw["raw_ttft_s"] / speed, "tpot_s": raw["raw_tpot_s"] / speed}
    return {name: float(f"{value:.6g}") for name, value in values.items()}


def _by_configuration(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the measurements of each configuration of the grid, the first of them first."""
    firsts = [row for row in rows if not row["again"]]
    return [[first, *(r for r in rows if r["again"] and r["args"] == first["args"])] for first in firsts]


def _averaged(group: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a configuration with the geometric mean of its measurements as its values."""
    first = group[0]
    logs = np.log([[r["ttft_s"], r["tpot_s"]] for r in group])
    ttft_s, tpot_s = (float(f"{v:.6g}") for v in np.exp(logs.mean(axis=0)))
    kept = {name: first[name] for name in ("args", "speed", "duration_s")}
    return {**kept, "ttft_s": ttft_s, "tpot_s": tpot_s, "measurements": len(group)}


def _noise(rows: list[dict[str, Any]]) -> tuple[float, str]:
    """Standard deviation of the logarithm of a repeated measurement, both objectives together."""
    repeated = [g for g in _by_configuration(rows) if len(g) > 1]
    if len(repeated) < 5:
        return NOISE_UNTIL_REPEATED, "a stand-in: fewer than 5 configurations were measured again"
    squares, free = 0.0, 0
    for group in repeated:
        logs = np.log([[r["ttft_s"], r["tpot_s"]] for r in group])
        squares += float(((logs - logs.mean(axis=0)) ** 2).sum())
        free += 2 * (len(group) - 1)
    return round((squares / free) ** 0.5, 4), f"{len(repeated)} configurations measured again"
