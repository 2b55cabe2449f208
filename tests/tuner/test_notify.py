from __future__ import annotations

import http.server
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tuner import notify as room
from tuner.notify import notify
from tuner.spec import Notify

DOCUMENT = {"study": "night", "ending": "deadline", "text": "a trial takes about 60 s", "front": [1, 2]}
SECRET = "correct-horse-battery"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PAUSE_S", 0.01)


class Receiver:
    """A webhook that answers with these statuses, the last for ever."""

    def __init__(self, *statuses: int) -> None:
        self.bodies: list[Any] = []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(statuses[min(len(receiver.bodies), len(statuses)) - 1])
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/hooks/T0K3N"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def broken_webhook() -> Iterator[Receiver]:
    receiver = Receiver(500)
    yield receiver
    receiver.close()


def test_command_reads_the_summary_on_its_standard_input(tmp_path: Path) -> None:
    program = f"import sys; open({str(tmp_path / 'got')!r}, 'w').write(sys.stdin.read() + sys.argv[1])"
    told: list[str] = []

    notify(Notify(command=(sys.executable, "-c", program, "; $(touch pwned)")), DOCUMENT, {}, told.append)

    assert (tmp_path / "got").read_text() == json.dumps(DOCUMENT) + "; $(touch pwned)"
    assert told == []


def test_webhook_that_refuses_once_is_asked_again() -> None:
    receiver, told = Receiver(503, 200), list[str]()
    try:
        notify(Notify(url=receiver.url), DOCUMENT, {}, told.append)
    finally:
        receiver.close()

    assert receiver.bodies == [DOCUMENT, DOCUMENT]
    assert told == []


def test_webhook_that_keeps_refusing_is_told_without_its_address(broken_webhook: Receiver) -> None:
    told: list[str] = []

    notify(Notify(url=broken_webhook.url), DOCUMENT, {}, told.append)

    assert len(broken_webhook.bodies) == 3
    assert len(told) == 1
    assert "500" in told[0]
    assert "T0K3N" not in told[0]


def test_nobody_waits_for_a_command_that_hangs() -> None:
    told: list[str] = []
    began_s = time.monotonic()

    notify(Notify(command=("sleep", "60"), timeout_s=0.2), DOCUMENT, {}, told.append)

    assert time.monotonic() - began_s < 5
    assert "sleep" in told[0]
    assert "timed out" in told[0]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("/nowhere/at-all",), "No such file"),
        ((sys.executable, "-c", "import sys; sys.exit('no mail today')"), "status 1: no mail today"),
    ],
)
def test_command_that_fails_is_told_in_a_sentence(command: tuple[str, ...], said: str) -> None:
    told: list[str] = []

    notify(Notify(command=command), DOCUMENT, {}, told.append)

    assert said in told[0]
    assert "the study itself is not touched" in told[0]


def test_secrets_are_masked_in_what_is_sent_and_in_what_is_said(tmp_path: Path) -> None:
    program = "import sys; sys.exit(sys.stdin.read())"
    told: list[str] = []

    document = {**DOCUMENT, "text": f"the hub refused {SECRET}"}
    notify(Notify(command=(sys.executable, "-c", program)), document, {"HF_TOKEN": SECRET}, told.append)

    assert "the hub refused ***" in told[0]
    assert SECRET not in told[0]


def test_address_that_is_no_web_address_is_refused() -> None:
    with pytest.raises(ValueError, match="http:// or https://"):
        Notify(url="file:///etc/passwd")
