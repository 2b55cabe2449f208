"""What happened: an append-only file of JSON lines, one durable record a finished trial.

The ledger is written, and synced to disk, before Optuna or MLflow hear of a trial; both are brought up to date from it.
A line that a crash cut off in the middle is dropped on reading, and only if it is the last one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from objectives.measurement import EngineFacts, Failure, SpeedProbe
from objectives.score import Score
from tuner.config import EngineConfig
from tuner.errors import StoreError


class TrialState(StrEnum):
    """What became of a trial."""

    COMPLETE = "complete"
    """Measured, valid, and within every constraint."""
    INFEASIBLE = "infeasible"
    """The configuration's fault: refused by the gate, failed for memory, invalid, or measured beyond a constraint."""
    VOID = "void"
    """Measured, but the measurement must not be compared."""
    CENSORED = "censored"
    """Ended early, since it was certain to be worse in every objective than a trial before: bounds, no measurement."""
    FAILED = "failed"
    """The machine's fault, or the tuner was interrupted; never held against the configuration."""
    RUNNING = "running"
    """Begun and not yet finished."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One failed or void try within a trial that was followed by another: what went wrong and how long it took."""

    failure: Failure | None
    void: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One trial of a study, finished or running.

    Parameters
    ----------
    number:
        Counts from 0 within the study; trial 0 is vLLM's defaults, the reference.
    source:
        Who proposed it: `"reference"`, `"recipe:NAME"`, `"design"`, `"sampler"`, `"twin"`, `"operator"`,
        or `"sentinel"`, `"confirm"` and `"alone"` for repeated measurements, which `repeats` then points at.
    params:
        Values of the searched parameters only, as the study file names them (`env.NAME` for variables).
    config:
        Everything that the engine is started with.
    score, engine, speed_before, speed_after:
        Present when an engine ran the workload to its end.
    started_at, finished_at:
        Unix seconds (wall clock).
    engine_s:
        Seconds that an engine was occupied by this trial, over all attempts; 0 for one that the gate refused.
    repeats:
        Number of the trial whose configuration this one measures again, or `None`.
    effective_key:
        Equal for configurations that are the same to the engine; `None` where vLLM refused to say.
    neighbours:
        Other engines of the study that worked on the same machine at some time during the last attempt, at most.
    """

    number: int
    state: TrialState
    source: str
    params: Mapping[str, Any]
    config: EngineConfig
    started_at: float
    finished_at: float | None = None
    score: Score | None = None
    failure: Failure | None = None
    engine: EngineFacts | None = None
    speed_before: SpeedProbe | None = None
    speed_after: SpeedProbe | None = None
    attempts: tuple[Attempt, ...] = ()
    engine_s: float = 0.0
    predicted: bool = False
    repeats: int | None = None
    effective_key: str | None = None
    neighbours: int = 0


@dataclass(frozen=True, slots=True)
class StudyHeader:
    """First line of a ledger: what every record below belongs to."""

    study: str
    spec_hash: str
    workload_fingerprint: str
    workload_name: str
    vllm_version: str
    tuner_version: str
    created_at: float
    kind: Literal["study"] = "study"


@dataclass(frozen=True, slots=True)
class TrialLine:
    """A trial begun (state `running`) or finished; the last line of a number holds."""

    record: TrialRecord
    kind: Literal["trial"] = "trial"


@dataclass(frozen=True, slots=True)
class VerifiedRun:
    """One engine start of a verification: its round, its side ("default" or "pick"), its objectives, its probe."""

    round: int
    side: str
    values: Mapping[str, float]
    probe: SpeedProbe | None = None


@dataclass(frozen=True, slots=True)
class Agreement:
    """One objective as the study measured it in process, and as the served configuration has it over HTTP.

    Parameters
    ----------
    change:
        Relative: served / in_process - 1.
    tolerance:
        Size of `change` that the noise of both allows.
    speed_index:
        How many times as long the speed probe took as when the study measured the trial; `None` without a probe.
    corrected:
        `change` without what the speed index accounts for; `None` where there is no index, or the objective does not
        follow the machine's speed.
    """

    name: str
    in_process: float
    served: float
    change: float
    tolerance: float
    speed_index: float | None = None
    corrected: float | None = None

    @property
    def within_noise(self) -> bool:
        """Whether the noise allows the difference."""
        return abs(self.change) <= self.tolerance


@dataclass(frozen=True, slots=True)
class Verification:
    """The pick measured again against the reference, interleaved.

    `change` maps an objective to its relative change (-0.2 is 20% less) and `interval` to that change's 95% interval;
    `verdict` maps it to "better", "worse" or "no difference". `runs` are all that counted, in order; `agreement` is
    there for what was measured over HTTP.
    """

    number: int
    rounds: int
    change: Mapping[str, float]
    interval: Mapping[str, tuple[float, float]]
    verdict: Mapping[str, str]
    over_http: bool
    finished_at: float
    runs: tuple[VerifiedRun, ...] = ()
    agreement: tuple[Agreement, ...] = ()
    kind: Literal["verification"] = "verification"

    @property
    def found_better(self) -> bool:
        """Whether it is better in some objective, beyond what the noise allows."""
        return "better" in self.verdict.values()


@dataclass(frozen=True, slots=True)
class StudyNote:
    """Something that concerns the whole study: why it stopped, drift that was seen, a gate that was switched off."""

    code: str
    text: str
    at: float
    values: Mapping[str, float] = field(default_factory=dict)
    kind: Literal["note"] = "note"


LedgerLine = Annotated[StudyHeader | TrialLine | Verification | StudyNote, Field(discriminator="kind")]
_LINE: TypeAdapter[StudyHeader | TrialLine | Verification | StudyNote] = TypeAdapter(
    LedgerLine, config=ConfigDict(ser_json_inf_nan="constants")
)
"""An infinity is written as such: as `null`, which is the default, the line could not be read again."""


@dataclass(frozen=True, slots=True)
class History:
    """Everything that a ledger says, last line a trial, trials in order of their number."""

    header: StudyHeader | None
    trials: tuple[TrialRecord, ...]
    verifications: tuple[Verification, ...]
    notes: tuple[StudyNote, ...]

    def after(self, line: TrialLine | StudyNote) -> History:
        """Return what the ledger says with one more line."""
        if isinstance(line, StudyNote):
            return replace(self, notes=(*self.notes, line))
        trials = {t.number: t for t in self.trials} | {line.record.number: line.record}
        return replace(self, trials=tuple(trials[n] for n in sorted(trials)))

    @property
    def finished(self) -> tuple[TrialRecord, ...]:
        """Trials that are over."""
        return tuple(t for t in self.trials if t.state is not TrialState.RUNNING)

    @property
    def reference(self) -> TrialRecord | None:
        """The first record of vLLM's defaults that may be compared with, else the latest that is finished, if any."""
        found = [t for t in self.finished if t.source == "reference"]
        good = (t for t in found if t.state in (TrialState.COMPLETE, TrialState.INFEASIBLE))
        return next(good, found[-1] if found else None)


