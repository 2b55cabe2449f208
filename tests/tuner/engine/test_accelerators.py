from __future__ import annotations

import pytest

from tuner.engine.accelerators import accelerator_type_of, gpus_here

NAMES = {
    "NVIDIA RTX A6000": "RTX-A6000",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA A10G": "A10G",
    "Tesla T4": "T4",
    "NVIDIA GeForce RTX 4090": "GeForce-RTX-4090",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX-PRO-6000",
}


@pytest.mark.parametrize("name", NAMES)
def test_an_accelerator_is_called_what_ray_calls_it(name: str) -> None:
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

    assert accelerator_type_of(name) == NAMES[name]
    assert NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(name) == NAMES[name]


def test_gpus_hidden_from_cuda_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert gpus_here() is None
