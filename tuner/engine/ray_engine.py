"""The driver's side of an engine: a Ray actor pinned to the GPUs, watched, ended and made anew when it must be.

Budgets are kept here, outside the process that may hang; what goes wrong comes back as a `Failure`, classified from the
engine's own log.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from objectives.measurement import EngineFacts, Failure, FailureKind, Measurement, Stage
from tuner.config import EngineConfig
from tuner.engine.cluster import Room
from tuner.engine.failures import classify, watchdog_line
from tuner.engine.families import Families
from tuner.engine.host import PROOF_S, Broken, EngineHost, HostIdentity, StopReport
from tuner.engine.processes import (
    ProcessIdentity,
    ResourceSnapshot,
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
NODE_NOTICED_S = 3.0
"""Ray learns of the end of an actor from its machine, or with that of the machine."""
UNREACHABLE_S = 60.0
"""A machine that is gone without a word is noticed by Ray's health checks: seen to take 15 to 35 s."""
LOG_TAIL_BYTES = 4_000_000


class _OutOfTimeError(Exception):
    """A call to the actor did not answer within its budget."""


class _ClosedError(Exception):
    """The engine was closed while it was busy."""


class _DeadlineError(Exception):
    """The study's deadline came while the engine was busy."""


class _ActorLostError(Exception):
    """The actor's process is gone; the text is Ray's."""


class _ActorUnreachableError(_ActorLostError):
    """The connection to the actor broke, and Ray does not know yet whether its process or its machine is gone."""


class _NodeLostError(Exception):
    """The machine that the actor ran on is no longer part of the cluster."""


