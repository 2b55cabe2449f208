"""The catalogue of devices: peaks from datasheets, and the shares of them that a serving engine reaches.

Data only. A calibrated coefficient replaces what is assumed here; a peak is never changed by calibration.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tuner.errors import UsageError


class DeviceKind(StrEnum):
    """What the catalogue tells apart: kernels are launched on a GPU and called on a CPU."""

    GPU = "gpu"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Peaks of one device.

    Parameters
    ----------
    memory_gib:
        What the driver reports as total, in GiB: less than the number on the box where ECC is on.
    bandwidth_gb_s:
        Memory bandwidth in 10^9 bytes a second.
    bf16_tflops, fp8_tflops:
        Dense peaks in 10^12 operations a second, accumulating in 32 bit; `None` where the type is not native.
    link_gb_s, link_latency_s:
        One direction of the path between two devices of a tensor-parallel group in 10^9 bytes a second, and the time
        of one small all-reduce over it.
    source:
        Where the peaks stand.
    aliases:
        Other names, NVML's among them.
    """

    name: str
    kind: DeviceKind
    memory_gib: float
    bandwidth_gb_s: float
    bf16_tflops: float
    fp8_tflops: float | None
    link_gb_s: float
    link_latency_s: float
    source: str
    aliases: tuple[str, ...] = ()


# Effective one-direction rates between two devices of a ring, in GB/s. PCIe through the host's root complex reaches
# about 80% of 31.5 (4.0 x16) and 63 (5.0 x16) with peer-to-peer; an RTX card without it is staged through host memory
# at about half. NVLink: datasheet's bidirectional total / 2, times 0.8. Latencies: nccl-tests all_reduce of small
# messages on 2-8 GPUs, 10-15 us over NVLink and 25-40 us over PCIe.
_PCIE4, _PCIE4_STAGED, _PCIE5 = 22.0, 11.0, 45.0
_PCIE_LATENCY_S, _NVLINK_LATENCY_S = 35e-6, 12e-6

