"""Studies as jobs of a Ray cluster: sent, listed, read and stopped through Ray's own job client.

A job is `tuner run` on the cluster's head, in the folder that TUNER_HOME names there (else the user's home), so that
ledgers and artefacts stay when the job has ended. The study's files travel with it and are kept beside them.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from tuner.errors import JobError, StudyFileError, UsageError
from tuner.spec import is_local_model
from tuner.study_file import StudyFile, read
from tuner.study_folder import find

STUDY = "tuner_study"
"""Name under which a job's metadata says which study it runs."""
STOP_S = 180
"""Ray gives a job 3 s to end unless told otherwise; an engine is ended and MLflow brought up to date in that time."""
POLL_S = 0.5
RUN_IN_HOME = (
    'home="${{TUNER_HOME:-$HOME}}" && into="$home/mlruns/submitted/{study}" && mkdir -p "$into" '
    '&& cp -R ./. "$into" && cd "$home" && exec python3 -m tuner run mlruns/submitted/{study}/{name}{options}'
)
OVER = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})


@dataclass(frozen=True, slots=True)
class Job:
    """One job of a cluster: `status` is Ray's word for it, `began_at` in Unix seconds."""

    id: str
    study: str
    status: str
    began_at: float | None

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.status in OVER

    @property
    def line(self) -> str:
        """The job in a line."""
        began = None if self.began_at is None else datetime.fromtimestamp(self.began_at).astimezone()
        return f"{self.id:40} {self.status:10} {began.isoformat(' ', 'minutes') if began else ''}".rstrip()

    def document(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        return {"id": self.id, "study": self.study, "status": self.status, "began_at": self.began_at}


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that runs a study; `attached` where it ran already."""

    id: str
    attached: bool


class JobServer:
    """The job server of a cluster.

    Parameters
    ----------
    address:
        Of the cluster's dashboard, as http://HOST:8265; `None` for what Ray's own variables name.

    Raises
    ------
    JobError
        When it cannot be reached, or refuses.
    """

    def __init__(self, address: str | None) -> None:
        from ray.job_submission import JobSubmissionClient

        self._address = address or "the address of RAY_API_SERVER_ADDRESS"
        with self._faults():
            self._client = JobSubmissionClient(address)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn what the client raises into a sentence."""
        from ray.exceptions import AuthenticationError

        try:
            yield
        except AuthenticationError as error:
            raise JobError(
                f"{self._address} refuses: Ray's token is missing or wrong; set RAY_AUTH_MODE=token and "
                "RAY_AUTH_TOKEN_PATH to the file with the cluster's token"
            ) from error
        except (ConnectionError, RuntimeError, ValueError) as error:
            said = " ".join(str(error).split())[:300]
            raise JobError(f"{self._address}: the cluster's job server does not do it ({said})") from error

    def jobs(self) -> list[Job]:
        """Jobs that run studies, or did, oldest first."""
        with self._faults():
            listed = self._client.list_jobs()
        found = [
            Job(
                id=details.submission_id,
                study=details.metadata[STUDY],
                status=str(details.status.value),
                began_at=None if details.start_time is None else details.start_time / 1000,
            )
            for details in listed
            if details.submission_id and STUDY in (details.metadata or {})
        ]
        return sorted(found, key=lambda job: (job.began_at or 0.0, job.id))

    def job(self, name: str) -> Job:
        """Return the job of this id, or the latest of the study of this name.

        Raises
        ------
        UsageError
            When there is none.
        """
        jobs = self.jobs()
        found = [job for job in jobs if job.id == name] or [job for job in jobs if job.study == name]
        if not found:
            known = ", ".join(job.id for job in jobs) or "none"
            raise UsageError(
                f"{name}: is neither a job of {self._address} nor a study that was sent there; jobs: {known}"
            )
        return found[-1]

    def submit(self, file: StudyFile, options: Sequence[str], requirements: Path | None = None) -> Submitted:
        """Send a study, or find the job that runs it.

        Parameters
        ----------
        options:
            Of `tuner run`.
        requirements:
            Pinned packages to install for the job, where the cluster's machines do not have the tuner; the tuner
            itself is sent along.
        """
        jobs = [job for job in self.jobs() if job.study == file.spec.study]
        running = [job for job in jobs if not job.is_over]
        if running:
            return Submitted(running[-1].id, attached=True)
        job_id = f"{file.spec.study}-{len(jobs) + 1}"
        with tempfile.TemporaryDirectory(prefix="tuner-submit-") as bundle:
            name = bundle_files(file, Path(bundle))
            try:
                with self._faults():
                    self._client.submit_job(
                        entrypoint=entrypoint(file.spec.study, name, options),
                        submission_id=job_id,
                        runtime_env=_runtime_env(bundle, requirements),
                        metadata={STUDY: file.spec.study},
                    )
            except JobError:
                # Of two that submit at once, the job's id lets one through: the other one attaches.
                if not any(job.id == job_id for job in self.jobs()):
                    raise
                return Submitted(job_id, attached=True)
        return Submitted(job_id, attached=False)

    def log(self, job: Job) -> str:
        """Return what a job has printed so far."""
        with self._faults():
            printed: str = self._client.get_job_logs(job.id)
        return printed

    def follow(self, job_id: str, show: Callable[[str], None]) -> str:
        """Show what a job prints until it ends, and return its status."""

        async def tail() -> None:
            async for text in self._client.tail_job_logs(job_id):
                show(text)

        with self._faults():
            asyncio.run(tail())
        return self._wait(job_id, STOP_S)

    def stop(self, job: Job) -> str:
        """Ask a job to end, wait until it has, and return its status. Its trials are closed, to be run again."""
        with self._faults():
            self._client.stop_job(job.id)
        return self._wait(job.id, STOP_S + 30)

    def _wait(self, job_id: str, limit_s: float) -> str:
        deadline_s = time.monotonic() + limit_s
        while not (job := self.job(job_id)).is_over and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return job.status


def submit(study: str, address: str | None, options: Sequence[str], requirements: Path | None) -> Submitted:
    """Send a study to a cluster as a job.

    Raises
    ------
    TunerError
        When the file is wrong, or the cluster refuses.
    """
    file = read(find(study))
    return JobServer(address).submit(file, options, requirements)


def entrypoint(study: str, name: str, options: Sequence[str]) -> str:
    """Return the shell command of a job, which begins in the folder of the files that were sent."""
    return RUN_IN_HOME.format(
        study=study, name=shlex.quote(name), options="".join(f" {shlex.quote(o)}" for o in options)
    )


def _runtime_env(bundle: str, requirements: Path | None) -> dict[str, Any]:
    """Return the job's environment, as Ray's runtime environments are written."""
    env: dict[str, Any] = {"working_dir": bundle, "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_S)}}
    if requirements is not None:
        if not requirements.is_file():
            raise UsageError(f"--requirements {requirements}: there is no such file")
        root = Path(__file__).parents[1]
        env |= {"pip": str(requirements), "py_modules": [str(root / "tuner"), str(root / "objectives")]}
    return env


def bundle_files(file: StudyFile, into: Path) -> str:
    """Copy a study file and what it refers to into a folder, and return the study file's name there.

    What it names relative to itself keeps its place; a model's folder is named in full, since it must be on the
    cluster's machines.

    Raises
    ------
    StudyFileError
        When it refers to a file outside its own folder, which would have no place there.
    """
    document = yaml.safe_load(file.path.read_text())
    if is_local_model(file.spec.model):
        document["model"] = file.model
    for key, name in _named_files(document):
        source = (file.folder / name).resolve()
        if not source.is_relative_to(file.folder.resolve()):
            text = f"{name} lies outside the study file's folder and cannot be sent along; put it beside the study file"
            raise StudyFileError(str(file.path), [(key, text)])
        if source.is_file():
            target = into / source.relative_to(file.folder.resolve())
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    for module in sorted({m.split(":")[0].split(".")[0] for m in _own_metrics(document)}):
        for source in (file.folder / f"{module}.py", file.folder / module):
            if source.is_dir():
                shutil.copytree(source, into / module)
            elif source.is_file():
                shutil.copyfile(source, into / source.name)
    (into / file.path.name).write_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
    return file.path.name


def _named_files(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys of a study file whose values name files, with these; those with a full path are the cluster's business."""
    workload = document.get("workload") or {}
    named = (("model_config_file", document.get("model_config_file")), ("workload.path", workload.get("path")))
    yield from ((key, str(name)) for key, name in named if name and not Path(name).expanduser().is_absolute())


def _own_metrics(document: dict[str, Any]) -> Iterator[str]:
    """Metrics of the operator's own, as `module:function`, in objectives and constraints."""
    for objective in document.get("objectives") or ():
        name = objective.get("metric", "") if isinstance(objective, dict) else str(objective)
        if ":" in name:
            yield name
    for constraint in document.get("constraints") or ():
        if ":" in (name := str(constraint).split()[0]):
            yield name
