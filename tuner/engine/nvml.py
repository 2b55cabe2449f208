"""NVML by UUID: the only module that imports pynvml.

A figure that a device, its driver or our rights do not offer is `None`: it never ends a series of readings. Devices are
plain data and may travel between processes; handles stay in here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from objectives.measurement import DeviceSample
from tuner.errors import PreflightError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or one MIG instance of a GPU.

    Parameters
    ----------
    uuid:
        `GPU-...` or `MIG-...`, as NVML spells it.
    index:
        NVML's index of the physical GPU.
    parent_uuid:
        For a MIG instance, the UUID of the GPU that it is part of.
    """

    uuid: str
    name: str
    index: int
    parent_uuid: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process that holds memory of a device.

    Parameters
    ----------
    memory_gib:
        `None` where the driver does not tell.
    computes:
        False for a process that only draws, such as a desktop's display server.
    """

    device: str
    pid: int
    memory_gib: float | None
    computes: bool


class Nvml:
    """NVML, started; a context manager that ends it. `open_nvml` makes one, or none on a machine without a GPU.

    Parameters
    ----------
    library:
        The `pynvml` module, initialised, or anything with its functions.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._handles: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give NVML back; a reading after this call is `None`."""
        self._handles.clear()
        self._library.nvmlShutdown()

    def gpus(self) -> tuple[Device, ...]:
        """List the physical GPUs in NVML's order, that of the PCI bus."""
        lib = self._library
        handles = [lib.nvmlDeviceGetHandleByIndex(i) for i in range(lib.nvmlDeviceGetCount())]
        return tuple(Device(lib.nvmlDeviceGetUUID(h), lib.nvmlDeviceGetName(h), i) for i, h in enumerate(handles))

    def mig_instances(self, gpu: Device) -> tuple[Device, ...]:
        """List the MIG instances of a GPU in NVML's order; none when MIG is off or unknown to the device."""
        lib = self._library
        mode = self._ask(gpu.uuid, lib.nvmlDeviceGetMigMode)
        if mode is None or mode[0] != lib.NVML_DEVICE_MIG_ENABLE:
            return ()
        slots = range(self._ask(gpu.uuid, lib.nvmlDeviceGetMaxMigDeviceCount) or 0)
        handles = [self._ask(gpu.uuid, lib.nvmlDeviceGetMigDeviceHandleByIndex, slot) for slot in slots]
        return tuple(
            Device(lib.nvmlDeviceGetUUID(mig), lib.nvmlDeviceGetName(mig), gpu.index, parent_uuid=gpu.uuid)
            for mig in handles
            if mig is not None
        )

    def memory_gib(self, device: Device) -> tuple[float, float] | None:
        """Read used and total memory; `None` where the device does not tell, as some that share the host's RAM."""
        info = self._ask(device.uuid, self._library.nvmlDeviceGetMemoryInfo)
        return None if info is None else (info.used / GIB, info.total / GIB)

    def processes(self, device: Device) -> tuple[DeviceProcess, ...]:
        """List the processes with a context on the device by PID. Those that the driver hides are missing."""
        lib = self._library
        drawing = self._ask(device.uuid, lib.nvmlDeviceGetGraphicsRunningProcesses) or ()
        computing = self._ask(device.uuid, lib.nvmlDeviceGetComputeRunningProcesses) or ()
        rows = {row.pid: (row, False) for row in drawing} | {row.pid: (row, True) for row in computing}
        return tuple(
            DeviceProcess(device.uuid, pid, None if row.usedGpuMemory is None else row.usedGpuMemory / GIB, computes)
            for pid, (row, computes) in sorted(rows.items())
        )

    def read(self, device: Device, at_s: float) -> DeviceSample:
        """Read everything that a sample holds.

        Temperature, clock and throttle reasons of a MIG instance are those of its GPU. Its power is unknown: the GPU's
        is that of all its instances.
        """
        lib = self._library
        board = device.parent_uuid or device.uuid
        memory = self.memory_gib(device)
        rates = self._ask(device.uuid, lib.nvmlDeviceGetUtilizationRates)
        milliwatts = self._ask(board, lib.nvmlDeviceGetPowerUsage) if device.parent_uuid is None else None
        return DeviceSample(
            at_s=at_s,
            device=device.uuid,
            memory_used_gib=None if memory is None else memory[0],
            memory_total_gib=None if memory is None else memory[1],
            utilisation=None if rates is None else rates.gpu / 100,
            power_w=None if milliwatts is None else milliwatts / 1000,
            temperature_c=self._ask(board, lib.nvmlDeviceGetTemperature, lib.NVML_TEMPERATURE_GPU),
            sm_clock_mhz=self._ask(board, lib.nvmlDeviceGetClockInfo, lib.NVML_CLOCK_SM),
            throttle_reasons=self._throttle_reasons(board),
        )

    def _throttle_reasons(self, uuid: str) -> int | None:
        """Read the bit mask of reasons, under its older name where the driver does not know the newer one."""
        reasons = self._ask(uuid, self._library.nvmlDeviceGetCurrentClocksEventReasons)
        if reasons is None:
            reasons = self._ask(uuid, self._library.nvmlDeviceGetCurrentClocksThrottleReasons)
        return None if reasons is None else int(reasons)

    def _ask(self, uuid: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function on a device; `None` for what this device, driver or user may not have, or has lost."""
        try:
            if uuid not in self._handles:
                self._handles[uuid] = self._library.nvmlDeviceGetHandleByUUID(uuid)
            return function(self._handles[uuid], *arguments)
        except self._library.NVMLError:
            return None


def open_nvml(library: Any = None) -> Nvml | None:
    """Start NVML, or return `None` on a machine without an NVIDIA driver or GPU.

    Parameters
    ----------
    library:
        Stands in for the `pynvml` module.

    Raises
    ------
    PreflightError
        When there is a driver, but it does not work.
    """
    if library is None:
        import pynvml

        library = pynvml
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        if error.value in (library.NVML_ERROR_LIBRARY_NOT_FOUND, library.NVML_ERROR_DRIVER_NOT_LOADED):
            return None
        reason = str(error).rstrip(".")
        raise PreflightError(f"the NVIDIA driver does not answer: {reason}; see nvidia-smi and repair it") from error
    if library.nvmlDeviceGetCount() == 0:
        library.nvmlShutdown()
        return None
    return Nvml(library)
