"""Which devices are ours, what is free on them, who else is there, and a series of readings while a workload runs.

Devices are known by UUID, never by index. Where there is no NVIDIA GPU, the machine's own RAM and CPU take the place of
the device under the name "host".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from objectives.measurement import DeviceSample
from tuner.engine.nvml import GIB, Device, DeviceProcess, Nvml, open_nvml
from tuner.errors import PreflightError

__all__ = [
    "HOST",
    "Device",
    "DeviceProcess",
    "DeviceSampler",
    "Nvml",
    "foreign_processes",
    "free_memory",
    "open_nvml",
    "used_memory",
    "visible_devices",
]

HOST = "host"
"""Name of the series of the machine itself, where there is no GPU."""

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""Name of the kernel's first PID namespace (PROC_PID_INIT_INO of Linux, include/linux/proc_ns.h)."""


def visible_devices(nvml: Nvml | None, env: Mapping[str, str]) -> tuple[Device, ...]:
    """Return the devices that a CUDA process with this environment may use, in its order.

    `CUDA_VISIBLE_DEVICES` may hold indices or UUIDs, these also shortened to what tells them apart, as CUDA allows.
    Empty or negative hides everything that follows. Of a GPU in MIG mode CUDA takes the first instance, unless the
    variable names another.

    Raises
    ------
    PreflightError
        When an entry names no device, several, or one that was named before (CUDA then drops devices without a word);
        or when it is an index of which only CUDA knows the meaning.
    """
    if nvml is None:
        return ()
    gpus = nvml.gpus()
    wanted = env.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return tuple(_as_cuda_takes_it(nvml, gpu) for gpu in gpus)
    if wanted.strip() in ("", "NoDevFiles"):
        return ()
    chosen: list[Device] = []
    for entry in (part.strip() for part in wanted.split(",")):
        if entry.startswith("-"):
            break
        device = _named(nvml, gpus, entry, env)
        if device in chosen:
            raise PreflightError(f"CUDA_VISIBLE_DEVICES={wanted} names {device.uuid} twice; name each device once")
        chosen.append(device)
    return tuple(chosen)


def _named(nvml: Nvml, gpus: Sequence[Device], entry: str, env: Mapping[str, str]) -> Device:
    if entry.isdecimal():
        _require_known_order(gpus, env)
        matches = [gpu for gpu in gpus if gpu.index == int(entry)]
    elif entry.startswith("MIG-"):
        matches = [mig for gpu in gpus for mig in nvml.mig_instances(gpu) if mig.uuid.startswith(entry)]
    else:
        matches = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    if len(matches) != 1:
        problem = "no device" if not matches else f"{len(matches)} devices"
        known = ", ".join(f"{gpu.index} = {gpu.uuid}" for gpu in gpus)
        raise PreflightError(
            f"CUDA_VISIBLE_DEVICES={env['CUDA_VISIBLE_DEVICES']}: {entry!r} names {problem}; "
            f"this machine has {known} (MIG instances: nvidia-smi -L)"
        )
    return _as_cuda_takes_it(nvml, matches[0])


def _require_known_order(gpus: Sequence[Device], env: Mapping[str, str]) -> None:
    """CUDA counts the fastest GPU first unless told otherwise, NVML by PCI bus: the same among equals only."""
    if len({gpu.name for gpu in gpus}) > 1 and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise PreflightError(
            f"CUDA_VISIBLE_DEVICES={env['CUDA_VISIBLE_DEVICES']} counts GPUs of different kinds in an order that only "
            "CUDA knows; set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name them by UUID"
        )


def _as_cuda_takes_it(nvml: Nvml, device: Device) -> Device:
    if device.parent_uuid is not None:
        return device
    return next(iter(nvml.mig_instances(device)), device)


def used_memory(nvml: Nvml | None, devices: Iterable[Device]) -> dict[str, float]:
    """Read UUID -> used memory in GiB, for the devices that tell."""
    return {uuid: used for uuid, (used, _) in _memory(nvml, devices).items()}


