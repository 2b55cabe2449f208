"""What the tests of the twin share: one import of vLLM, and one engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from twin_samples import SMOLLM2, cpu_config

from objectives.measurement import Measurement
from tuner.engine.protocol import MeasurePlan
from tuner.engine.twin.devices import find_device
from tuner.engine.twin.engine import TwinEngine
from tuner.workload.model import Workload


@pytest.fixture(scope="session")
def twin() -> TwinEngine:
    return TwinEngine(find_device("cpu"), SMOLLM2)


@pytest.fixture(scope="session")
def measure(twin: TwinEngine) -> Callable[..., Measurement]:
    """Run a configuration that must not fail."""

    def run(workload: Workload, *, repeats: int = 1, **args: Any) -> Measurement:
        result = twin.run(cpu_config(**args), workload, MeasurePlan(repeats=repeats), lambda _: None)
        assert isinstance(result, Measurement), result
        return result

    return run
