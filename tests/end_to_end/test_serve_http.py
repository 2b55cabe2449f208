"""The exported configuration on the real engine: started with `vllm serve --config`, chatted with, measured."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import export_samples
import pytest

from objectives.measurement import Measurement
from tuner.config import EngineConfig
from tuner.engine.http import HttpSource, client_session
from tuner.engine.processes import ProcessIdentity, descendants, end_tree
from tuner.engine.protocol import MeasurePlan
from tuner.engine.serve import ServedTrialEngine
from tuner.engine.server import vllm_command
from tuner.export import FORMATS
from tuner.export.files import write
from tuner.workload.model import Request, Workload

pytestmark = pytest.mark.end_to_end

MODEL = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct"
ARGS = {"max_model_len": 1024, "max_num_seqs": 4, "enforce_eager": True, "enable_prefix_caching": False}
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1"}
START_S = 240.0


@pytest.fixture(autouse=True, scope="module")
def model_is_there() -> None:
    if not MODEL.is_dir():
        pytest.skip(f"{MODEL} is not there: `make {MODEL.parent.name}/{MODEL.name}` prepares it")


def test_the_exported_file_starts_a_server_that_answers_a_chat(tmp_path: Path) -> None:
    deployed = dataclasses.replace(export_samples.on_cpu(MODEL), args=ARGS, env=ENV)
    write(FORMATS["vllm"](deployed), tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [vllm_command(), "serve", "--config", f"{deployed.name}.yaml", "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "serve.log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=tmp_path, env={**os.environ, **ENV}, stdout=log, stderr=log, start_new_session=True
        )
    itself = ProcessIdentity.of(server.pid)
    try:
        wait_until_healthy(server, port, tmp_path / "serve.log")
        question = {"role": "user", "content": "What is the capital of France?"}
        chat = {"model": str(MODEL), "messages": [question], "max_tokens": 16, "temperature": 0.0}
        answer = ask(port, "chat/completions", chat)
        streamed = asyncio.run(stream(port, str(MODEL)))
    finally:
        left = end_tree([itself, *descendants(server.pid)], term_s=30)
        server.wait(30)

    assert answer["choices"][0]["message"]["content"].strip()
    assert answer["usage"]["completion_tokens"] > 0
    assert streamed == 20
    assert left == ()


def test_a_served_engine_is_measured_like_any_other(tmp_path: Path) -> None:
    requests = tuple(Request(0.5 * i, tuple(range(100 + i, 356 + i)), 8) for i in range(4))
    workload = Workload("short", requests, (100, 40_000), 0)
    config = EngineConfig({"model": str(MODEL), **ARGS}, ENV)
    plan = MeasurePlan(salt=11, start_budget_s=START_S, log_path=tmp_path / "engine.log")

    outcome = ServedTrialEngine().run(config, workload, plan, lambda _: None)

    assert isinstance(outcome, Measurement), outcome
    assert [r.error for r in outcome.requests] == [None] * 4
    assert [r.output_tokens for r in outcome.requests] == [8] * 4
    assert all(r.first_token_s is not None and r.first_token_s > r.sent_s for r in outcome.requests)
    assert [r.cached_tokens or 0 for r in outcome.requests] == [0] * 4
    assert outcome.speed_before is not None
    assert (outcome.engine.device_name, outcome.engine.max_model_len) == ("cpu", 1024)


def wait_until_healthy(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        assert server.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(log.read_text(errors="replace")[-3000:])


def ask(port: int, route: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


async def stream(port: int, model: str) -> int:
    async with client_session() as session:
        source = HttpSource(session, f"http://127.0.0.1:{port}", model)
        request = Request(0.0, tuple(range(200, 300)), 20)
        return sum([delta.token_count async for delta in source.generate(request, "one")])
