"""The driver's side of an engine: a Ray actor pinned to the GPUs, watched, ended and made anew when it must be.

The only module that imports Ray to run trials. Budgets are kept here, outside the process that may hang; what goes
wrong comes back as a `Failure`, classified from the engine's own log.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from objectives.measurement import EngineFacts, Failure, FailureKind, Measurement, Stage
from tuner.config import EngineConfig
from tuner.engine.failures import classify, watchdog_line
from tuner.engine.host import PROOF_S, Broken, EngineHost, HostIdentity, StopReport
from tuner.engine.processes import (
    ProcessIdentity,
    ResourceSnapshot,
    descendants,
    end_tree,
    not_given_back,
    remove_left_segments,
    wait_for_end,
)
from tuner.engine.protocol import MeasurePlan, Progress
from tuner.errors import PreflightError
from tuner.workload.model import Workload

POLL_S = 0.5
ACTOR_START_S = 180.0
"""A fresh worker process imports torch; on a cold disk that takes a minute."""
RAY_ENDS_S = 5.0
"""Ray ends a killed actor and its process group by itself within 3 s; only what is left then is ended by hand."""
LOG_TAIL_BYTES = 4_000_000

Answer = TypeVar("Answer")


class _OutOfTimeError(Exception):
    """A call to the actor did not answer within its budget."""


class _ClosedError(Exception):
    """The engine was closed while it was busy."""


class _DeadlineError(Exception):
    """The study's deadline came while the engine was busy."""


class _ActorLostError(Exception):
    """The actor's process is gone; the text is Ray's."""


