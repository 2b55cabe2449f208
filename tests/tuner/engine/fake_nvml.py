"""NVML's interface without a GPU: the functions of pynvml that we call, over a machine that is described as data.

Errors and constants are pynvml's own; a test holds the functions against the real module's.
"""

# ruff: noqa: N802  the names are those of NVML

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 2**30


@dataclass
class FakeGpu:
    """One GPU or MIG instance. `errors` maps a function's name to the NVML error that it returns."""

    uuid: str
    name: str = "NVIDIA RTX A6000"
    used_gib: float = 1.0
    total_gib: float = 47.5
    computing: Sequence[tuple[int, float | None]] = ()
    drawing: Sequence[tuple[int, float | None]] = ()
    instances: Sequence[FakeGpu | None] | None = None
    errors: dict[str, int] = field(default_factory=dict)


class FakeNvml:
    """Stands in for the module `pynvml`."""

    NVMLError = pynvml.NVMLError
    NVML_ERROR_LIBRARY_NOT_FOUND = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    NVML_ERROR_DRIVER_NOT_LOADED = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    NVML_DEVICE_MIG_ENABLE = pynvml.NVML_DEVICE_MIG_ENABLE

    def __init__(self, *gpus: FakeGpu, init_error: int | None = None) -> None:
        self._gpus = gpus
        self._init_error = init_error
        self.started = 0

    def nvmlInit(self) -> None:
        if self._init_error is not None:
            raise pynvml.NVMLError(self._init_error)
        self.started += 1

    def nvmlShutdown(self) -> None:
        self.started -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self._gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        known = [*self._gpus, *(mig for gpu in self._gpus for mig in gpu.instances or () if mig is not None)]
        for gpu in known:
            if gpu.uuid == uuid:
                return self._answer("nvmlDeviceGetHandleByUUID", gpu, gpu)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: FakeGpu) -> str:
        return handle.uuid

    def nvmlDeviceGetName(self, handle: FakeGpu) -> str:
        return handle.name

    def nvmlDeviceGetMigMode(self, device: FakeGpu) -> list[int]:
        if device.instances is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        enabled = pynvml.NVML_DEVICE_MIG_ENABLE if device.instances else pynvml.NVML_DEVICE_MIG_DISABLE
        return [enabled, enabled]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: FakeGpu) -> int:
        return len(device.instances or ())

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: FakeGpu, index: int) -> FakeGpu:
        instance = (device.instances or ())[index]
        if instance is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return instance

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu) -> Any:
        info = SimpleNamespace(used=int(handle.used_gib * GIB), total=int(handle.total_gib * GIB))
        return self._answer("nvmlDeviceGetMemoryInfo", handle, info)

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> Any:
        return self._answer("nvmlDeviceGetUtilizationRates", handle, SimpleNamespace(gpu=87, memory=40))

    def nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:
        return self._answer("nvmlDeviceGetPowerUsage", handle, 287_500)

    def nvmlDeviceGetTemperature(self, handle: FakeGpu, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._answer("nvmlDeviceGetTemperature", handle, 71)

    def nvmlDeviceGetClockInfo(self, handle: FakeGpu, type: int) -> int:
        assert type == pynvml.NVML_CLOCK_SM
        return self._answer("nvmlDeviceGetClockInfo", handle, 1740)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: FakeGpu) -> int:
        return self._answer("nvmlDeviceGetCurrentClocksEventReasons", handle, 4)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: FakeGpu) -> int:
        return self._answer("nvmlDeviceGetCurrentClocksThrottleReasons", handle, 4)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeGpu) -> list[Any]:
        return self._answer("nvmlDeviceGetComputeRunningProcesses", handle, _rows(handle.computing))

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: FakeGpu) -> list[Any]:
        return self._answer("nvmlDeviceGetGraphicsRunningProcesses", handle, _rows(handle.drawing))

    def _answer(self, function: str, handle: FakeGpu, value: Any) -> Any:
        if not self.started:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        if function in handle.errors:
            raise pynvml.NVMLError(handle.errors[function])
        return value


def _rows(processes: Sequence[tuple[int, float | None]]) -> list[Any]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=None if gib is None else int(gib * GIB)) for pid, gib in processes]
