"""`ServedTrialEngine`: a `TrialEngine` over HTTP. Starts `vllm serve`, proves that it is ours, measures, stops."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import aiohttp

from objectives.measurement import EngineFacts, Failure, FailureKind, Measurement, Stage, StepRecord
from tuner.config import EngineConfig
from tuner.engine.failures import classify, watchdog_line
from tuner.engine.http import HttpSource, RequestFailedError, client_session
from tuner.engine.nvml import open_nvml
from tuner.engine.processes import ProcessIdentity, ResourceSnapshot, prove_clean
from tuner.engine.protocol import EngineDiedError, MeasurePlan, Progress
from tuner.engine.server import Server
from tuner.engine.telemetry import DeviceSampler, foreign_processes, used_memory, visible_devices
from tuner.engine.trial import measure
from tuner.workload.model import Request, Workload

_POLL_S = 0.25
_HEALTH_S = 5.0
"""Who listens on the port may be a stranger who never answers, while the server has long ended because of it."""
_PROOF_S = 30.0
"""CUDA contexts of killed workers have been seen to take 20 s."""


class NoSteps:
    """A served engine does not tell its steps."""

    def take(self, origin_s: float, repeat: int) -> tuple[StepRecord, ...]:
        """Hand out nothing."""
        return ()


@dataclasses.dataclass(frozen=True, slots=True)
class ServedEngine:
    """A server that is ready, as the measurement sees a running engine."""

    source: HttpSource
    session: aiohttp.ClientSession
    url: str
    facts: EngineFacts
    steps: NoSteps = dataclasses.field(default_factory=NoSteps)

    def generate(self, request: Request, request_id: str) -> Any:
        """Stream one request."""
        return self.source.generate(request, request_id)

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        async with self.session.post(f"{self.url}/reset_prefix_cache") as response:
            response.raise_for_status()


class ServedTrialEngine:
    """A `TrialEngine` that starts `vllm serve` for every run and loads it over HTTP.

    Parameters
    ----------
    note_processes:
        Called with every process that belongs to this engine, so that a later run can end what a crash leaves.
    files:
        Key of a configuration -> text of the file that it is deployed with, which its server is then started from.
    """

    def __init__(
        self,
        note_processes: Callable[[list[ProcessIdentity]], None] = lambda _: None,
        files: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._note_processes = note_processes
        self._files = files
        self._nvml = open_nvml()
        self._devices = visible_devices(self._nvml, os.environ)
        self._left: list[str] = []

    def run(
        self, config: EngineConfig, workload: Workload, plan: MeasurePlan, progress: Progress
    ) -> Measurement | Failure:
        """Start, prove, measure and stop; see `TrialEngine`."""
        if self._left:
            return Failure(FailureKind.MEMORY_NOT_FREE, Stage.STOP, f"the server before is not gone: {self._left[0]}")
        before = ResourceSnapshot.take(os.getpid(), self._used_memory())
        try:
            return asyncio.run(self._run(config, workload, plan, progress))
        finally:
            self._left = prove_clean(before, self._used_memory, _PROOF_S)

    def close(self) -> None:
        """Do nothing: no server outlives its run."""

    async def _run(
        self, config: EngineConfig, workload: Workload, plan: MeasurePlan, progress: Progress
    ) -> Measurement | Failure:
        with tempfile.TemporaryDirectory(prefix="tuner-serve-") as folder:
            log_path = plan.log_path or Path(folder) / "serve.log"
            with log_path.open("ab") as log:
                start = log.tell()
                progress("start server")
                server = Server(config, Path(folder), log, self._files.get(config.key()))
                try:
                    outcome = await self._measure(server, config, workload, plan, progress, log)
                finally:
                    stop_started_s = time.monotonic()
                    server.stop(plan.stop_budget_s)
                    self._note_processes([])
            if outcome is None:
                return classify(_text(log_path, start), server.exit_code)
        if isinstance(outcome, Failure):
            return outcome
        facts = dataclasses.replace(outcome.engine, stop_s=time.monotonic() - stop_started_s)
        return dataclasses.replace(outcome, engine=facts)

    def _used_memory(self) -> dict[str, float]:
        return used_memory(self._nvml, self._devices)

    async def _measure(
        self,
        server: Server,
        config: EngineConfig,
        workload: Workload,
        plan: MeasurePlan,
        progress: Progress,
        log: IO[bytes],
    ) -> Measurement | Failure | None:
        """Measure once the server is up; `None` when it died, so that its log says why."""
        started_s = time.monotonic()
        async with client_session() as session:
            try:
                async with asyncio.timeout(plan.start_budget_s):
                    await self._until_ready(server, session)
                facts = await self._facts(server, config, session, time.monotonic() - started_s)
                source = HttpSource(session, server.url, server.name, lambda: server.exit_code is None)
                engine = ServedEngine(source, session, server.url, facts)
                async with asyncio.timeout(plan.run_budget_s):
                    return await measure(
                        engine,
                        workload,
                        plan,
                        lambda: DeviceSampler(self._nvml, self._devices, plan.sample_interval_s),
                        lambda: self._strangers(server),
                        progress,
                    )
            except _NotOursError as error:
                return Failure(FailureKind.PORT_IN_USE, Stage.CONFIG, str(error))
            except TimeoutError:
                log.write(f"{watchdog_line('serve', time.monotonic() - started_s)}\n".encode())
                return None
            except RequestFailedError as error:
                return Failure(FailureKind.CRASHED, Stage.WARMUP, str(error))
            except (EngineDiedError, aiohttp.ClientError):
                return None

    async def _until_ready(self, server: Server, session: aiohttp.ClientSession) -> None:
        """Wait for the health check, then prove that the server that answers it is the one that was started."""
        while not await _is_healthy(server, session):
            if server.exit_code is not None:
                raise EngineDiedError(f"vllm serve ended with status {server.exit_code}")
            self._note_processes(server.family())
            await asyncio.sleep(_POLL_S)
        if not server.owns_its_port():
            raise _NotOursError(f"port {server.port} is answered by a process that is not of the server started here")
        async with session.get(f"{server.url}/v1/models") as response:
            names = [model["id"] for model in (await response.json())["data"]]
        if names != [server.name]:
            raise _NotOursError(f"port {server.port} serves {', '.join(names)}, not the model started here")

    async def _facts(
        self, server: Server, config: EngineConfig, session: aiohttp.ClientSession, start_s: float
    ) -> EngineFacts:
        async with session.get(f"{server.url}/version") as response:
            version = str((await response.json())["version"])
        async with session.get(f"{server.url}/v1/models") as response:
            model = (await response.json())["data"][0]
        return EngineFacts(
            engine="vllm",
            vllm_version=version,
            device_name=self._devices[0].name if self._devices else "cpu",
            device_count=_world_size(config.args),
            model=str(config.args["model"]),
            start_s=start_s,
            max_model_len=model.get("max_model_len"),
            effective_args=dict(config.args),
        )

    def _strangers(self, server: Server) -> int:
        own = {os.getpid(), *(process.pid for process in server.family())}
        return len(foreign_processes(self._nvml, self._devices, own))


class _NotOursError(Exception):
    """Somebody else answers on our port."""


async def _is_healthy(server: Server, session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get(f"{server.url}/health", timeout=aiohttp.ClientTimeout(total=_HEALTH_S)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _world_size(args: Mapping[str, Any]) -> int:
    return int(args.get("tensor_parallel_size") or 1) * int(args.get("pipeline_parallel_size") or 1)


def _text(path: Path, start: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