class RayTrialEngine:
    """A `TrialEngine` on one Ray actor that owns `num_gpus` GPUs (or the CPUs, when 0).

    Parameters
    ----------
    accelerator_type:
        Ray's name of the accelerator that the actor must get.
    address:
        Ray cluster to join; `"local"` starts one for this process, bound to loopback.
    note_processes:
        Called with every process that belongs to this engine, so that a later run can end what a crash leaves.
    """

    def __init__(
        self,
        *,
        num_gpus: int,
        accelerator_type: str | None = None,
        address: str = "local",
        note_processes: Callable[[list[ProcessIdentity]], None] = lambda _: None,
    ) -> None:
        self._num_gpus = num_gpus
        self._accelerator_type = accelerator_type
        self._note_processes = note_processes
        self._actor: Any = None
        self._actor_env: Mapping[str, str] = {}
        self._identity: HostIdentity | None = None
        self._family: list[ProcessIdentity] = []
        self._before: ResourceSnapshot | None = None
        self._memory_gib: Mapping[str, float] = {}
        self._busy = threading.Lock()
        self._closing = threading.Event()
        self._ended: tuple[ProcessIdentity, ...] | None = None
        """Of an engine that was ended by force, and not yet proven gone: the processes that lived on even then."""
        _connect(address)
        _preflight(num_gpus, accelerator_type)

    def run(
        self, config: EngineConfig, workload: Workload, plan: MeasurePlan, progress: Progress
    ) -> Measurement | Failure:
        """Start, measure, stop and prove; see `TrialEngine`."""
        with self._busy:
            return self._run(config, workload, plan, progress)

    def _run(
        self, config: EngineConfig, workload: Workload, plan: MeasurePlan, progress: Progress
    ) -> Measurement | Failure:
        try:
            self._ensure_actor(config.env, progress)
            if left := self._left_by_force():
                return Failure(FailureKind.MEMORY_NOT_FREE, Stage.STOP, f"the engine before is not gone: {left[0]}")
            outcome = self._start_and_measure(config, workload, plan, progress)
        except _OutOfTimeError as error:
            self._recycle()
            return classify(f"{_tail(plan.log_path)}\n{error}")
        except _DeadlineError:
            self._recycle()
            text = "the study's deadline came; the trial will be run again"
            return Failure(FailureKind.INTERRUPTED, Stage.RUN, text)
        except _ClosedError:
            self._recycle()
            return Failure(FailureKind.INTERRUPTED, Stage.RUN, "the study ended; the trial will be run again")
        except _ActorLostError as error:
            self._recycle()
            return self._classified(plan.log_path, Broken(Stage.RUN, str(error)))
        except BaseException:  # Ctrl-C or a deadline: the engine must not outlive it
            self._recycle()
            raise
        return self._stop(outcome, plan, progress)

    def _start_and_measure(
        self, config: EngineConfig, workload: Workload, plan: MeasurePlan, progress: Progress
    ) -> Measurement | Failure:
        started = self._call(
            "start",
            config,
            plan.log_path,
            budget_s=plan.start_budget_s,
            what="start engine",
            progress=progress,
            end_by_s=plan.end_by_s,
        )
        if isinstance(started, Broken):
            return self._classified(plan.log_path, started)
        assert isinstance(started, EngineFacts)
        measured = self._call(
            "measure",
            workload,
            plan,
            budget_s=plan.run_budget_s,
            what="run",
            progress=progress,
            follow=True,
            end_by_s=plan.end_by_s,
        )
        if isinstance(measured, Broken):
            return self._classified(plan.log_path, measured)
        assert isinstance(measured, Measurement)
        return measured

    def _stop(self, outcome: Measurement | Failure, plan: MeasurePlan, progress: Progress) -> Measurement | Failure:
        """Stop the engine; a stop that hangs or leaves something costs the actor, never the measurement."""
        try:
            report = self._call(
                "stop", plan.stop_budget_s, budget_s=plan.stop_budget_s + 60, what="stop engine", progress=progress
            )
        except (_OutOfTimeError, _ActorLostError):
            self._recycle()
            return outcome
        assert isinstance(report, StopReport)
        if report.left:
            progress(f"end the engine's process: {report.left[0]}")
            self._recycle()
        if isinstance(outcome, Measurement):
            facts = dataclasses.replace(outcome.engine, stop_s=report.seconds)
            return dataclasses.replace(outcome, engine=facts)
        return outcome

    def _classified(self, log_path: Path | None, broken: Broken) -> Failure:
        """Find the cause in the engine's log and in what its process raised."""
        return classify(f"{_tail(log_path)}\n{broken.error_text}")

    def _call(
        self,
        method: str,
        *arguments: object,
        budget_s: float,
        what: str,
        progress: Progress | None = None,
        follow: bool = False,
        end_by_s: float | None = None,
    ) -> Any:
        """Call the actor and wait, passing on what it is doing."""
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        deadline_s = time.monotonic() + budget_s
        reference = getattr(self._actor, method).remote(*arguments)
        if progress is not None:
            progress(what)
        while True:
            try:
                done, _ = ray.wait([reference], timeout=POLL_S)
                if done:
                    return ray.get(reference)
            except RayActorError as error:
                raise _ActorLostError(f"the engine's actor is gone: {error}") from error
            except RayTaskError as error:
                raise _ActorLostError(f"the engine's actor failed: {error}") from error
            if self._closing.is_set():
                raise _ClosedError
            if time.monotonic() > deadline_s:
                raise _OutOfTimeError(watchdog_line(what, budget_s))
            if end_by_s is not None and time.monotonic() > end_by_s:
                raise _DeadlineError
            if follow and progress is not None:
                self._pass_on_state(progress)
            else:
                self._remember_family()

    def _pass_on_state(self, progress: Progress) -> None:
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        with contextlib.suppress(
            GetTimeoutError, RayError
        ):  # a display that lags is no fault; a dead actor shows above
            progress(ray.get(self._actor.state.remote(), timeout=POLL_S))

    def _ensure_actor(self, env: Mapping[str, str], progress: Progress) -> None:
        """Have an actor with exactly this environment: variables are read at import, so a change takes a new one."""
        if self._actor is not None and dict(env) != dict(self._actor_env):
            self._recycle()
        if self._actor is not None:
            return
        import ray

        progress("start actor")
        options: dict[str, Any] = {"max_restarts": 0, "max_concurrency": 8}
        if self._num_gpus:
            options |= {"num_gpus": self._num_gpus, "num_cpus": 1}
        else:
            options |= {"num_cpus": int(ray.cluster_resources().get("CPU", 1))}
        if self._accelerator_type:
            options["accelerator_type"] = self._accelerator_type
        if env:
            options["runtime_env"] = {"env_vars": dict(env)}
        driver = ProcessIdentity.of(os.getpid())
        self._before = ResourceSnapshot.take(driver.pid, {})
        self._actor = ray.remote(EngineHost).options(**options).remote(driver, socket.gethostname())
        self._actor_env = dict(env)
        identity = self._call("identity", budget_s=ACTOR_START_S, what="start actor")
        assert isinstance(identity, HostIdentity)
        self._identity = identity
        if self._num_gpus and len(identity.devices) != self._num_gpus:
            raise PreflightError(
                f"Ray gave the engine's actor {self._num_gpus} GPUs, but NVML shows it {len(identity.devices)}; check "
                "CUDA_VISIBLE_DEVICES and the driver on that node"
            )
        self._memory_gib = {**identity.device_memory_gib, **self._memory_gib}
        self._remember_family()

    def _left_by_force(self) -> list[str]:
        """Say what an engine that was ended by force still holds: its successor must find the devices free.

        They are held against what the first actor saw, and given the time that a killed CUDA context takes to end.
        """
        deadline_s = time.monotonic() + PROOF_S
        while self._ended is not None:
            identity = self._call("identity", budget_s=ACTOR_START_S, what="check that the engine before is gone")
            left = [f"process {p.pid} still runs" for p in self._ended if p.is_alive()]
            left += not_given_back(self._memory_gib, identity.device_memory_gib)
            if not left:
                self._ended = None
            elif time.monotonic() > deadline_s:
                return left
            else:
                time.sleep(POLL_S)
        return []

    def _remember_family(self) -> None:
        """Note every process that belongs to this engine while it can still be found; the dead have no children."""
        if self._identity is not None:
            family = {self._identity.process, *self._family, *descendants(self._identity.process.pid)}
            self._family = [p for p in family if p.is_alive()]
        self._note_processes([*self._family, *descendants(os.getpid())])

    def _recycle(self) -> None:
        """End the actor with everything that it started."""
        import ray
        from ray.exceptions import RayError

        if self._actor is None:
            return
        self._remember_family()
        with contextlib.suppress(RayError):  # an actor that is gone already is what is wanted
            ray.kill(self._actor, no_restart=True)
        wait_for_end(self._family, RAY_ENDS_S)
        self._ended = end_tree(self._family, term_s=1.0)
        if self._before is not None:
            remove_left_segments(self._before.shared_memory)
        if self._identity is not None:
            shutil.rmtree(self._identity.temp_folder, ignore_errors=True)  # on another machine there is nothing here
        self._actor = None
        self._identity = None
        self._family = []

    def close(self) -> None:
        """End the actor, also in the middle of a run, and, where this process started it, Ray. Idempotent."""
        import ray

        self._closing.set()
        with self._busy:
            self._recycle()
        if ray.is_initialized():
            ray.shutdown()
        self._note_processes([])


