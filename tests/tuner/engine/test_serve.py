"""Life and identity of a served engine, with a stand-in for the `vllm` command."""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from objectives.measurement import Failure, FailureKind, Measurement
from tuner.config import EngineConfig
from tuner.engine import serve, server
from tuner.engine.processes import ProcessIdentity
from tuner.engine.protocol import MeasurePlan
from tuner.engine.serve import ServedTrialEngine
from tuner.errors import EngineUnsupportedError
from tuner.workload.model import Request, Workload

WORKLOAD = Workload("short", tuple(Request(0.01 * i, (5, 6, 7), 4) for i in range(3)), (10, 20), 0)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = tmp_path / "vllm"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("fake_vllm.py")} "$@"\n')
    command.chmod(0o755)
    monkeypatch.setattr(server, "vllm_command", lambda: str(command))


def run(kind: str, log: Path | None = None, **budgets: float) -> tuple[Measurement | Failure, list[ProcessIdentity]]:
    seen: dict[ProcessIdentity, None] = {}
    engine = ServedTrialEngine(note_processes=lambda family: seen.update(dict.fromkeys(family)))
    plan = MeasurePlan(speed_probe=False, salt=2, log_path=log, **budgets)  # type: ignore[arg-type]  # floats only
    outcome = engine.run(EngineConfig({"model": kind}), WORKLOAD, plan, lambda _: None)
    return outcome, list(seen)


def test_a_run_is_measured_over_http_and_leaves_nothing(tmp_path: Path) -> None:
    outcome, family = run("right", tmp_path / "engine.log")

    assert isinstance(outcome, Measurement)
    assert [r.error for r in outcome.requests] == [None] * 3
    assert [r.output_tokens for r in outcome.requests] == [4] * 3
    assert (outcome.engine.vllm_version, outcome.engine.max_model_len) == ("0.32.0", 4096)
    assert outcome.engine.stop_s > 0
    assert family
    assert not any(process.is_alive() for process in family)


def test_a_server_is_started_from_the_file_that_its_configuration_is_deployed_with() -> None:
    config = EngineConfig({"model": "dies_at_start"})
    engine = ServedTrialEngine(files={config.key(): "# as exported\nmodel: right\n"})

    outcome = engine.run(config, WORKLOAD, MeasurePlan(speed_probe=False), lambda _: None)

    assert isinstance(outcome, Measurement)


@pytest.mark.parametrize(
    ("kind", "failure"),
    [
        ("dies_at_start", FailureKind.OOM_KV_CACHE),
        ("dies_on_request", FailureKind.CRASHED),
        ("answers_400", FailureKind.CRASHED),
        ("wrong_name", FailureKind.PORT_IN_USE),
    ],
)
def test_what_goes_wrong_is_a_failure_of_its_kind(kind: str, failure: FailureKind) -> None:
    outcome, family = run(kind)

    assert isinstance(outcome, Failure)
    assert outcome.kind is failure
    assert not any(process.is_alive() for process in family)


def test_a_silent_stranger_on_its_port_does_not_hide_that_the_server_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_HEALTH_S", 0.2)
    monkeypatch.setattr(serve, "_PROOF_S", 0.5)  # the port stays taken: nothing to wait for
    strangers: list[socket.socket] = []

    def take_its_port(family: list[ProcessIdentity]) -> None:
        process = next((p for p in map(ProcessIdentity.process, family) if p), None)
        if process is not None and not strangers:
            port = next(word for word in process.cmdline() if word.startswith("--port=")).removeprefix("--port=")
            strangers.append(socket.create_server(("127.0.0.1", int(port))))

    engine = ServedTrialEngine(note_processes=take_its_port)
    outcome = engine.run(EngineConfig({"model": "right"}), WORKLOAD, MeasurePlan(speed_probe=False), lambda _: None)
    for stranger in strangers:
        stranger.close()

    assert isinstance(outcome, Failure)
    assert outcome.kind is FailureKind.PORT_IN_USE


def test_a_start_that_takes_too_long_is_ended_as_hung() -> None:
    outcome, _ = run("never_ready", start_budget_s=1.5)

    assert isinstance(outcome, Failure)
    assert outcome.kind is FailureKind.HUNG


def test_a_server_that_ignores_term_is_killed_with_its_children() -> None:
    outcome, family = run("ignores_term", stop_budget_s=0.5)

    assert isinstance(outcome, Measurement)
    assert not any(process.is_alive() for process in family)
    assert not [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def test_a_stranger_on_the_port_is_not_taken_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale server that answers the health check while ours is still starting."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        monkeypatch.setattr(server, "_free_port", lambda: stranger.getsockname()[1])
        threading.Thread(target=_answer_ok, args=(stranger,), daemon=True).start()

        outcome, _ = run("right")

    assert isinstance(outcome, Failure)
    assert outcome.kind is FailureKind.PORT_IN_USE


def test_without_vllms_command_the_sentence_says_where_it_was_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))

    with pytest.raises(EngineUnsupportedError, match="elsewhere/vllm"):
        server.vllm_command()


def _answer_ok(server: socket.socket) -> None:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
