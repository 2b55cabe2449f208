"""The process that owns the devices: starts an engine in itself, measures, stops it, proves that nothing is left.

`EngineHost` is the class behind the Ray actor; it knows nothing of Ray. Whatever an engine does comes back as a value
(`Broken`), so that no exception of vLLM's ever has to be unpickled in the driver.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import shutil
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

from objectives.measurement import EngineFacts, Failure, Measurement, Stage
from tuner.config import EngineConfig
from tuner.engine.cores import bind_engine
from tuner.engine.failures import stage_line
from tuner.engine.nvml import Device, Nvml, open_nvml
from tuner.engine.processes import (
    ProcessIdentity,
    ResourceSnapshot,
    adopt_orphans,
    descendants,
    end_tree,
    prove_clean,
    remove_left_segments,
)
from tuner.engine.protocol import EngineDiedError, MeasurePlan
from tuner.engine.telemetry import DeviceSampler, foreign_processes, used_memory, visible_devices
from tuner.engine.trial import measure
from tuner.engine.vllm import VllmEngine, start_engine
from tuner.workload.model import Workload

_STAGES = {"warm": Stage.WARMUP, "run": Stage.RUN}
PROOF_S = 30.0
"""Engines end within 3 to 5 s; CUDA contexts of killed workers have been seen to take 20."""


@dataclass(frozen=True, slots=True)
class Broken:
    """An engine failed: how far it had come, and its exception as text (the log says more)."""

    stage: Stage
    error_text: str


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """Who the host is, for the driver that must be able to end it, and the used memory of its devices by UUID now."""

    machine: str
    process: ProcessIdentity
    devices: tuple[Device, ...]
    temp_folder: Path
    device_memory_gib: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StopReport:
    """How a stop went: seconds, and what is left in words; empty when everything is proven gone."""

    seconds: float
    left: tuple[str, ...]


class EngineHost:
    """Runs one engine at a time. Every method that waits is asynchronous, so that `state` answers meanwhile.

    Parameters
    ----------
    driver, driver_machine:
        The driver's process and its machine's name; a host on the same machine ends itself and its engine when the
        driver is gone.
    cores:
        Which part of the machine's cores is its own, as (index, parts); `None` for all.
    """

    def __init__(self, driver: ProcessIdentity, driver_machine: str, cores: tuple[int, int] | None = None) -> None:
        if cores is not None:
            bind_engine(*cores)
        adopt_orphans()
        self._temp = _own_temp_folder()
        self._engine: VllmEngine | None = None
        self._state = "idle"
        self._log: Path | None = None
        self._before: ResourceSnapshot | None = None
        self._nvml: Nvml | None = open_nvml()
        self._devices = visible_devices(self._nvml, os.environ)
        self._present_before: frozenset[int] = frozenset()
        resource_tracker.ensure_running()  # a child for the life of this process: there before any snapshot
        if driver_machine == socket.gethostname():
            threading.Thread(target=_end_with, args=(driver, self._temp), daemon=True, name="end-with-driver").start()

    async def identity(self) -> HostIdentity:
        """Say who this is."""
        process = ProcessIdentity.of(os.getpid())
        return HostIdentity(socket.gethostname(), process, self._devices, self._temp, self._used_memory())

    async def state(self) -> str:
        """Say in a few words what is being done."""
        return self._state

    async def children(self) -> tuple[ProcessIdentity, ...]:
        """Every process below this one."""
        return tuple(descendants(os.getpid()))

    async def start(self, config: EngineConfig, log_path: Path | None) -> EngineFacts | Broken:
        """Start an engine; what it prints goes to the log."""
        self._log = log_path
        if log_path is not None and log_path.exists():  # what an earlier attempt printed is no evidence of this one
            log_path.replace(log_path.with_suffix(".previous.log"))
        self._before = ResourceSnapshot.take(os.getpid(), used_memory(self._nvml, self._devices), self._temp)
        self._present_before = frozenset(p.pid for p in foreign_processes(self._nvml, self._devices))
        self._state = "start engine"
        with _output_to(log_path):
            try:
                self._engine = start_engine(config)
            except Exception:  # noqa: BLE001  # whatever vLLM raises is the evidence that is classified
                return Broken(Stage.CONFIG, traceback.format_exc())
        return self._engine.facts

    async def measure(self, workload: Workload, plan: MeasurePlan) -> Measurement | Failure | Broken:
        """Measure a workload on the engine that runs."""
        assert self._engine is not None, "start() comes before measure()"
        with _output_to(self._log):
            try:
                return await measure(
                    self._engine,
                    workload,
                    plan,
                    lambda: DeviceSampler(self._nvml, self._devices, plan.sample_interval_s),
                    self._foreign_processes,
                    self._note,
                )
            except EngineDiedError as error:
                await asyncio.sleep(1.0)  # the dying core still writes down why
                return Broken(Stage.RUN, f"{type(error).__name__}: {error}")
            except Exception:  # noqa: BLE001  # the same as at the start
                return Broken(Stage.RUN, traceback.format_exc())

    def _note(self, state: str) -> None:
        """Keep what is being done, and write it into the engine's log where it says how far the engine had come."""
        self._state = state
        if stage := _STAGES.get(state.split(" ")[0]):
            print(stage_line(stage), flush=True)  # noqa: T201  # into the engine's log, which the classifier reads

    def _foreign_processes(self) -> int:
        own = {os.getpid(), *(p.pid for p in descendants(os.getpid()))}
        return len(foreign_processes(self._nvml, self._devices, own, present_before=self._present_before))

    async def stop(self, budget_s: float) -> StopReport:
        """Stop the engine if there is one and prove that its processes, shared memory and device memory are gone."""
        started_s = time.monotonic()
        self._state = "stop engine"
        with _output_to(self._log):
            if self._engine is not None:
                with suppress(Exception):  # a broken engine may fail to say goodbye; the proof below decides
                    await asyncio.wait_for(asyncio.to_thread(self._engine.stop), budget_s)
                self._engine = None
            left: list[str] = []
            if self._before is not None:
                children = [p for p in descendants(os.getpid()) if p not in self._before.processes]
                await asyncio.to_thread(end_tree, children)
                await asyncio.to_thread(remove_left_segments, self._before.shared_memory)
                _empty(self._temp)
                left = await asyncio.to_thread(prove_clean, self._before, self._used_memory, PROOF_S)
            for what in left:
                print(f"tuner: {what}", flush=True)  # noqa: T201  # into the engine's log
        _give_memory_back()
        self._state = "idle"
        return StopReport(time.monotonic() - started_s, tuple(left))

    def _used_memory(self) -> dict[str, float]:
        return used_memory(self._nvml, self._devices)