class Ledger:
    """The ledger of one study, open for appending by one process and for reading by any."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: StudyHeader | TrialLine | Verification | StudyNote) -> None:
        """Write one line and return when it is on disk.

        Raises
        ------
        StoreError
            When the file system refuses; nothing is half-written then as far as a reader can see.
        """
        data = _LINE.dump_json(line) + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.cut_torn_line()
            is_new = not self.path.exists()
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                _write_whole(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if is_new:
                _sync_folder(self.path.parent)
        except OSError as error:
            raise StoreError(
                f"{self.path}: the ledger cannot be written ({error.strerror}); free or mend it"
            ) from error

    def cut_torn_line(self) -> int:
        """Remove what a crash left of a last line, so that the next line does not join it or stand behind it.

        Returns the bytes that were removed.
        """
        if not self.path.exists():
            return 0
        whole = self.path.read_bytes()
        kept = whole[: whole.rfind(b"\n") + 1]
        last = kept[kept.rfind(b"\n", 0, -1) + 1 :]
        if last.strip() and not _is_readable(last):  # its end reached the disk and its middle did not
            kept = kept[: -len(last)]
        if len(kept) < len(whole):
            os.truncate(self.path, len(kept))
        return len(whole) - len(kept)

    def lines(self) -> Iterator[StudyHeader | TrialLine | Verification | StudyNote]:
        """Every whole line, in order.

        Raises
        ------
        StoreError
            When a line other than the last cannot be read: the file was changed by something else.
        """
        if not self.path.exists():
            return
        try:
            raw = self.path.read_bytes()
        except OSError as error:
            raise StoreError(f"{self.path}: the ledger cannot be read ({error.strerror})") from error
        parts = raw.split(b"\n")
        for index, part in enumerate(parts[:-1]):
            if not part:
                continue
            try:
                yield _LINE.validate_json(part)
            except ValidationError as error:
                if index == len(parts) - 2:
                    return
                raise StoreError(
                    f"{self.path}: line {index + 1} is not a record of this tuner; restore the file or start over "
                    "with `tuner run --fresh`"
                ) from error

    def history(self) -> History:
        """Read the whole file."""
        header: StudyHeader | None = None
        trials: dict[int, TrialRecord] = {}
        verifications: list[Verification] = []
        notes: list[StudyNote] = []
        for line in self.lines():
            match line:
                case StudyHeader():
                    header = line
                case TrialLine():
                    trials[line.record.number] = line.record
                case Verification():
                    verifications.append(line)
                case StudyNote():
                    notes.append(line)
        return History(header, tuple(trials[n] for n in sorted(trials)), tuple(verifications), tuple(notes))


def _is_readable(line: bytes) -> bool:
    try:
        _LINE.validate_json(line)
    except ValidationError:
        return False
    return True


def _write_whole(descriptor: int, data: bytes) -> None:
    """Write all of it; a file system that is nearly full takes a part first, and refuses only the next."""
    while data:
        data = data[os.write(descriptor, data) :]


def _sync_folder(folder: Path) -> None:
    """Make the name of a new file in this folder durable, as `fsync` makes its content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
