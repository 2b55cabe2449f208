"""`tuner calibrate`: fits the twin to a study's measured trials, and says how well it then predicts them.

A trial that the coefficients were fitted to is predicted by a fit to the others, so that none is predicted by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from objectives.measurement import Failure, Measurement
from objectives.metrics import CORRECTED
from tuner.calibration import FILE, Calibration, Calibrator, calibrator_of, measured_trials
from tuner.engine.protocol import MeasurePlan
from tuner.engine.twin.calibrate import Followed, fit_sets, speed_among
from tuner.engine.twin.engine import TwinEngine
from tuner.engine.twin.replay import MeasuredTrial
from tuner.engine.twin.steptime import COMPONENTS
from tuner.errors import StudyFileError
from tuner.judge import judge, objectives_of, user_metrics
from tuner.ledger import History, TrialRecord
from tuner.opening import build_workload, memory_predictor, planned_machine
from tuner.study_file import StudyFile, read
from tuner.study_folder import STORE, StudyFolder, find
from tuner.workload.model import Workload

LIMIT_S = 60.0
"""What the comparison with measured trials may take; a trial of a large study takes the twin a second."""
FEWEST_TO_RANK = 3


@dataclass(frozen=True, slots=True)
class Compared:
    """One measured trial beside its prediction at the speed that its probes show: objective -> value."""

    number: int
    measured: Mapping[str, float]
    predicted: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What `tuner calibrate` found.

    Parameters
    ----------
    comparable:
        Measured trials that could have been compared; fewer were where the time was used up.
    """

    study: str
    device: str
    calibration: Calibration
    compared: tuple[Compared, ...]
    comparable: int
    seconds: float
    path: Path

    def document(self) -> dict[str, Any]:
        """Return the document of `tuner calibrate --json`."""
        return {
            "study": self.study,
            "device": self.device,
            **self.calibration.document(),
            "check": {
                "trials": [
                    {"number": c.number, "measured": dict(c.measured), "predicted": dict(c.predicted)}
                    for c in self.compared
                ],
                "comparable": self.comparable,
                "objectives": {
                    name: {"spearman": spearman, "median_error": error}
                    for name, (spearman, error) in self.agreement().items()
                },
            },
            "seconds": round(self.seconds, 1),
            "file": str(self.path),
        }

    def agreement(self) -> dict[str, tuple[float | None, float]]:
        """Return the Spearman correlation (`None` where it has no meaning) and the median relative error."""
        from scipy.stats import spearmanr

        found = {}
        for name in dict.fromkeys(name for c in self.compared for name in c.measured):
            pairs = np.array([(c.measured[name], c.predicted[name]) for c in self.compared if name in c.measured])
            varies = len(pairs) >= FEWEST_TO_RANK and bool((np.ptp(pairs, axis=0) > 0).all())
            rank = round(float(spearmanr(pairs[:, 0], pairs[:, 1])[0]), 4) if varies else None
            found[name] = (rank, round(float(np.median(np.abs(pairs[:, 1] / pairs[:, 0] - 1))), 4))
        return found

    def lines(self) -> list[str]:
        """Return it as lines for people."""
        shared = self.calibration.sets.shared
        numbers = ", ".join(str(number) for number in self.calibration.trials)
        lines = [
            f"{self.study}: calibrated for {self.device} on {len(self.calibration.trials)} trials ({numbers}) and "
            f"{shared.steps:,} of their steps, in {self.seconds:.0f} s"
        ]
        lines += [f"trial {number} is left out: {reason}" for number, reason in self.calibration.left_out.items()]
        lines += list(self._coefficients())
        if shared.ratio_interval is not None:
            low, high = shared.ratio_interval
            lines.append(
                f"measured steps took {low:.2f} to {high:.2f} times what is predicted (95%, 20 steps at a time)"
            )
        lines += list(self._agreement())
        return [*lines, f"kept in {self.path}; `tuner plan` predicts with it"]

    def _coefficients(self) -> Iterator[str]:
        sets = self.calibration.sets
        names = [key.partition("/")[2] for key in sets.by_key] if len(sets.by_key) > 1 else []
        columns = [sets.shared, *(sets.by_key.values() if names else ())]
        yield f"{'component':18}" + "".join(f"{head:>{max(8, len(head) + 2)}}" for head in ("factor", *names))
        for component in COMPONENTS:
            cells = [f"{c.values.get(component, 1.0):.2f}" for c in columns]
            widths = [8, *(max(8, len(name) + 2) for name in names)]
            known = "" if component in sets.shared.fitted else "   the catalogue's: no measured step shows it"
            yield f"{component:18}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)) + known

    def _agreement(self) -> Iterator[str]:
        if not self.compared:
            yield "how well it predicts is not known yet: that takes a second trial"
            return
        left = self.comparable - len(self.compared)
        yield (
            f"{len(self.compared)} trials predicted by a fit to others"
            + (f" ({left} more were not: the time was used up)" if left else "")
            + ":"
        )
        for name, (spearman, error) in self.agreement().items():
            rank = "" if spearman is None else f"Spearman {spearman:.2f}, "
            yield f"  {name:24} {rank}median error {error:.0%}"


