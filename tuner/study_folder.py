"""Where a study keeps what happened: `mlruns/studies/NAME/`, its lock, and the processes that it owns."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tuner.artifacts import write_json
from tuner.engine.processes import ProcessIdentity, end_tree, remove_left_segments, shared_memory
from tuner.errors import StoreError, StudyBusyError, StudyFileError
from tuner.ledger import Ledger

STORE = Path("mlruns")
"""Everything is kept under this folder of the current directory."""


@dataclass(frozen=True, slots=True)
class Left:
    """What a run left behind when it was killed: processes that were ended, segments that were removed."""

    processes: int
    segments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StudyFolder:
    """The folder of one study. Nothing is created until something is written."""

    path: Path

    @classmethod
    def of(cls, study: str, store: Path = STORE) -> StudyFolder:
        """Return the folder of the study of this name."""
        return cls((store / "studies" / study).resolve())

    @property
    def ledger(self) -> Ledger:
        """What happened."""
        return Ledger(self.path / "ledger.jsonl")

    @property
    def storage_url(self) -> str:
        """Optuna's storage."""
        return f"sqlite:///{self.path / 'optuna.db'}"

    @property
    def origin(self) -> Path:
        """Remembers where the study file lies, so that the study can be named by its name."""
        return self.path / "origin.json"

    def trial(self, number: int) -> Path:
        """Folder of one trial: tables and the engine's log."""
        return self.path / "trials" / str(number)

    def prepare(self) -> None:
        """Create the folder and see that it can be written.

        Raises
        ------
        StoreError
            With the reason.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            probe = self.path / ".writable"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise StoreError(
                f"{self.path}: the store cannot be written ({error.strerror}); free or mend it, or run in a folder "
                "that you may write to"
            ) from error

    def remember_origin(self, study_file: Path) -> None:
        """Note which file the study came from."""
        write_json(self.origin, {"study_file": str(study_file)})

    def set_aside(self) -> Path | None:
        """Move an earlier study of this name out of the way and return where it went."""
        if not self.path.exists():
            return None
        for index in range(1, 10_000):
            target = self.path.with_name(f"{self.path.name}.{index}")
            if not target.exists():
                shutil.move(self.path, target)
                return target
        raise StoreError(f"{self.path}: ten thousand earlier studies of this name lie beside it; remove some")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the study for this process; the lock ends with the process, however it ends.

        Raises
        ------
        StudyBusyError
            When another process holds it.
        """
        path = self.path / "lock"
        with path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise StudyBusyError(
                    f"{self.path.name}: another `tuner run` (process {holder}) works on this study; wait for it, or "
                    "see `tuner status`"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def is_running(self) -> bool:
        """Whether some process holds the study."""
        path = self.path / "lock"
        if not path.exists():
            return False
        with path.open("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def note_processes(self, processes: list[ProcessIdentity]) -> None:
        """Write down which processes belong to the study, for `end_left_processes` after a crash."""
        path = self.path / "processes.json"
        noted = _read_processes(path)
        before = noted[1] if noted is not None else shared_memory()
        if not processes:
            path.unlink(missing_ok=True)
            return
        known = [[p.pid, p.create_time] for p in processes]
        write_json(path, {"boot": _boot_id(), "processes": known, "shared_memory": sorted(before)})

    def end_left_processes(self) -> int:
        """End what an earlier run of this study left behind, by identity, and return how many that were."""
        return self.clear_left().processes

    def clear_left(self) -> Left:
        """End what an earlier run of this study left behind, by identity, remove its shared memory, and say what."""
        path = self.path / "processes.json"
        noted = _read_processes(path)
        path.unlink(missing_ok=True)
        if noted is None:
            return Left(0, ())
        known, segments_before = noted
        left = [p for p in known if p.is_alive()]
        if left:
            end_tree(left, term_s=2.0)
        return Left(len(left), remove_left_segments(segments_before))


def _read_processes(path: Path) -> tuple[list[ProcessIdentity], frozenset[str]] | None:
    """Read what `note_processes` wrote; `None` when there is nothing, or nothing that means anything any more."""
    try:
        noted = json.loads(path.read_text())
        if noted["boot"] != _boot_id():
            return None
        known = [ProcessIdentity(int(pid), float(created)) for pid, created in noted["processes"]]
        return known, frozenset(noted["shared_memory"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def find(study: str, store: Path = STORE) -> Path:
    """Return the study file that `STUDY` of a command means: a file's path, or the name of a study that was run.

    Raises
    ------
    StudyFileError
        When it is neither.
    """
    path = Path(study)
    if _is_file(path):
        return path
    if path.suffix in (".yaml", ".yml") or "/" in study:
        raise StudyFileError(study, [("", "there is no such file; correct the path, or name a study that was run")])
    origin = StudyFolder.of(study, store).origin
    if not origin.exists():
        if _is_file(path.with_name(f"{path.name}.yaml")):
            text = f"no study of this name was run here; for the file beside you, write {study}.yaml"
            raise StudyFileError(study, [("", text)])
        known = sorted(p.parent.name for p in (store / "studies").glob("*/origin.json"))
        hint = f"studies here: {', '.join(known)}" if known else "no study was run in this folder yet"
        raise StudyFileError(study, [("", f"is neither a file nor the name of a study; {hint}")])
    try:
        file = Path(json.loads(origin.read_text())["study_file"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"does not say where the file of study {study} lies; give its path instead of its name"
        raise StudyFileError(str(origin), [("", text)]) from error
    if not _is_file(file):
        raise StudyFileError(str(file), [("", f"the file of study {study} is gone; give its new path")])
    return file


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # longer than any path can be, or with a character that none may hold
        return False


def _boot_id() -> str:
    """Identify this start of the machine: identities of processes mean nothing after another."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else str(psutil.boot_time())
