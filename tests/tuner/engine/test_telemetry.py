from __future__ import annotations

import inspect
import itertools
import os
import pickle
import threading
import time

import pynvml
import pytest
from fake_nvml import FakeGpu, FakeNvml
from hypothesis import given, settings
from hypothesis import strategies as st

from objectives.measurement import DeviceSample
from tuner.engine.nvml import Device, DeviceProcess, Nvml, open_nvml
from tuner.engine.telemetry import (
    HOST,
    DeviceSampler,
    foreign_processes,
    free_memory,
    used_memory,
    visible_devices,
)
from tuner.errors import PreflightError

A6000 = [
    "GPU-5f1c4a8e-0d9b-7c31-52aa-8a1f0be2c001",
    "GPU-5f90be12-44c7-1e0d-93b5-2f6d7710c002",
    "GPU-a3d2f7b0-9e15-4b6a-8c77-61e09f3dc003",
    "GPU-e07719cc-3b28-92f4-0d5e-b4c8a2f6c004",
]
MIG = ["MIG-1b0f3c52-7a4e-5d19-9c02-3e8f6a7bd001", "MIG-c94e1f07-2d6b-5a80-b713-08d5e9fcd002"]
LEGACY_MIG = "MIG-GPU-a3d2f7b0-9e15-4b6a-8c77-61e09f3dc003/1/0"

NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
MEASURED = [
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
]


def started(*gpus: FakeGpu) -> Nvml:
    nvml = open_nvml(FakeNvml(*gpus))
    assert nvml is not None
    return nvml


def four_a6000() -> Nvml:
    return started(*map(FakeGpu, A6000))


def with_mig() -> Nvml:
    unknown = dict.fromkeys(("nvmlDeviceGetTemperature", "nvmlDeviceGetClockInfo"), NOT_SUPPORTED)
    half = [FakeGpu(uuid, name="NVIDIA A100 MIG 3g.20gb", total_gib=19.5, errors=unknown) for uuid in MIG]
    return started(
        FakeGpu(A6000[0], name="NVIDIA A100", instances=[]),
        FakeGpu(A6000[1], name="NVIDIA A100", instances=[None, *half, None]),
    )


def seen(nvml: Nvml | None, variable: str | None, **env: str) -> list[str]:
    return [
        d.uuid for d in visible_devices(nvml, env if variable is None else {"CUDA_VISIBLE_DEVICES": variable, **env})
    ]


def test_fake_has_the_interface_of_the_library_that_is_installed() -> None:
    functions = {name: f for name, f in inspect.getmembers(FakeNvml, inspect.isfunction) if name.startswith("nvml")}

    for name, function in functions.items():
        ours = list(inspect.signature(function).parameters)[1:]
        real = inspect.signature(inspect.unwrap(getattr(pynvml, name))).parameters.values()
        required = [p.name for p in real if p.default is inspect.Parameter.empty and p.kind is not p.VAR_KEYWORD]
        assert len(ours) == len(required) or required == ["args"], name


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_machine_without_a_driver_has_no_nvml(error: int) -> None:
    assert open_nvml(FakeNvml(init_error=error)) is None


def test_machine_without_a_gpu_has_no_nvml_and_gives_it_back() -> None:
    library = FakeNvml()

    assert open_nvml(library) is None
    assert library.started == 0


def test_driver_that_does_not_work_is_an_error_of_the_machine() -> None:
    with pytest.raises(PreflightError, match=r"does not answer: .*version mismatch; see nvidia-smi"):
        open_nvml(FakeNvml(init_error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH))


def test_nvml_is_given_back() -> None:
    library = FakeNvml(FakeGpu(A6000[0]))

    with open_nvml(library) as nvml:  # type: ignore[union-attr]  # there is a GPU
        assert nvml.gpus()[0].uuid == A6000[0]

    assert library.started == 0


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("0,1,2,3", [0, 1, 2, 3]),
        ("3,1", [3, 1]),
        (" 2 , 0 ", [2, 0]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,-1,2", [1]),
        (A6000[2], [2]),
        (f"{A6000[3]},{A6000[0]}", [3, 0]),
        ("GPU-a3d2", [2]),
        ("GPU-e,GPU-5f9", [3, 1]),
    ],
)
def test_variable_is_read_as_cuda_reads_it(variable: str | None, expected: list[int]) -> None:
    assert seen(four_a6000(), variable) == [A6000[i] for i in expected]


