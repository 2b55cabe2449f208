"""The twin in a helper process: predicts a study's objectives while its trials run, calibrated on those so far.

`TwinHelper` is the driver's side. Run as a module, this file is the helper: a JSON document a line in, one a line out,
on a pipe of its own. It ends by itself when the driver is gone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from objectives.measurement import Measurement
from tuner.calibration import Calibrator, measured_trials
from tuner.engine.protocol import MeasurePlan
from tuner.engine.twin.engine import TwinEngine
from tuner.errors import EngineUnsupportedError, TunerError
from tuner.judge import judge, objectives_of, user_metrics
from tuner.ledger import History
from tuner.model_files import config_folder
from tuner.opening import base_config, build_workload, make_twin, memory_predictor, planned_machine
from tuner.space import Value
from tuner.study_file import StudyFile, read
from tuner.study_folder import StudyFolder

NICE = 10
"""Predictions give way to the engines' own processes."""


class TwinHelper:
    """Asks a helper process for predictions; started on the first question.

    Parameters
    ----------
    log_path:
        Where the helper's own output goes.
    noted:
        Told once, in a sentence, when the twin cannot predict this study.
    """

    def __init__(self, file: StudyFile, store: Path, log_path: Path, noted: Callable[[str], None]) -> None:
        self._arguments = [str(file.path), str(store)]
        self._log_path = log_path
        self._noted = noted
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: IO[bytes] | None = None
        self._is_out = False

    def __call__(self, configurations: Sequence[Mapping[str, Value]], basis: int) -> list[Sequence[float] | None]:
        """Return the predicted objectives of each configuration; `None` for all of them once the twin is out."""
        return [self._predicted(changes, basis) for changes in configurations]

    def _predicted(self, changes: Mapping[str, Value], basis: int) -> Sequence[float] | None:
        if self._is_out:
            return None
        answer = self._ask({"changes": dict(changes), "basis": basis})
        if "out" in answer and not self._is_out:
            self._is_out = True
            self._noted(f"the twin does not guide this study: {answer['out']}")
            self.close()
        values: Sequence[float] | None = answer.get("values")
        return values

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._answers is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            line = self._answers.readline()
        except (BrokenPipeError, ValueError):  # the helper is gone, or closed meanwhile
            line = b""
        if not line.endswith(b"\n"):
            return {"out": f"its process ended; its log is {self._log_path}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> None:
        read, write = os.pipe()
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(write), *self._arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write],
                start_new_session=True,
            )
        os.close(write)
        self._answers = os.fdopen(read, "rb")

    def close(self) -> None:
        """End the helper. Idempotent; a question that waits is answered with nothing."""
        self._is_out = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            assert self._answers is not None
            with contextlib.suppress(BrokenPipeError):  # it closes all the same
                self._process.stdin.close()
            self._answers.close()


def twin_of(file: StudyFile, store: Path, noted: Callable[[str], None]) -> TwinHelper | None:
    """Return what predicts a study's objectives while it runs; `None` where nothing is to be predicted."""
    wanted = file.spec.search.twin and file.spec.search.sampler == "gp" and file.spec.engine.backend == "vllm"
    if not wanted or config_folder(file) is None:
        return None
    return TwinHelper(file, store, StudyFolder.of(file.spec.study, store).path / "twin.log", noted)


class _Oracle:
    """The helper's side: predictions of one study."""

    def __init__(self, file: StudyFile, store: Path) -> None:
        self._file = file
        self._metrics = user_metrics(file)
        self._objectives = [o.name for o in objectives_of(file)]
        self._base = base_config(file)
        self._workload = build_workload(file, store).workload
        self._folder = StudyFolder.of(file.spec.study, store)
        self._history = History(None, (), (), ())
        machine, device = planned_machine(file)
        self._twin = make_twin(file, device, memory_predictor(file, machine, lambda: self._history))
        self._calibrator = Calibrator(self._folder, self._workload, self._twin)
        self._calibrated: tuple[int, TwinEngine] | None = None

    def predict(self, changes: Mapping[str, Value], basis: int) -> list[float] | None:
        """Return the objectives; infinite where an engine would not run, `None` where the twin cannot say."""
        if self._calibrated is None or self._calibrated[0] != basis:
            self._history = self._first(basis)
            self._calibrated = (basis, self._calibrator.engine(self._history))
        plan = MeasurePlan(speed_probe=False, run_budget_s=self._file.spec.measure.run_budget_s)
        try:
            outcome = self._calibrated[1].run(self._base.with_args(changes), self._workload, plan, _silent)
        except EngineUnsupportedError:
            return None
        if not isinstance(outcome, Measurement):
            return [math.inf] * len(self._objectives)
        values = judge(self._file, outcome, self._workload, None, self._metrics).values
        return [values[n] for n in self._objectives] if all(n in values for n in self._objectives) else None

    def _first(self, basis: int) -> History:
        """Return the study as it was when so many trials were measured."""
        history = self._folder.ledger.history()
        measured = sorted(measured_trials(history, self._twin), key=lambda t: t.finished_at or 0.0)[:basis]
        return replace(history, trials=tuple(sorted(measured, key=lambda t: t.number)))


def _silent(_: str) -> None:
    """Nobody listens to the stages of a prediction."""


def _serve(answers: IO[str], file_path: Path, store: Path) -> None:
    """Answer questions until the driver closes the pipe or is gone."""
    os.environ.update({"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"})
    os.nice(NICE)
    oracle: _Oracle | None = None
    for line in sys.stdin:
        question = json.loads(line)
        answer: dict[str, Any]
        try:
            oracle = oracle or _Oracle(read(file_path), store)
            answer = {"values": oracle.predict(question["changes"], question["basis"])}
        except (TunerError, ImportError) as error:
            answer = {"out": " ".join(str(error).split())}
        with contextlib.suppress(BrokenPipeError):
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "w") as pipe:
        _serve(pipe, Path(sys.argv[2]), Path(sys.argv[3]))