def _end_with(driver: ProcessIdentity, temp_folder: Path) -> None:
    """End this process and everything below it once the driver is gone: an engine nobody waits for must not run on."""
    while driver.is_alive():
        time.sleep(1.0)
    end_tree(descendants(os.getpid()), term_s=2.0)
    shutil.rmtree(temp_folder, ignore_errors=True)
    os._exit(1)


def _own_temp_folder() -> Path:
    """Give this process a temporary folder that nobody else writes to, so that what an engine leaves is seen."""
    folder = Path(tempfile.mkdtemp(prefix="tuner-"))
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = str(folder)
    return folder


def _empty(folder: Path) -> None:
    """Remove what an engine left in a folder of ours, such as the socket files of its queues."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _give_memory_back() -> None:
    """Free what the front end of the last engine held, so that a night of engines does not make this process grow.

    Its objects refer to each other, and among the 0.7 million that vLLM's modules hold the collector's own full passes
    come too rarely: without this a process was seen to grow by 30 to 45 MiB an engine, with it by less than 7.
    """
    gc.collect()
    with suppress(AttributeError):  # only glibc keeps freed memory, and only glibc has this
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def _output_to(path: Path | None) -> Iterator[None]:
    """Send what this process and its children print to a file: whole, never through a pipe that could fill up."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    kept = os.dup(1), os.dup(2)
    target = os.open(path or os.devnull, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    finally:
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for descriptor in (*kept, target):
            os.close(descriptor)