@settings(deadline=None)
@given(order=st.permutations(range(4)), count=st.integers(0, 4), uuids=st.lists(st.booleans(), min_size=4, max_size=4))
def test_any_selection_in_any_order_and_spelling_maps_to_its_devices(
    order: list[int], count: int, uuids: list[bool]
) -> None:
    chosen = order[:count]
    variable = ",".join(A6000[i] if spelled else str(i) for i, spelled in zip(chosen, uuids, strict=False))

    assert seen(four_a6000(), variable) == [A6000[i] for i in chosen]


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("4", "'4' names no device"),
        ("0,GPU-beef", "'GPU-beef' names no device"),
        ("0,,1", "'' names no device"),
        ("GPU-5f", "'GPU-5f' names 2 devices"),
        ("cuda:0", "'cuda:0' names no device"),
        ("1,1", f"names {A6000[1]} twice"),
        (f"1,{A6000[1]}", f"names {A6000[1]} twice"),
        ("MIG-1b0f", "'MIG-1b0f' names no device"),
    ],
)
def test_entry_that_cuda_would_drop_without_a_word_is_an_error(variable: str, message: str) -> None:
    with pytest.raises(PreflightError) as caught:
        seen(four_a6000(), variable)

    assert message in str(caught.value)
    assert f"CUDA_VISIBLE_DEVICES={variable}" in str(caught.value)


def test_indices_of_unequal_gpus_need_a_stated_order() -> None:
    nvml = started(FakeGpu(A6000[0]), FakeGpu(A6000[1], name="NVIDIA H100"))

    with pytest.raises(PreflightError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        seen(nvml, "0")
    assert seen(nvml, "0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == [A6000[0]]
    assert seen(nvml, A6000[1]) == [A6000[1]]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (MIG[1], [MIG[1]]),
        ("MIG-c94e", [MIG[1]]),
        (f"{MIG[1]},{MIG[0]}", [MIG[1], MIG[0]]),
        ("1", [MIG[0]]),
        (A6000[1], [MIG[0]]),
        ("0", [A6000[0]]),
        (None, [A6000[0], MIG[0]]),
    ],
)
def test_mig_instances_are_devices_of_their_own(variable: str | None, expected: list[str]) -> None:
    assert seen(with_mig(), variable) == expected


def test_older_drivers_name_instances_after_their_gpu() -> None:
    nvml = started(FakeGpu(A6000[2], instances=[FakeGpu(LEGACY_MIG)]))

    assert seen(nvml, LEGACY_MIG) == [LEGACY_MIG]


def test_without_nvml_no_device_is_visible() -> None:
    assert seen(None, "0,1") == []


def test_device_travels_between_processes() -> None:
    device = visible_devices(four_a6000(), {})[1]

    assert pickle.loads(pickle.dumps(device)) == device == Device(A6000[1], "NVIDIA RTX A6000", 1)


def test_sample_holds_every_figure_in_its_unit() -> None:
    nvml = started(FakeGpu(A6000[0], used_gib=40.25, total_gib=47.5))

    assert nvml.read(*nvml.gpus(), at_s=3.5) == DeviceSample(
        at_s=3.5,
        device=A6000[0],
        memory_used_gib=40.25,
        memory_total_gib=47.5,
        utilisation=0.87,
        power_w=287.5,
        temperature_c=71,
        sm_clock_mhz=1740,
        throttle_reasons=4,
    )


@settings(deadline=None)
@given(failing=st.dictionaries(st.sampled_from(MEASURED), st.sampled_from([3, 4, 13, 15, 999])))
def test_figure_that_the_device_does_not_offer_is_unknown_and_the_others_stand(failing: dict[str, int]) -> None:
    whole, partial = started(FakeGpu(A6000[0])), started(FakeGpu(A6000[0], errors=failing))

    expected, sample = whole.read(*whole.gpus(), at_s=0.0), partial.read(*partial.gpus(), at_s=0.0)

    assert (sample.memory_used_gib is None) == ("nvmlDeviceGetMemoryInfo" in failing)
    assert (sample.power_w is None) == ("nvmlDeviceGetPowerUsage" in failing)
    assert (sample.throttle_reasons is None) == (
        {"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"} <= failing.keys()
    )
    for name in DeviceSample.__dataclass_fields__:
        assert getattr(sample, name) in (None, getattr(expected, name))


def test_device_that_is_lost_gives_a_sample_without_figures() -> None:
    nvml = started(FakeGpu(A6000[0], errors={"nvmlDeviceGetHandleByUUID": pynvml.NVML_ERROR_GPU_IS_LOST}))

    assert nvml.read(*nvml.gpus(), at_s=1.0) == DeviceSample(1.0, A6000[0])
    assert used_memory(nvml, nvml.gpus()) == {}


def test_mig_instance_takes_heat_and_clock_of_its_gpu_but_not_its_power() -> None:
    nvml = with_mig()
    (device,) = visible_devices(nvml, {"CUDA_VISIBLE_DEVICES": MIG[0]})

    sample = nvml.read(device, at_s=0.0)

    assert (sample.memory_total_gib, sample.temperature_c, sample.sm_clock_mhz) == (19.5, 71, 1740)
    assert sample.power_w is None


def test_memory_is_told_by_uuid() -> None:
    nvml = started(
        FakeGpu(A6000[0], used_gib=40.0, total_gib=47.5),
        FakeGpu(A6000[1], errors={"nvmlDeviceGetMemoryInfo": NOT_SUPPORTED}),
    )

    assert used_memory(nvml, nvml.gpus()) == {A6000[0]: 40.0}
    assert free_memory(nvml, nvml.gpus()) == {A6000[0]: 7.5}
    assert used_memory(None, ()) == {}


