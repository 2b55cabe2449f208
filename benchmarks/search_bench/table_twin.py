"""What the tuner's twin says of the table's configurations: as in a study, calibrated on the trials of the run itself.

What a trial of a configuration leaves on disk is there: the rows of its first measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path

from objectives.intervals import percentile
from objectives.latency import is_served, tpot_s, ttft_s
from objectives.measurement import Measurement
from search_bench.problem import Changes, Predictor, Values
from tuner.artifacts import load
from tuner.calibration import MOST_STEPS, evenly
from tuner.config import EngineConfig
from tuner.engine.protocol import MeasurePlan
from tuner.engine.twin.calibrate import MIN_STEPS, Followed, fit_sets, follow
from tuner.engine.twin.coefficient_sets import CoefficientSets
from tuner.engine.twin.devices import find_device
from tuner.engine.twin.engine import TwinEngine
from tuner.engine.twin.replay import MeasuredTrial
from tuner.engine.twin.steptime import Coefficients
from tuner.ledger import History
from tuner.model_files import config_folder
from tuner.opening import base_config, build_workload
from tuner.study_file import StudyFile
from tuner.workload.model import Workload

Cell = tuple[int, ...]
"""Values of a configuration of the grid, in the order of the space."""


class TableTwin:
    """The twin of the CPU that the table was measured on.

    Parameters
    ----------
    file:
        The study.
    rows:
        Folder of the rows of each configuration's first measurement.
    cell_of:
        The configuration of the grid that is scheduled as a configuration is.
    """

    def __init__(self, file: StudyFile, rows: Mapping[Cell, Path], cell_of: Callable[[Changes], Cell]) -> None:
        self._file = file
        self._rows = rows
        self._cell_of = cell_of
        self._followed = lru_cache(maxsize=None)(lambda cell: self.follow(cell, self._rows[cell]))
        self._calibrated = lru_cache(maxsize=None)(self._calibrate)
        self._predicted = lru_cache(maxsize=None)(self._predict)

    def predictor(self, history: Callable[[], History]) -> Predictor:
        """Return what predicts by the first of the trials so far."""

        def predict(changes: Changes, basis: int) -> Values | None:
            measured = dict.fromkeys(self._cell_of(t.params) for t in history().trials if t.engine is not None)
            return self._predicted(tuple(measured)[:basis], self._cell_of(changes))

        return predict

    @cached_property
    def catalogue(self) -> TwinEngine:
        """The twin that nothing was measured for."""
        folder = config_folder(self._file)
        assert folder is not None
        return TwinEngine(find_device("cpu"), folder)

    def follow(self, cell: Cell, rows: Path) -> Followed:
        """Replay a measurement of a configuration, from a folder with its rows.

        Raises
        ------
        RuntimeError
            When the twin's scheduler cannot follow it.
        """
        trial = MeasuredTrial(self._config(cell), self._workload, load(rows))
        found = follow(trial, self.catalogue, MOST_STEPS)
        if found is None:
            raise RuntimeError(f"{rows}: the twin's scheduler cannot follow it")
        return found

    def at(self, cell: Cell, coefficients: Coefficients) -> Values:
        """Predict a configuration with some coefficients."""
        return self._figures(self.catalogue.with_coefficients(CoefficientSets(coefficients)), cell)

    @cached_property
    def _base(self) -> EngineConfig:
        return base_config(self._file)

    @cached_property
    def _workload(self) -> Workload:
        return build_workload(self._file, Path("/tmp") / "search-benchmark").workload

    def _config(self, cell: Cell) -> EngineConfig:
        return self._base.with_args(dict(zip(self._file.spec.space, cell, strict=True)))

    def _calibrate(self, cells: tuple[Cell, ...]) -> TwinEngine:
        followed = [self._followed(cell) for cell in evenly(cells)]
        if sum(len(f.measured_s) for f in followed) < MIN_STEPS:
            return self.catalogue
        return self.catalogue.with_coefficients(fit_sets(followed, self.catalogue))

    def _predict(self, calibrated_on: tuple[Cell, ...], cell: Cell) -> Values:
        return self._figures(self._calibrated(calibrated_on), cell)

    def _figures(self, twin: TwinEngine, cell: Cell) -> Values:
        outcome = twin.run(self._config(cell), self._workload, MeasurePlan(speed_probe=False), lambda _: None)
        return figures(outcome) if isinstance(outcome, Measurement) else (math.inf, math.inf)


def figures(measured: Measurement) -> Values:
    """p95 of TTFT and TPOT in seconds."""
    served = [r for r in measured.requests if is_served(r)]
    ttft, tpot = ([t for r in served if (t := of(r)) is not None] for of in (ttft_s, tpot_s))
    return percentile(ttft, 95), percentile(tpot, 95)