def calibrate(study: str, say: Callable[[str], None], *, limit_s: float = LIMIT_S, store: Path = STORE) -> Calibrated:
    """Fit the twin to a study's measured trials, keep what was found, and compare it with what was measured.

    Raises
    ------
    StudyFileError
        When the study has no trial that can be used, or the model's `config.json` is not on this machine.
    TunerError
        When the device is not in the catalogue, or the store cannot be written.
    """
    file = read(find(study, store))
    folder = StudyFolder.of(file.spec.study, store)
    history = folder.ledger.history()
    machine, device = planned_machine(file)
    workload = build_workload(file, store).workload
    calibrator = calibrator_of(file, folder, workload, device, memory_predictor(file, machine, lambda: history))
    say("calibrate: replaying the steps of measured trials")
    began_s = time.monotonic()
    calibration = calibrator.of(history)
    if calibration is None:
        raise StudyFileError(str(file.path), [("", _nothing(file, history, calibrator, device.name))])
    calibrator.keep(history)
    seconds = time.monotonic() - began_s
    say("calibrate: predicting the measured trials")
    records = measured_trials(history, calibrator.twin)
    compared = tuple(_compare(file, workload, calibrator, calibration, records, limit_s))
    return Calibrated(
        study=file.spec.study,
        device=device.name,
        calibration=calibration,
        compared=compared,
        comparable=len(records) if len(calibration.trials) > 1 else len(compared),
        seconds=seconds,
        path=folder.path / FILE,
    )


def _nothing(file: StudyFile, history: History, calibrator: Calibrator, device: str) -> str:
    """Say why there is nothing to calibrate on, and what to do."""
    records = measured_trials(history, calibrator.twin)
    if not records:
        predicted = " (predicted ones do not count)" if any(t.predicted for t in history.finished) else ""
        return f"no trial of study {file.spec.study} was measured on {device} yet{predicted}; `tuner run` measures some"
    reasons = {r for t in records if isinstance(r := calibrator.followed(t), str)} or {"they have too few steps"}
    return f"no measured trial of study {file.spec.study} can be used: {'; '.join(sorted(reasons))}"


def _compare(
    file: StudyFile,
    workload: Workload,
    calibrator: Calibrator,
    calibration: Calibration,
    records: Sequence[TrialRecord],
    limit_s: float,
) -> Iterator[Compared]:
    """Predict measured trials, each by a fit that has not seen it, until they or the time is used up."""
    deadline_s = time.monotonic() + limit_s
    metrics = user_metrics(file)
    fitted = {
        t.number: f
        for t in records
        if t.number in calibration.trials and isinstance(f := calibrator.followed(t), Followed)
    }
    for record in records:
        others = [f for number, f in fitted.items() if number != record.number]
        trial = calibrator.measured(record)
        if not others or isinstance(trial, str) or record.score is None:
            continue
        if time.monotonic() > deadline_s:
            return
        sets = fit_sets(others, calibrator.twin) if record.number in fitted else calibration.sets
        twin = calibrator.twin.with_coefficients(sets)
        speed = speed_among(trial, [f.trial for f in others], twin) or 1.0
        scaled = calibrator.twin.with_coefficients(sets.scaled(speed))
        outcome = _predicted(trial, scaled, file.spec.measure.repeats)
        if outcome is None:
            continue
        values = judge(file, outcome, workload, None, metrics).values
        names = [o.name.removesuffix(CORRECTED) for o in objectives_of(file)]
        names = [n for n in names if n in values and record.score.values.get(n)]
        yield Compared(record.number, {n: record.score.values[n] for n in names}, {n: values[n] for n in names})


def _predicted(trial: MeasuredTrial, twin: TwinEngine, repeats: int) -> Measurement | None:
    """Predict a trial; `None` where the twin says that it would fail."""
    plan = MeasurePlan(repeats=repeats, run_budget_s=math.inf)
    outcome = twin.run(trial.config, trial.workload, plan, _silent)
    return None if isinstance(outcome, Failure) else outcome


def _silent(_: str) -> None:
    """Nobody listens to the stages of a prediction."""