def test_free_memory_without_a_gpu_is_that_of_the_host() -> None:
    free = free_memory(None, ())

    assert list(free) == [HOST]
    assert 0 < free[HOST] < 100_000


@pytest.mark.parametrize("shared_pids", [True, False])
def test_every_process_on_a_device_is_foreign_before_the_engine_starts(shared_pids: bool) -> None:
    nvml = started(FakeGpu(A6000[0], computing=[(77, 2.5), (12, None)]))

    assert foreign_processes(nvml, nvml.gpus(), shared_pids=shared_pids) == (
        DeviceProcess(A6000[0], 12, None, computes=True),
        DeviceProcess(A6000[0], 77, 2.5, computes=True),
    )


def test_own_processes_and_the_display_are_not_foreign() -> None:
    nvml = started(FakeGpu(A6000[0], computing=[(77, 2.5), (12, 20.0)], drawing=[(5, 0.1), (77, 2.5)]))

    foreign = foreign_processes(nvml, nvml.gpus(), {12}, shared_pids=True)

    assert [p.pid for p in foreign] == [77]
    assert [(p.pid, p.computes) for p in nvml.processes(*nvml.gpus())] == [(5, False), (12, True), (77, True)]


def test_in_a_container_only_those_from_before_are_certain_to_be_foreign() -> None:
    nvml = started(FakeGpu(A6000[0], computing=[(40_012, 20.0), (40_077, 2.5)]))

    foreign = foreign_processes(nvml, nvml.gpus(), {12}, present_before={40_077}, shared_pids=False)

    assert [p.pid for p in foreign] == [40_077]


def test_processes_on_the_devices_of_others_do_not_matter() -> None:
    nvml = started(FakeGpu(A6000[0]), FakeGpu(A6000[1], computing=[(77, 2.5)]))

    assert foreign_processes(nvml, nvml.gpus()[:1]) == ()


def wait_for(sampler: DeviceSampler, count: int) -> None:
    deadline = time.monotonic() + 10
    while len(sampler.samples()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_sampler_reads_every_device_until_it_is_left() -> None:
    nvml = started(*map(FakeGpu, A6000[:2]))

    with DeviceSampler(nvml, nvml.gpus(), interval_s=0.02) as sampler:
        wait_for(sampler, 6)
    taken = sampler.samples()
    time.sleep(0.05)

    assert [s.device for s in taken] == [A6000[i % 2] for i in range(len(taken))]
    assert sampler.samples() == taken
    assert not [t for t in threading.enumerate() if t.name.startswith("device-sampler")]


def test_sampler_keeps_its_interval_and_shifts_its_clock() -> None:
    nvml = started(FakeGpu(A6000[0]))
    start_s = time.monotonic()

    with DeviceSampler(nvml, nvml.gpus(), interval_s=0.05) as sampler:
        wait_for(sampler, 4)

    times = [s.at_s for s in sampler.samples(start_s)]
    assert 0 <= times[0] < 0.5
    assert all(b - a > 0.02 for a, b in itertools.pairwise(times[:2]))
    assert times[3] - times[0] >= 0.14


def test_sampler_reads_the_host_where_there_is_no_gpu() -> None:
    with DeviceSampler(None, (), interval_s=0.02) as sampler:
        wait_for(sampler, 3)

    first, second, *_ = sampler.samples()
    assert {s.device for s in sampler.samples()} == {HOST}
    assert first.utilisation is None
    assert second.utilisation is not None
    assert 0 <= second.utilisation <= 1
    assert second.memory_total_gib is not None
    assert second.memory_used_gib is not None
    assert 0 < second.memory_used_gib < second.memory_total_gib
    assert (second.power_w, second.sm_clock_mhz) == (None, None)


def test_fault_in_the_sampler_is_raised_when_it_is_left() -> None:
    class Broken(FakeNvml):
        def nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:  # noqa: N802  as pynvml names it
            raise ZeroDivisionError("not an error of NVML")

    nvml = open_nvml(Broken(FakeGpu(A6000[0])))
    assert nvml is not None

    with pytest.raises(ZeroDivisionError), DeviceSampler(nvml, nvml.gpus(), interval_s=0.01):
        time.sleep(0.03)


@pytest.mark.gpu
def test_real_devices_answer() -> None:
    nvml = open_nvml()
    if nvml is None:
        pytest.skip("this machine has no NVIDIA GPU or driver")
    with nvml:
        devices = visible_devices(nvml, os.environ)
        assert devices
        for device in devices:
            sample = nvml.read(device, at_s=0.0)
            assert sample.memory_used_gib is not None
            assert sample.memory_total_gib is not None
            assert 0 <= sample.memory_used_gib <= sample.memory_total_gib
        assert free_memory(nvml, devices).keys() == {device.uuid for device in devices}
