"""Runs of the real CPU engine, as data: `tests/data/twin/cpu-runs.json` states where they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from objectives.measurement import EngineFacts, Measurement, RequestRecord, SpeedProbe, StepRecord
from tuner.config import EngineConfig
from tuner.engine.twin.replay import MeasuredTrial
from tuner.workload.model import Request, Workload

RUNS = ("large", "small", "narrow", "preempted")


def recorded(name: str) -> MeasuredTrial:
    """One recorded trial."""
    data = json.loads((Path(__file__).parents[3] / "data" / "twin" / "cpu-runs.json").read_text())
    run = data["runs"][name]
    return MeasuredTrial(
        config=EngineConfig(run["args"]),
        workload=_workload(run["workload"], data["workloads"][run["workload"]]),
        measurement=_measurement(run, data["request_columns"], data["step_columns"]),
    )


def _workload(name: str, rows: list[list[Any]]) -> Workload:
    requests = tuple(
        Request(arrival_s, tuple(range(shared)) + (1000 + index,) * (prompt - shared), output, shared)
        for index, (arrival_s, prompt, output, shared) in enumerate(rows)
    )
    return Workload(name, requests, (1000, 40_000), seed=1)


def _measurement(run: dict[str, Any], request_columns: list[str], step_columns: list[str]) -> Measurement:
    before, after = (SpeedProbe(*probe) for probe in run["probes"])
    return Measurement(
        engine=EngineFacts("vllm", "0.32.0", "cpu", 1, "smollm2", start_s=24.0, kv_tokens=run["kv_tokens"]),
        workload_fingerprint="",
        requests=tuple(RequestRecord(**dict(zip(request_columns, r, strict=True))) for r in run["requests"]),
        steps=tuple(StepRecord(**dict(zip(step_columns, s, strict=True))) for s in run["steps"]),
        device=(),
        duration_s=(run["duration_s"],),
        speed_before=before,
        speed_after=after,
    )
