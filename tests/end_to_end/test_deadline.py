"""A deadline that comes while the real engine is busy: the trial is ended within the time of a stop, proven gone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from objectives.measurement import Failure, FailureKind
from tuner.config import EngineConfig
from tuner.engine.cluster import Wanted
from tuner.engine.processes import descendants, shared_memory
from tuner.engine.protocol import MeasurePlan
from tuner.engine.ray_pool import RayEnginePool
from tuner.workload.model import Request, Workload

pytestmark = pytest.mark.end_to_end

WORKLOAD = Workload("tiny", tuple(Request(0.0, tuple(range(100, 132)), 4) for _ in range(3)), (100, 49_000), 0)
UNTIL_S = 12.0
"""The actor is there by then and the engine is not: it takes 15 s or more to start."""
STOP_S = 20.0
"""Ray takes 3 to 5 s to end an actor with all its children; the rest is for a busy machine."""


def test_trial_that_is_busy_at_the_deadline_is_ended_and_will_be_run_again(model: Path, tmp_path: Path) -> None:
    args = {"model": str(model), "max_model_len": 512, "enforce_eager": True, "gpu_memory_utilization": 0.2}
    config = EngineConfig(args, {"HF_HUB_OFFLINE": "1"})
    segments = shared_memory()
    stages: list[str] = []
    pool = RayEnginePool(engines=1, wanted=Wanted(gpus=0))
    try:
        engine = pool.first()
        deadline_s = time.monotonic() + UNTIL_S
        plan = MeasurePlan(log_path=tmp_path / "engine.log", end_by_s=deadline_s)
        outcome = engine.run(config, WORKLOAD, plan, stages.append)
        late_s = time.monotonic() - deadline_s
    finally:
        pool.close()

    assert isinstance(outcome, Failure)
    assert outcome.kind is FailureKind.INTERRUPTED
    assert "start engine" in stages
    assert 0 <= late_s < STOP_S, late_s
    assert not [p for p in descendants(os.getpid()) if p.is_alive()]
    assert shared_memory() <= segments
