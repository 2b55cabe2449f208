"""Every error that this project raises on purpose.

TunerError                     exit status 1
├── UsageError                 exit status 2: the call or a file is wrong
│   ├── StudyFileError         the study file: which file, which key, what to do
│   ├── WorkloadError          the workload's source: which file, which line
│   └── PickError              a `--pick` that names no trial, or one that may not be exported
├── StudyBusyError             another `tuner run` works on this study
├── StudyStoppedError          the study cannot go on: three machine failures in a row, nothing left to try
├── StoreError                 ledger, storage or artefacts cannot be read or written
├── EngineUnsupportedError     this vLLM cannot be driven
├── JobError                   a cluster's job server cannot be reached, or refuses
└── PreflightError             the machine is not what the study asks for
"""

from __future__ import annotations


class TunerError(Exception):
    """One sentence for the operator: what is wrong, where, and what to do."""

    exit_status = 1


class UsageError(TunerError):
    """The call, or a file that it names, is wrong."""

    exit_status = 2


class StudyFileError(UsageError):
    """A study file that cannot be used.

    Parameters
    ----------
    path:
        The file.
    problems:
        `(key, sentence)` pairs; the key is dotted, as in `workload.arrivals.rate_per_s`.
    """

    def __init__(self, path: str, problems: list[tuple[str, str]]) -> None:
        self.path = path
        self.problems = problems
        lines = (f"{path}: {key}: {text}" if key else f"{path}: {text}" for key, text in problems)
        super().__init__("\n".join("\\n".join(line.splitlines()) for line in lines))

    def __reduce__(self) -> tuple[type[StudyFileError], tuple[str, list[tuple[str, str]]]]:
        """An exception is copied to another process by its message alone, which `__init__` does not take."""
        return type(self), (self.path, self.problems)


class WorkloadError(UsageError):
    """A workload source that cannot be used."""


class PickError(UsageError):
    """A pick that names no trial of the study, or one that may not be used for this."""


class StudyBusyError(TunerError):
    """Another process runs this study."""


class StudyStoppedError(TunerError):
    """The study cannot go on; what was finished is kept."""


class StoreError(TunerError):
    """A store cannot be read or written."""


class EngineUnsupportedError(TunerError):
    """The installed vLLM is missing something that the tuner needs."""


class JobError(TunerError):
    """A cluster's job server cannot be reached, or refuses."""


class PreflightError(TunerError):
    """The machine does not offer what the study asks for."""
