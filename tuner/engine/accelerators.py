"""Which GPUs this machine gives an engine, and what Ray calls their kind."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import takewhile

from tuner.engine.nvml import open_nvml
from tuner.engine.telemetry import visible_devices


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that a CUDA process of ours would see.

    Parameters
    ----------
    name:
        Of the first, as NVML says it.
    total_gib:
        Memory of the first as the driver reports it; 0 where it does not tell.
    """

    count: int
    name: str
    total_gib: float


def gpus_here() -> Gpus | None:
    """Look at this machine's GPUs; `None` where NVML shows none.

    Raises
    ------
    PreflightError
        When CUDA_VISIBLE_DEVICES names what is not there.
    """
    nvml = open_nvml()
    if nvml is None:
        return None
    with nvml:
        devices = visible_devices(nvml, os.environ)
        if not devices:
            return None
        memory = nvml.memory_gib(devices[0])
        return Gpus(len(devices), devices[0].name, memory[1] if memory else 0.0)


def accelerator_type_of(name: str) -> str:
    """Return what Ray calls an NVIDIA device of this name, as `resources.accelerator_type` must say it.

    Ray 2.60 takes the words in capitals after the maker's up to the first that holds a digit, which it cuts at the
    first dash ("NVIDIA RTX A6000" is RTX-A6000, "NVIDIA A100-SXM4-80GB" is A100); else the whole name.
    """
    words = name.split()[1:]
    for index, word in enumerate(words):
        head = "".join(takewhile(lambda c: c.isdigit() or c.isupper(), word))
        if len(head) > 1 and any(c.isdigit() for c in head):
            return "-".join([*words[:index], head])
        if not (word.isalpha() and word.isupper()):
            break
    return "-".join(name.removeprefix("NVIDIA ").split())