def _connect(address: str) -> None:
    """Join a cluster, or start a local one that listens on loopback only and runs workers at normal priority."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        # Ray's switch for systems where only loopback is wanted; read when Ray is imported.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        options["include_dashboard"] = False
    import ray

    if not ray.is_initialized():
        ray.init(address=address, **options)


def _preflight(num_gpus: int, accelerator_type: str | None) -> None:
    """Refuse what the cluster can never give, rather than wait for it.

    Raises
    ------
    PreflightError
        With what is there.
    """
    import ray

    resources = ray.cluster_resources()
    there = int(resources.get("GPU", 0))
    if there < num_gpus:
        raise PreflightError(
            f"the study asks for {num_gpus} GPUs (resources.num_gpus), Ray sees {there}; correct the study or run it "
            "on a machine that has them"
        )
    if accelerator_type and not resources.get(f"accelerator_type:{accelerator_type}"):
        types = sorted(k.removeprefix("accelerator_type:") for k in resources if k.startswith("accelerator_type:"))
        raise PreflightError(
            f"Ray sees no accelerator of type {accelerator_type} (resources.accelerator_type); it sees "
            f"{', '.join(types) or 'none'}"
        )


def _tail(path: Path | None) -> str:
    """Read the end of a log, enough for everything that one engine prints."""
    if path is None or not path.exists():
        return ""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace")
