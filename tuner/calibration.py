"""A study's measured trials as the twin's coefficients: which trials, what was fitted, and where it is kept.

Pure but for the study's folder, from which it reads the trials' tables and where it keeps `calibration.json`. Starts
no engine. The replay of a trial costs most (a second for some thousand steps), so each is replayed once in a process
and only so many trials and steps of each are: a calibration from nothing takes seconds, another trial a fraction.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tuner import __version__, artifacts
from tuner.artifacts import write_json
from tuner.engine.twin.calibrate import MIN_AGREEMENT, MIN_STEPS, Followed, fit_sets, follow
from tuner.engine.twin.coefficient_sets import CoefficientSets
from tuner.engine.twin.devices import EFFICIENCY, DeviceSpec, find_device
from tuner.engine.twin.engine import TwinEngine
from tuner.engine.twin.replay import MeasuredTrial
from tuner.engine.twin.steptime import COMPONENTS
from tuner.errors import StoreError, UsageError
from tuner.gate import ForMemory
from tuner.ledger import History, TrialRecord, TrialState
from tuner.study_file import StudyFile
from tuner.study_folder import StudyFolder
from tuner.workload.model import Workload

_T = TypeVar("_T")

FILE = "calibration.json"
MOST_TRIALS = 16
"""Seven coefficients are well known from a few trials; more of them cost time and change little."""
MOST_STEPS = 2000
"""Steps of one trial that are replayed, from its start: the ramp and the crowd after it are among them."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a study's trials say of the twin's step times.

    Parameters
    ----------
    trials:
        Numbers of the trials that the coefficients were fitted to.
    left_out:
        Number of a measured trial that cannot be used -> why.
    """

    sets: CoefficientSets
    trials: tuple[int, ...]
    left_out: Mapping[int, str]

    def document(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        return {
            "trials": list(self.trials),
            "left_out": {str(number): reason for number, reason in self.left_out.items()},
            "sets": self.sets.document(),
        }

    @staticmethod
    def from_document(document: Any) -> Calibration:
        """Read what `document` returned.

        Raises
        ------
        StoreError
            It is no such document.
        """
        try:
            trials = tuple(int(number) for number in document["trials"])
            left_out = {int(number): str(reason) for number, reason in document["left_out"].items()}
            return Calibration(CoefficientSets.from_document(document["sets"]), trials, left_out)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"This is not a calibration ({error}); calibrate again.") from error


class Calibrator:
    """Calibrates the twin of one study, again and again as the study goes on.

    Parameters
    ----------
    twin:
        Predicts the study's trials on the device that they are measured on; its own coefficients are not used.
    """

    def __init__(self, folder: StudyFolder, workload: Workload, twin: TwinEngine) -> None:
        self._folder = folder
        self._workload = workload
        self._twin = twin
        self._followed: dict[tuple[int, float], Followed | str] = {}
        self._latest: tuple[str, Calibration | None] | None = None

    @property
    def twin(self) -> TwinEngine:
        """The twin as it was given."""
        return self._twin

    def of(self, history: History) -> Calibration | None:
        """Return the calibration by the trials of a study so far; `None` while none of them can be used.

        The same trials give the same calibration without work, also from the file that `keep` wrote.
        """
        trials = usable(history, self._twin)
        basis = self._basis(trials)
        if self._latest is None or self._latest[0] != basis:
            self._latest = (basis, self._kept(basis) or self._fitted(trials))
        return self._latest[1]

    def engine(self, history: History) -> TwinEngine:
        """Return the twin, calibrated by the trials so far, or with the catalogue's step times while none can be used.

        What it predicts is for the speed that the machine had on average over those trials.
        """
        found = self.of(history)
        return self._twin if found is None else self._twin.with_coefficients(found.sets)

    def keep(self, history: History) -> None:
        """Write the calibration to `calibration.json` in the study's folder, whole or not at all.

        Raises
        ------
        StoreError
            When the file system refuses.
        """
        found = self.of(history)
        if found is not None and self._latest is not None:
            write_json(self._folder.path / FILE, {"basis": self._latest[0], **found.document()})

    def measured(self, record: TrialRecord) -> MeasuredTrial | str:
        """Read a trial from its tables, or say why it cannot be used."""
        try:
            measurement = artifacts.load(self._folder.trial(record.number))
        except StoreError as error:
            return str(error)
        prompts = [r.prompt_tokens for r in self._workload.requests]
        for request in measurement.requests:
            index = int(request.request_id.rsplit("-", 1)[-1])
            if index >= len(prompts) or prompts[index] != request.prompt_tokens:
                return "its requests are not those of the study file's workload"
        return MeasuredTrial(record.config, self._workload, measurement)

    def followed(self, record: TrialRecord) -> Followed | str:
        """Replay a trial, or say why it cannot be used; once for each."""
        key = (record.number, record.started_at)
        if key not in self._followed:
            trial = self.measured(record)
            self._followed[key] = trial if isinstance(trial, str) else self._replayed(trial)
        return self._followed[key]

    def _replayed(self, trial: MeasuredTrial) -> Followed | str:
        if not trial.measurement.steps:
            return "it has no step rows"
        followed = follow(trial, self._twin, MOST_STEPS)
        if followed is not None:
            return followed
        return f"the twin's scheduler agrees with fewer than {MIN_AGREEMENT:.0%} of its steps"

    def _fitted(self, trials: Sequence[TrialRecord]) -> Calibration | None:
        answers = {t.number: self.followed(t) for t in trials}
        good = {number: f for number, f in answers.items() if isinstance(f, Followed)}
        if sum(len(f.measured_s) for f in good.values()) < MIN_STEPS:
            return None
        return Calibration(
            sets=fit_sets(list(good.values()), self._twin),
            trials=tuple(good),
            left_out={number: f for number, f in answers.items() if isinstance(f, str)},
        )

    def _basis(self, trials: Sequence[TrialRecord]) -> str:
        """Name everything that a calibration follows from: the trials, and what its coefficients are factors on."""
        device = self._twin.device
        parts = [
            __version__,
            COMPONENTS,
            dataclasses.astuple(device),
            dataclasses.astuple(EFFICIENCY[device.kind]),
            self._workload.fingerprint(),
            [(t.number, t.started_at, t.config.key()) for t in trials],
        ]
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]

    def _kept(self, basis: str) -> Calibration | None:
        """Read the file, if it is there and follows from the same; what cannot be read is made again."""
        try:
            document = json.loads((self._folder.path / FILE).read_text())
            return Calibration.from_document(document) if document["basis"] == basis else None
        except (OSError, ValueError, KeyError, TypeError, StoreError):
            return None


def calibrator_of(
    file: StudyFile, folder: StudyFolder, workload: Workload, device: DeviceSpec, memory: ForMemory
) -> Calibrator:
    """Return the calibrator of a study for a device of the catalogue.

    Raises
    ------
    StudyFileError
        When the model's `config.json` is not on this machine.
    """
    from tuner.opening import make_twin

    return Calibrator(folder, workload, make_twin(file, device, memory))


def usable(history: History, twin: TwinEngine) -> list[TrialRecord]:
    """Choose the trials that the twin of a study is calibrated on: measured, valid, on its device.

    Of several measurements of one configuration the latest; of more than `MOST_TRIALS` configurations so many, evenly
    over the study, the first and the latest among them.
    """
    latest = {t.config.key(): t for t in measured_trials(history, twin)}
    return evenly(sorted(latest.values(), key=lambda t: t.number))


def evenly(trials: Sequence[_T]) -> list[_T]:
    """Choose `MOST_TRIALS` of trials at even distances, the first and the last among them; of fewer, all."""
    if len(trials) <= MOST_TRIALS:
        return list(trials)
    return [trials[round(i * (len(trials) - 1) / (MOST_TRIALS - 1))] for i in range(MOST_TRIALS)]


def measured_trials(history: History, twin: TwinEngine) -> list[TrialRecord]:
    """Return every trial that was measured on the twin's device and may be compared."""
    return [
        t
        for t in history.finished
        if t.state in (TrialState.COMPLETE, TrialState.INFEASIBLE) and not t.predicted and _is_on(t, twin)
    ]


def _is_on(record: TrialRecord, twin: TwinEngine) -> bool:
    """Whether an engine ran the trial on the twin's device."""
    if record.engine is None:
        return False
    try:
        return find_device(record.engine.device_name).name == twin.device.name
    except UsageError:
        return False
