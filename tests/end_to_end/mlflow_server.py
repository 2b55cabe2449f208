"""MLflow's tracking server for one test, reached over HTTP only."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PATIENCE_S = 90.0


def wait_for(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.1)
    return False


class Server:
    """A server that is started, killed and started again."""

    def __init__(self, root: Path, port: int, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.root = root
        self.uri = f"http://127.0.0.1:{port}"
        self._command = list(command)
        self._env = dict(env)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.root / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                env={**env, **self._env},
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.root,
                start_new_session=True,
            )
        assert wait_for(self.is_up), self.log()[-2000:]

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, 9)
            self.process.wait(timeout=30)
            self.process = None

    def is_up(self) -> bool:
        return self.answer("/health") == 200

    def answer(self, path: str, host: str | None = None) -> int | None:
        """Status of a GET, under another host name when one is given; `None` where nobody answers."""
        request = urllib.request.Request(f"{self.uri}{path}", headers={"Host": host} if host else {})
        try:
            with urllib.request.urlopen(request, timeout=2) as answered:
                return int(answered.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def log(self) -> str:
        return (self.root / "server.log").read_text()
