"""Problem (a): a table of the real CPU engine, measured by `benchmarks/cpu_table.py`.

The table is a snapshot of what the campaign has measured: raw p95 values, the speed of the machine at that time (the
measured probe over the probe that the calibrated twin expects of the same configuration), and the values divided by it.
What was measured more than once, as the front was, is worth the mean; by how much such measurements differ from their
mean is the noise of a run, drawn from them.

Two sizes of the KV cache are too small to start (180 MiB are needed) and were not measured: the infeasible half.
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

from search_bench.problem import Changes, Knowledge, Truth, Values, corner_of, parameter
from search_bench.table_twin import Cell, TableTwin, figures
from tuner.artifacts import load, write_json
from tuner.gate import Gate
from tuner.ledger import History
from tuner.opening import base_config, build_workload, machine_of, memory_predictor
from tuner.search.guide import BRIEF
from tuner.study_file import StudyFile, parse, read

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
SPEEDS_FROM = 24
"""So many configurations calibrate the twin that says what the speed probe of each should take."""


class Table:
    """The problem."""

    name = "cpu-table"
    title = "(a) real CPU engine, table"

    def __init__(self) -> None:
        kept: dict[str, Any] = json.loads(SNAPSHOT.read_text())
        self.version = hashlib.sha256(SNAPSHOT.read_bytes()).hexdigest()[:8]
        self.default: Changes = DEFAULT
        self._rows: dict[Cell, dict[str, Any]] = {_cell(row["args"]): row for row in kept["configurations"]}
        self._deviations = _deviations(kept["measurements"])

    @cached_property
    def file(self) -> StudyFile:
        """The quickstart study with the table's space."""
        document = yaml.safe_load(QUICKSTART.read_text())
        document |= {"study": self.name, "space": SPACE, "recipes": []}
        document["model"] = "../../../models/smollm2-135m-instruct"
        path = SNAPSHOT.with_name(f"{self.name}.yaml")
        return StudyFile(path, parse(document, path))

    @cached_property
    def space(self) -> Any:
        """The study's space, in the order in which everybody else's search has it."""
        return {name: parameter(values) for name, values in SPACE.items()}

    def truth(self, changes: Changes) -> Truth:
        """Look a configuration up."""
        pool_mib = changes["kv_cache_memory_bytes"] / MIB
        if pool_mib < NEEDED_MIB:
            return Truth(None, NEEDED_MIB / pool_mib - 1, REFUSED_S)
        row = self._rows[_cell(changes)]
        trial_s = START_S + row["duration_s"] / row["speed"] + STOP_S
        return Truth((row["ttft_s"], row["tpot_s"]), NEEDED_MIB / pool_mib - 1, trial_s)

    def noise(self, generator: np.random.Generator) -> Values:
        """Draw by how much one of the repeated measurements differed from the mean of its configuration."""
        ttft, tpot = np.exp(generator.choice(self._deviations))
        return float(ttft), float(tpot)

    def note(self, changes: Changes) -> None:
        """Everything is known already."""

    def knowledge(self) -> Knowledge:
        """Return the memory model as a gate, and the twin that a run calibrates."""
        return Knowledge(base_config(self.file), self._gate, self._twin.predictor, BRIEF)

    def _gate(self, history: Callable[[], History]) -> Gate:
        predict = memory_predictor(self.file, machine_of(self.file), history)
        return Gate(None, predict, longest_tokens=3532, memory="verify")

    @cached_property
    def _twin(self) -> TableTwin:
        firsts = {_cell(args): path for path, args, again in _folders() if not again}
        return TableTwin(self.file, firsts, _cell)

    def known_points(self) -> list[Values]:
        """Return everything that was measured."""
        return [(row["ttft_s"], row["tpot_s"]) for row in self._rows.values()]

    def corner(self) -> Values:
        """Return the reference point."""
        return corner_of(self.known_points())


def _cell(args: Changes) -> Cell:
    """Return the configuration of the grid that schedules the same."""
    same = {name: args.get(name, 0) for name in SPACE}
    if same["long_prefill_token_threshold"] >= same["max_num_batched_tokens"]:
        same["long_prefill_token_threshold"] = 0
    if same["max_num_seqs"] == 1 and same["kv_cache_memory_bytes"] >= NEEDED_MIB * MIB:
        same["kv_cache_memory_bytes"] = 1024 * MIB
    return tuple(int(value) for value in same.values())