class RayTrialEngine:
    """A `TrialEngine` on one Ray actor in a room of the cluster.

    Parameters
    ----------
    machine:
        Name of the room's first node, for people.
    families:
        Knows the processes of all engines of this driver.
    host:
        The class behind the actor.
    cores:
        Which part of its machine's cores the actor has, as (index, parts); `None` for all.
    """

    def __init__(
        self,
        room: Room,
        machine: str,
        families: Families,
        *,
        host: type = EngineHost,
        cores: tuple[int, int] | None = None,
    ) -> None:
        self._room = room
        self._machine = machine
        self._families = families
        self._host = host
        self._cores = cores
        self._actor: Any = None
        self._actor_env: Mapping[str, str] = {}
        self._identity: HostIdentity | None = None
        self._before: ResourceSnapshot | None = None
        self._memory_gib: Mapping[str, float] = {}
        self._busy = threading.Lock()
        self._closing = threading.Event()
        self._ended: tuple[ProcessIdentity, ...] | None = None
        """Of an engine that was ended by force, and not yet proven gone: the processes that lived on even then."""

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
        except _NodeLostError:
            return self._node_lost()
        except _ActorLostError as error:
            if self._node_is_leaving(isinstance(error, _ActorUnreachableError)):
                return self._node_lost()
            self._recycle()
            return self._classified(plan.log_path, Broken(Stage.RUN, str(error)))
        except BaseException:  # Ctrl-C or a deadline: the engine must not outlive it
            self._recycle()
            raise
        return self._stop(outcome, plan, progress)

    def _node_is_leaving(self, unreachable: bool) -> bool:
        """Whether the actor is gone because its machine is; Ray may notice the one before the other."""
        if not self._room.can_leave:
            return False
        deadline_s = time.monotonic() + (UNREACHABLE_S if unreachable else NODE_NOTICED_S)
        while self._room.is_there():
            if time.monotonic() > deadline_s or self._closing.is_set():
                return False
            time.sleep(POLL_S)
        return True

    def _node_lost(self) -> Failure:
        self._recycle()
        return Failure(FailureKind.NODE_LOST, Stage.RUN, f"{self._machine} left the cluster")

    def _start_and_measure(
        self, config: EngineConfig, workload: Workload, plan: MeasurePlan, progress: Progress
    ) -> Measurement | Failure:
        started = self._call(
            "start",
            self._on_its_machines(config),
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
        assert isinstance(measured, Measurement | Failure)
        return measured

    def _on_its_machines(self, config: EngineConfig) -> EngineConfig:
        """Name vLLM's executor where it would take its choice from the placement group that it finds itself in."""
        name = "distributed_executor_backend"
        ranks = int(config.args.get("tensor_parallel_size") or 1) * int(config.args.get("pipeline_parallel_size") or 1)
        if name in config.args or ranks == 1:
            return config
        return config.with_args({name: "ray" if self._room.wanted.nodes > 1 else "mp"})

    def _stop(self, outcome: Measurement | Failure, plan: MeasurePlan, progress: Progress) -> Measurement | Failure:
        """Stop the engine; a stop that hangs or leaves something costs the actor, never the measurement."""
        try:
            report = self._call(
                "stop", plan.stop_budget_s, budget_s=plan.stop_budget_s + 60, what="stop engine", progress=progress
            )
        except (_OutOfTimeError, _ActorLostError, _NodeLostError, _ClosedError):
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
        from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

        deadline_s = time.monotonic() + budget_s
        reference = getattr(self._actor, method).remote(*arguments)
        if progress is not None:
            progress(what)
        while True:
            try:
                done, _ = ray.wait([reference], timeout=POLL_S)
                if done:
                    return ray.get(reference)
            except ActorUnavailableError as error:
                raise _ActorUnreachableError(f"the engine's actor cannot be reached: {error}") from error
            except RayActorError as error:
                raise _ActorLostError(f"the engine's actor is gone: {error}") from error
            except RayTaskError as error:
                raise _ActorLostError(f"the engine's actor failed: {error}") from error
            if self._closing.is_set():
                raise _ClosedError
            if self._room.can_leave and not self._room.is_there():
                raise _NodeLostError
            if time.monotonic() > deadline_s:
                raise _OutOfTimeError(watchdog_line(what, budget_s))
            if end_by_s is not None and time.monotonic() > end_by_s:
                raise _DeadlineError
            if follow and progress is not None:
                self._pass_on_state(progress)
            self._families.look()

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
        options = {"max_restarts": 0, "max_concurrency": 8, **self._room.options()}
        if env:
            options["runtime_env"] = {"env_vars": dict(env)}
        driver = ProcessIdentity.of(os.getpid())
        self._before = ResourceSnapshot.take(driver.pid, {})
        self._actor = ray.remote(self._host).options(**options).remote(driver, socket.gethostname(), self._cores)
        self._actor_env = dict(env)
        identity = self._call("identity", budget_s=ACTOR_START_S, what="start actor")
        assert isinstance(identity, HostIdentity)
        self._identity = identity
        gpus = options["num_gpus"]
        if gpus and len(identity.devices) != gpus:
            raise PreflightError(
                f"Ray gave the engine's actor {gpus} GPUs, but NVML shows it {len(identity.devices)}; check "
                "CUDA_VISIBLE_DEVICES and the driver on that node"
            )
        self._memory_gib = {**identity.device_memory_gib, **self._memory_gib}
        if self._is_here:
            self._families.watch(identity.process)

    @property
    def _is_here(self) -> bool:
        """Whether the actor's process can be seen from here; ids of another machine's mean nothing."""
        return self._identity is not None and self._identity.machine == socket.gethostname()

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

    def _recycle(self) -> None:
        """End the actor with everything that it started; what is on another machine Ray ends there."""
        import ray
        from ray.exceptions import RayError

        if self._actor is None:
            return
        family: list[ProcessIdentity] = []
        if self._identity is not None and self._is_here:
            self._families.look(now=True)
            family = self._families.of(self._identity.process)
        with contextlib.suppress(RayError):  # an actor that is gone already is what is wanted
            ray.kill(self._actor, no_restart=True)
        wait_for_end(family, RAY_ENDS_S)
        self._ended = end_tree(family, term_s=1.0)
        if self._before is not None:
            remove_left_segments(self._before.shared_memory)
        if self._identity is not None and self._is_here:
            self._families.unwatch(self._identity.process)
            shutil.rmtree(self._identity.temp_folder, ignore_errors=True)
        self._actor = None
        self._identity = None

    def interrupt(self) -> None:
        """End what runs soon, without waiting for it."""
        self._closing.set()

    def close(self) -> None:
        """End the actor, also in the middle of a run. Idempotent."""
        self.interrupt()
        with self._busy:
            self._recycle()


def _tail(path: Path | None) -> str:
    """Read the end of a log, enough for everything that one engine prints."""
    if path is None or not path.exists():
        return ""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace")