def free_memory(nvml: Nvml | None, devices: Collection[Device]) -> dict[str, float]:
    """Read UUID -> free memory in GiB for the devices that tell; without devices, `{"host": available RAM}`."""
    if nvml is None or not devices:
        return {HOST: psutil.virtual_memory().available / GIB}
    return {uuid: total - used for uuid, (used, total) in _memory(nvml, devices).items()}


def _memory(nvml: Nvml | None, devices: Iterable[Device]) -> dict[str, tuple[float, float]]:
    if nvml is None:
        return {}
    readings = {device.uuid: nvml.memory_gib(device) for device in devices}
    return {uuid: memory for uuid, memory in readings.items() if memory is not None}


def foreign_processes(
    nvml: Nvml | None,
    devices: Iterable[Device],
    own_pids: Collection[int] = (),
    *,
    present_before: Collection[int] = (),
    shared_pids: bool | None = None,
) -> tuple[DeviceProcess, ...]:
    """List the processes that compute on the devices and are not ours.

    In a container NVML may number processes as the host does, so that our own cannot be told by their PIDs. There only
    those that were on a device before our engine started are certain to be foreign. A process that only draws, such as
    the display server of a workstation, does not count.

    Parameters
    ----------
    own_pids:
        Processes of our engine; empty before its start.
    present_before:
        PIDs that NVML listed before our engine started.
    shared_pids:
        Whether NVML and this process number processes alike; `None` looks whether we are in the kernel's first PID
        namespace.
    """
    if nvml is None:
        return ()
    listed = [process for device in devices for process in nvml.processes(device) if process.computes]
    if not own_pids:
        return tuple(listed)
    if _in_initial_pid_namespace() if shared_pids is None else shared_pids:
        return tuple(process for process in listed if process.pid not in own_pids)
    return tuple(process for process in listed if process.pid in present_before)


def _in_initial_pid_namespace() -> bool:
    link = Path("/proc/self/ns/pid")
    return not link.is_symlink() or str(link.readlink()) == _INITIAL_PID_NAMESPACE


class DeviceSampler:
    """Reads the devices, or the host where there are none, every `interval_s` in a thread of its own.

    A context manager: the first reading is taken on entry, and the thread has ended when it is left.

    Parameters
    ----------
    clock:
        Must be the load driver's, so that the samples can be shifted onto the run's own.
    """

    def __init__(
        self,
        nvml: Nvml | None,
        devices: Sequence[Device],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._readers: list[Callable[[float], DeviceSample]] = (
            [partial(nvml.read, device) for device in devices] if nvml is not None and devices else [_HostReader().read]
        )
        self._interval_s = interval_s
        self._clock = clock
        self._samples: list[DeviceSample] = []
        self._end = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device-sampler")
        self._loop: Future[None]

    def __enter__(self) -> Self:
        self._loop = self._thread.submit(self._run)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.shutdown()
        if error is None:
            self._loop.result()

    def samples(self, start_s: float = 0.0) -> tuple[DeviceSample, ...]:
        """Return everything read so far, on a clock that is 0 at `start_s`."""
        return tuple(replace(sample, at_s=sample.at_s - start_s) for sample in tuple(self._samples))

    def _run(self) -> None:
        due_s = self._clock()
        while True:
            self._samples += [read(self._clock()) for read in self._readers]
            due_s = max(due_s + self._interval_s, self._clock())
            if self._end.wait(due_s - self._clock()):
                return


class _HostReader:
    """RAM and CPU of the whole machine. Utilisation is that since the reading before, so the first one has none."""

    def __init__(self) -> None:
        self._has_read = False

    def read(self, at_s: float) -> DeviceSample:
        """Read the machine; must always be called by the same thread, for psutil counts by thread."""
        memory = psutil.virtual_memory()
        utilisation = psutil.cpu_percent(interval=None) / 100
        first, self._has_read = not self._has_read, True
        return DeviceSample(
            at_s=at_s,
            device=HOST,
            memory_used_gib=(memory.total - memory.available) / GIB,
            memory_total_gib=memory.total / GIB,
            utilisation=None if first else utilisation,
        )
