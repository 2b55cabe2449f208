"""Failures provoked on the real engine: each is recognised from what it writes, and nothing of it is left."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

from objectives.measurement import Failure, FailureKind, Measurement, Stage
from tuner.config import EngineConfig
from tuner.engine.cluster import Wanted
from tuner.engine.processes import ProcessIdentity, ResourceSnapshot, prove_clean
from tuner.engine.protocol import MeasurePlan
from tuner.engine.ray_pool import RayEnginePool
from tuner.engine.serve import ServedTrialEngine
from tuner.workload.model import Request, Workload

pytestmark = pytest.mark.end_to_end

ARGS = {
    "max_model_len": 512,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 2**26,
}
WORKLOAD = Workload("tiny", tuple(Request(0.0, tuple(range(100 + i, 164 + i)), 64) for i in range(4)), (100, 49_000), 0)
PLAN = MeasurePlan(speed_probe=False, start_budget_s=120, run_budget_s=90, stop_budget_s=20)

Hook = Callable[[str], None]


class Bench:
    """One engine for all tests, with hooks into the moments at which something can be done to it."""

    def __init__(self, folder: Path) -> None:
        self.pool = RayEnginePool(engines=1, wanted=Wanted(gpus=0), note_processes=self._note)
        self.engine = self.pool.first()
        self.log = folder / "engine.log"
        self.seen: set[ProcessIdentity] = set()
        self._on_core: Callable[[psutil.Process], None] | None = None

    def run(
        self,
        model: Path,
        *,
        plan: MeasurePlan = PLAN,
        on_core: Callable[[psutil.Process], None] | None = None,
        on_state: Hook = lambda _: None,
        env: Mapping[str, str] = MappingProxyType({}),
        **changes: Any,
    ) -> Measurement | Failure:
        """Run a configuration. `on_core` gets the engine core once, early in its start."""
        self.log.unlink(missing_ok=True)
        self._on_core = on_core
        config = EngineConfig({**ARGS, "model": str(model), **changes}, {"HF_HUB_OFFLINE": "1", **env})
        return self.engine.run(config, WORKLOAD, dataclasses.replace(plan, log_path=self.log), on_state)

    def core(self) -> psutil.Process | None:
        return next((p for p in map(ProcessIdentity.process, self.seen) if p and "EngineCor" in _name(p)), None)

    def left(self) -> list[str]:
        """Names of the processes of engines that live on."""
        return [_name(p) for p in map(ProcessIdentity.process, self.seen) if p and _name(p).startswith("VLLM")]

    def _note(self, processes: list[ProcessIdentity]) -> None:
        self.seen |= set(processes)
        if self._on_core is not None and (core := self.core()) is not None:
            act, self._on_core = self._on_core, None
            act(core)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("failures"))
    yield bench
    bench.pool.close()


@pytest.fixture
def before() -> ResourceSnapshot:
    return ResourceSnapshot.take(os.getpid(), {})


def left_segments(before: ResourceSnapshot) -> list[str]:
    """Shared memory that appeared since and that is not in use by a process of somebody else."""
    return [text for text in prove_clean(before, dict, limit_s=0) if text.startswith("shared memory")]


def send_once(bench: Bench, signal_number: int, state: str) -> Hook:
    """Send a signal to the engine core as soon as the trial has reached a state."""
    sent: list[int] = []

    def hook(text: str) -> None:
        core = bench.core()
        if text.startswith(state) and not sent and core is not None:
            sent.append(core.pid)
            core.send_signal(signal_number)

    return hook


def failure(outcome: Measurement | Failure) -> Failure:
    assert isinstance(outcome, Failure), outcome
    return outcome


def test_cache_that_holds_no_request_tells_what_is_needed_and_what_would_fit(
    bench: Bench, model: Path, before: ResourceSnapshot
) -> None:
    failed = failure(bench.run(model, max_model_len=8192, kv_cache_memory_bytes=2**26))

    assert (failed.kind, failed.stage) == (FailureKind.OOM_KV_CACHE, Stage.KV_CACHE), failed
    assert failed.needed_gib is not None
    assert failed.available_gib is not None
    assert failed.fitting_tokens is not None
    assert failed.needed_gib > failed.available_gib
    assert failed.available_gib == pytest.approx(2**26 / 2**30, abs=0.006)
    assert 0 < failed.fitting_tokens < 8192
    assert left_segments(before) == []


def test_model_with_cut_off_weights_is_unavailable(bench: Bench, model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken-model"
    broken.mkdir()
    for file in model.iterdir():
        if file.name != "model.safetensors":
            shutil.copy(file, broken)
    with (model / "model.safetensors").open("rb") as whole:
        (broken / "model.safetensors").write_bytes(whole.read(10_000_000))

    failed = failure(bench.run(broken))

    assert (failed.kind, failed.stage) == (FailureKind.MODEL_UNAVAILABLE, Stage.WEIGHTS), failed
    assert bench.left() == []


def test_refused_arguments_are_the_configuration_s_fault(bench: Bench, model: Path) -> None:
    failed = failure(bench.run(model, max_num_batched_tokens=2))

    assert (failed.kind, failed.stage) == (FailureKind.INVALID_CONFIG, Stage.CONFIG), failed
    assert "max_num_batched_tokens" in failed.message


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few KiB on which folders can be made and nothing can be written."""
    place = tmp_path / "full"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "full", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    with contextlib.suppress(OSError), (place / "filler").open("wb", buffering=0) as filler:
        while filler.write(b"0" * 1024):
            pass
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_cache_of_compiled_code_on_a_full_disk_is_the_machine_s_fault(
    bench: Bench, model: Path, before: ResourceSnapshot, full_disk: Path
) -> None:
    caches = {"VLLM_CACHE_ROOT": str(full_disk / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(full_disk / "inductor")}

    plan = dataclasses.replace(PLAN, start_budget_s=300)  # it compiles, up to where it writes

    failed = failure(bench.run(model, plan=plan, env=caches, enforce_eager=False))

    assert failed.kind is FailureKind.HOST_DISK, failed
    assert not failed.kind.is_configuration_fault
    assert bench.left() == []
    assert left_segments(before) == []


def test_server_whose_port_somebody_else_took_meanwhile_says_so(model: Path, tmp_path: Path) -> None:
    taken: list[socket.socket] = []

    def take_its_port(family: list[ProcessIdentity]) -> None:
        server = next((p for p in map(ProcessIdentity.process, family) if p), None)
        if server is not None and not taken:
            port = next(word for word in server.cmdline() if word.startswith("--port=")).removeprefix("--port=")
            taken.append(socket.create_server(("127.0.0.1", int(port))))

    engine = ServedTrialEngine(note_processes=take_its_port)
    plan = dataclasses.replace(PLAN, log_path=tmp_path / "serve.log")

    outcome = engine.run(EngineConfig({**ARGS, "model": str(model)}), WORKLOAD, plan, lambda _: None)
    for one in taken:
        one.close()

    failed = failure(outcome)
    assert (failed.kind, failed.stage) == (FailureKind.PORT_IN_USE, Stage.CONFIG), failed


def test_core_killed_while_it_starts_has_crashed(bench: Bench, model: Path, before: ResourceSnapshot) -> None:
    failed = failure(bench.run(model, on_core=psutil.Process.kill))

    assert failed.kind is FailureKind.CRASHED, failed
    assert failed.stage not in (Stage.WARMUP, Stage.RUN), failed
    assert bench.left() == []
    assert left_segments(before) == []


@pytest.mark.parametrize(("state", "stage"), [("warm up", Stage.WARMUP), ("run 0/", Stage.RUN)])
def test_core_killed_later_has_crashed_at_that_stage(
    bench: Bench, model: Path, before: ResourceSnapshot, state: str, stage: Stage
) -> None:
    failed = failure(bench.run(model, on_state=send_once(bench, signal.SIGKILL, state)))

    assert (failed.kind, failed.stage) == (FailureKind.CRASHED, stage), failed
    assert bench.left() == []
    assert left_segments(before) == []


def test_start_that_hangs_is_ended_and_leaves_nothing(bench: Bench, model: Path, before: ResourceSnapshot) -> None:
    plan = dataclasses.replace(PLAN, start_budget_s=20)

    failed = failure(bench.run(model, plan=plan, on_core=psutil.Process.suspend))

    assert failed.kind is FailureKind.HUNG, failed
    assert failed.stage not in (Stage.WARMUP, Stage.RUN), failed
    assert bench.left() == []
    assert left_segments(before) == []


def test_run_that_hangs_is_ended_and_leaves_nothing(bench: Bench, model: Path, before: ResourceSnapshot) -> None:
    plan = dataclasses.replace(PLAN, run_budget_s=20)

    failed = failure(bench.run(model, plan=plan, on_state=send_once(bench, signal.SIGSTOP, "run 0/")))

    assert (failed.kind, failed.stage) == (FailureKind.HUNG, Stage.RUN), failed
    assert bench.left() == []
    assert left_segments(before) == []