DEVICES: tuple[DeviceSpec, ...] = (
    DeviceSpec(
        "A6000", DeviceKind.GPU, 47.5, 768, 154.8, None, _PCIE4, _PCIE_LATENCY_S,
        "NVIDIA RTX A6000 datasheet; NVIDIA Ampere GA102 architecture whitepaper, table of GA102 boards",
        ("RTX A6000", "NVIDIA RTX A6000"),
    ),
    DeviceSpec(
        "A6000-NVLink", DeviceKind.GPU, 47.5, 768, 154.8, None, 45.0, _NVLINK_LATENCY_S,
        "NVIDIA RTX A6000 datasheet: NVLink bridge of two boards, 112.5 GB/s bidirectional",
        ("RTX A6000 NVLink",),
    ),
    DeviceSpec(
        "A40", DeviceKind.GPU, 44.4, 696, 149.7, None, _PCIE4, _PCIE_LATENCY_S,
        "NVIDIA A40 datasheet; total as vLLM's start-up logs report it with ECC on", ("NVIDIA A40",),
    ),
    DeviceSpec(
        "A10G", DeviceKind.GPU, 22.3, 600, 70.0, None, _PCIE4_STAGED, _PCIE_LATENCY_S,
        "AWS EC2 G5 and NVIDIA A10G datasheet; total from vLLM's out-of-memory text on A10G", ("NVIDIA A10G",),
    ),
    DeviceSpec(
        "L40S", DeviceKind.GPU, 44.4, 864, 362.0, 733.0, _PCIE4, _PCIE_LATENCY_S,
        "NVIDIA L40S datasheet", ("NVIDIA L40S",),
    ),
    DeviceSpec(
        "RTX 4090", DeviceKind.GPU, 23.5, 1008, 165.2, 330.3, _PCIE4_STAGED, _PCIE_LATENCY_S,
        "NVIDIA Ada GPU architecture whitepaper, appendix A; no peer-to-peer in the driver",
        ("4090", "NVIDIA GeForce RTX 4090"),
    ),
    DeviceSpec(
        "A100-40GB", DeviceKind.GPU, 39.4, 1555, 312.0, None, 240.0, _NVLINK_LATENCY_S,
        "NVIDIA A100 datasheet (SXM4, 40 GB)", ("A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"),
    ),
    DeviceSpec(
        "A100-80GB", DeviceKind.GPU, 79.2, 2039, 312.0, None, 240.0, _NVLINK_LATENCY_S,
        "NVIDIA A100 datasheet (SXM4, 80 GB)", ("A100", "A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
    ),
    DeviceSpec(
        "H100-SXM", DeviceKind.GPU, 79.2, 3350, 989.4, 1978.9, 360.0, _NVLINK_LATENCY_S,
        "NVIDIA H100 datasheet (SXM5)", ("H100", "H100-80GB", "NVIDIA H100 80GB HBM3"),
    ),
    DeviceSpec(
        "H100-PCIe", DeviceKind.GPU, 79.2, 2000, 756.0, 1513.0, _PCIE5, _PCIE_LATENCY_S,
        "NVIDIA H100 datasheet (PCIe)", ("NVIDIA H100 PCIe",),
    ),
    DeviceSpec(
        "H200", DeviceKind.GPU, 139.8, 4800, 989.4, 1978.9, 360.0, _NVLINK_LATENCY_S,
        "NVIDIA H200 datasheet (SXM)", ("NVIDIA H200",),
    ),
    DeviceSpec(
        "CPU", DeviceKind.CPU, 16.0, 40.0, 0.6, None, 10.0, 50e-6,
        "no datasheet: two cores of a cloud host, set so that the speed probe of a 135M model comes out as measured",
        ("host",),
    ),
)  # fmt: skip


def find_device(name: str) -> DeviceSpec:
    """Look a device up by its name or an alias, whatever the case, spaces and dashes.

    Raises
    ------
    UsageError
        The catalogue has no such device.
    """
    wanted = _plain(name)
    for device in DEVICES:
        if wanted in {_plain(n) for n in (device.name, *device.aliases)}:
            return device
    known = ", ".join(d.name for d in DEVICES)
    raise UsageError(f"The twin's catalogue has no device {name!r}; name one of: {known}.")


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What the engine reaches of a device's peaks, and what each step costs beside the arithmetic.

    Parameters
    ----------
    linear_compute, linear_memory, attention_compute, attention_memory:
        Share of the peak that matrix products and attention reach.
    step_s:
        Seconds a step: scheduling, input preparation, launch of a captured graph, sampling, output.
    request_s:
        Seconds a request in a step: its share of the host's work and of sampling.
    eager_layer_s:
        Seconds a layer that is not replayed from a graph (GPU) or not compiled (CPU).
    eager_traffic:
        Memory traffic of activations that compiling saves, as a multiple of what is left.
    overlaps:
        Whether reading weights, keys and values hides behind the arithmetic on them.
    """

    linear_compute: float
    linear_memory: float
    attention_compute: float
    attention_memory: float
    step_s: float
    request_s: float
    eager_layer_s: float
    eager_traffic: float
    overlaps: bool


# Sources. GPU: cuBLAS reaches 65-80% of the dense peak on products of these sizes and streaming kernels 75-90% of the
# bandwidth (CUTLASS profiler, published vLLM kernel profiles); FlashAttention-2 paper, figures 4-6: 50-73% forward on
# A100; a step of vLLM's V1 engine with 1-64 requests costs the host 2-5 ms (vLLM 0.6/0.8 performance posts), eager
# mode adds 40-80 us a decoder layer of launches. CPU: seven recorded runs of SmolLM2-135M on two cores (vLLM 0.32).
# What compiling saves on a CPU: 20 recorded configurations of the same model, 2 of them compiled, regressed on what
# their steps computed: 1.7 ms a step (30 layers) and a tenth of the time of a prompt token, about what this catalogue
# takes for its activations. That reading and arithmetic add up on it: 239 measured runs of benchmarks/cpu_table.py with
# pieces of 64 to 4096 tokens; steps of 17 to 64 tokens take 4 to 13% longer than the larger of the two says, and with
# the sum all sizes of pieces come out within 2%.
EFFICIENCY = {
    DeviceKind.GPU: Efficiency(0.70, 0.80, 0.50, 0.65, 2.5e-3, 2.0e-5, 6.0e-5, 0.0, True),
    DeviceKind.CPU: Efficiency(0.65, 0.60, 0.30, 0.50, 4.0e-3, 5.0e-4, 6.0e-5, 1.0, False),
}