# The snapshot ---------------------------------------------------------------------------------------------------------


def make_snapshot() -> str:
    """Take what the campaign has measured into the snapshot; says in a line what is in it.

    Raises
    ------
    RuntimeError
        When the grid is not whole.
    """
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
    if lacking := set(_cells()) - {_cell(args) for args, _ in grid}:
        raise RuntimeError(
            f"{MEASURED}: {len(lacking)} of {len(_cells())} configurations of the grid were not measured"
        )
    twin = TwinEngine(find_device("cpu"), folder)
    fitted = twin.with_coefficients(calibrate_by_probe([t for _, t in grid[:SPEEDS_FROM]], twin))
    speeds = np.array([probe_speed(t, fitted) or 1.0 for _, t, _ in measured])
    speeds /= np.exp(np.log(speeds).mean())
    rows = []
    for (args, trial, again), speed in zip(measured, speeds, strict=True):
        ttft_s, tpot_s = figures(trial.measurement)
        values = {
            "raw_ttft_s": ttft_s,
            "raw_tpot_s": tpot_s,
            "duration_s": sum(trial.measurement.duration_s),
            # Of first order, as `objectives.speed.correct` does it: queues grow faster.
            "ttft_s": ttft_s / float(speed),
            "tpot_s": tpot_s / float(speed),
        }
        rounded = {name: float(f"{value:.6g}") for name, value in values.items()}
        rows.append({"args": args, "again": again, "speed": round(float(speed), 4), **rounded})
    groups = _by_configuration(rows)
    write_json(SNAPSHOT, {"configurations": [_averaged(group) for group in groups], "measurements": rows})
    spread = _deviations(rows)
    half, most = (np.percentile(np.abs(spread), share, axis=0) for share in (50, 95))
    return (
        f"{len(grid)} configurations, {sum(len(g) > 1 for g in groups)} of them measured again; noise of TTFT and of "
        f"TPOT: standard deviation {_each(spread.std(axis=0))}, half within {_each(half)}, 95% within {_each(most)}"
    )


def _each(shares: Any) -> str:
    return " and ".join(f"{share:.1%}" for share in shares)


def _folders() -> Iterator[tuple[Path, dict[str, Any], bool]]:
    """Return (folder, arguments, whether it is a repeat) of everything of the grid that was measured."""
    for path in sorted(MEASURED.iterdir()):
        if not (path / "case.json").exists():
            continue
        args = json.loads((path / "case.json").read_text())["args"]
        cell = {"long_prefill_token_threshold": 0, **args}
        if cell.keys() == SPACE.keys() and all(cell[n] in SPACE[n] for n in SPACE):
            yield path, {n: cell[n] for n in SPACE}, "-again" in path.name


def _cells() -> list[Cell]:
    """Return every configuration of the grid that can start and schedules like no other."""
    cells = (dict(zip(SPACE, values, strict=True)) for values in itertools.product(*SPACE.values()))
    return list(dict.fromkeys(_cell(c) for c in cells if c["kv_cache_memory_bytes"] >= NEEDED_MIB * MIB))


def _by_configuration(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the measurements of each configuration of the grid, the first of them first."""
    firsts = [row for row in rows if not row["again"]]
    return [[first, *(r for r in rows if r["again"] and r["args"] == first["args"])] for first in firsts]


def _logarithms(group: list[dict[str, Any]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.log([[row["ttft_s"], row["tpot_s"]] for row in group])


def _averaged(group: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a configuration with the geometric mean of its measurements as its values."""
    first = group[0]
    ttft_s, tpot_s = (float(f"{v:.6g}") for v in np.exp(_logarithms(group).mean(axis=0)))
    kept = {name: first[name] for name in ("args", "speed", "duration_s")}
    return {**kept, "ttft_s": ttft_s, "tpot_s": tpot_s, "measurements": len(group)}


def _deviations(rows: list[dict[str, Any]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return by how much repeated measurements differ from their mean (n, 2), as logarithms.

    A mean of few lies closer to each of them than the truth does: they are stretched to the size that a deviation from
    the truth has.
    """
    repeated = [_logarithms(group) for group in _by_configuration(rows) if len(group) > 1]
    return np.vstack([(g - g.mean(axis=0)) * (len(g) / (len(g) - 1)) ** 0.5 for g in repeated])
