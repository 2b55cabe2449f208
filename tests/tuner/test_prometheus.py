from __future__ import annotations

import socket
import urllib.request

import pytest
from study_samples import sample_history

from tuner.ledger import History
from tuner.prometheus import Exporter
from tuner.view import Objective, view

OBJECTIVES = (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s"))


def scrape(exporter: Exporter) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=5) as answer:
        rows = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (row.rpartition(" ") for row in rows)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_figures_are_those_of_the_ledger_at_the_moment() -> None:
    histories = [History(None, (), (), ()), sample_history(30)]
    exporter = Exporter(free_port(), "night", lambda: histories[0], OBJECTIVES)
    try:
        before = scrape(exporter)
        histories.pop(0)
        after = scrape(exporter)
    finally:
        exporter.close()

    study, history = view(sample_history(30), OBJECTIVES), sample_history(30)
    assert before['tuner_trials{state="complete",study="night"}'] == 0
    assert after['tuner_trials{state="complete",study="night"}'] == sum(t.state == "complete" for t in history.trials)
    assert after['tuner_trials{state="running",study="night"}'] == 1
    assert after['tuner_front_size{study="night"}'] == len(study.front)
    assert after['tuner_hypervolume{study="night"}'] == pytest.approx(study.hypervolume)
    assert after['tuner_engine_seconds_total{study="night"}'] == pytest.approx(
        sum(t.engine_s for t in history.finished)
    )
    kinds = {t.failure.kind.value for t in history.finished if t.failure}
    assert {name for name in after if name.startswith("tuner_failures")} == {
        f'tuner_failures{{kind="{kind}",study="night"}}' for kind in kinds
    }


def test_nobody_but_this_machine_is_served() -> None:
    exporter = Exporter(free_port(), "night", lambda: History(None, (), (), ()), OBJECTIVES)
    try:
        assert exporter._server.server_address[0] == "127.0.0.1"
    finally:
        exporter.close()


def test_port_that_is_taken_is_an_error_that_can_be_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            Exporter(taken.getsockname()[1], "night", lambda: History(None, (), (), ()), OBJECTIVES)
