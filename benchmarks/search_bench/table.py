"""Problem (a): a table of the real CPU engine, measured by `benchmarks/cpu_table.py`.

What a configuration is worth is what `table_snapshot` makes of its measurements: what they would have been at the mean
speed of the machine. A run is told that with noise: by how much one of the repeated measurements, had all been made in
one sitting as a study is, differed from the mean of its configuration.

Two sizes of the KV cache are too small to start (180 MiB are needed) and were not measured: the infeasible half.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from search_bench.problem import Changes, Knowledge, Truth, Values, corner_of, parameter
from search_bench.table_snapshot import SNAPSHOT, deviations, make_snapshot, measurements
from search_bench.table_twin import Cell, TableTwin
from tuner.gate import Gate
from tuner.ledger import History
from tuner.opening import base_config, machine_of, memory_predictor
from tuner.search.guide import BRIEF
from tuner.study_file import StudyFile, parse

ROOT = Path(__file__).parents[2]
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


class Table:
    """The problem."""

    name = "cpu-table"
    title = "(a) real CPU engine, table"

    def __init__(self) -> None:
        kept: dict[str, Any] = json.loads(SNAPSHOT.read_text())
        self.version = hashlib.sha256(SNAPSHOT.read_bytes()).hexdigest()[:8]
        self.default: Changes = DEFAULT
        self._rows: dict[Cell, dict[str, Any]] = {_cell(row["args"]): row for row in kept["configurations"]}
        self._deviations = deviations(kept["measurements"], "seen_")

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
        """Draw by how much one of the repeated measurements differs from its configuration's mean in one sitting."""
        ttft, tpot = np.exp(generator.choice(self._deviations))
        return float(ttft), float(tpot)

    def note(self, changes: Changes) -> None:
        """Everything is known already."""

    def knowledge(self) -> Knowledge:
        """Return the memory model as a gate, and the twin that a run calibrates."""
        return Knowledge(base_config(study()), self._gate, self._twin.predictor, BRIEF)

    def _gate(self, history: Callable[[], History]) -> Gate:
        file = study()
        predict = memory_predictor(file, machine_of(file), history)
        return Gate(None, predict, longest_tokens=3532, memory="verify")

    @cached_property
    def _twin(self) -> TableTwin:
        firsts = {_cell(one.args): one.path for one in measurements(SPACE) if not one.again}
        return TableTwin(study(), firsts, _cell)

    def known_points(self) -> list[Values]:
        """Return everything that was measured."""
        return [(row["ttft_s"], row["tpot_s"]) for row in self._rows.values()]

    def corner(self) -> Values:
        """Return the reference point."""
        return corner_of(self.known_points())


def study() -> StudyFile:
    """Return the quickstart study with the table's space."""
    document = yaml.safe_load(QUICKSTART.read_text())
    document |= {"study": Table.name, "space": SPACE, "recipes": []}
    document["model"] = "../../../models/smollm2-135m-instruct"
    path = SNAPSHOT.with_name(f"{Table.name}.yaml")
    return StudyFile(path, parse(document, path))


def make_table() -> str:
    """Take what the campaign has measured into the snapshot; says in lines what is in it.

    Raises
    ------
    RuntimeError
        When the grid is not whole.
    """
    measured = list(measurements(SPACE))
    cells = [_cell(one.args) for one in measured]
    if lacking := set(_cells()) - set(cells):
        raise RuntimeError(f"{len(lacking)} of {len(_cells())} configurations of the grid were not measured")
    return make_snapshot(measured, cells, TableTwin(study(), {}, _cell))


def _cell(args: Changes) -> Cell:
    """Return the configuration of the grid that schedules the same."""
    same = {name: args.get(name, 0) for name in SPACE}
    if same["long_prefill_token_threshold"] >= same["max_num_batched_tokens"]:
        same["long_prefill_token_threshold"] = 0
    if same["max_num_seqs"] == 1 and same["kv_cache_memory_bytes"] >= NEEDED_MIB * MIB:
        same["kv_cache_memory_bytes"] = 1024 * MIB
    return tuple(int(value) for value in same.values())


def _cells() -> list[Cell]:
    """Return every configuration of the grid that can start and schedules like no other."""
    cells = (dict(zip(SPACE, values, strict=True)) for values in itertools.product(*SPACE.values()))
    return list(dict.fromkeys(_cell(c) for c in cells if c["kv_cache_memory_bytes"] >= NEEDED_MIB * MIB))
