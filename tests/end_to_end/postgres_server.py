"""A PostgreSQL of this machine's own packages for one test, as an ordinary user on a port of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from tuner.tracking.server import free_port

START_S = 30.0
ROOT_RUNS_AS = "postgres"
"""PostgreSQL refuses to run as root; Debian's packages bring this user."""


def binaries() -> Path | None:
    """Folder of `initdb` and `postgres`: the newest of Debian's, or that of the one on the path."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: float(p.parts[-3]))
    if debian:
        return debian[-1].parent
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


class Postgres:
    """A server that is started, killed and started again. Its user needs a password, as in compose.yaml."""

    def __init__(self, bin_folder: Path, password: str) -> None:
        self._bin = bin_folder
        self._user = ROOT_RUNS_AS if os.geteuid() == 0 else None
        # Not under pytest's own folder, which no other user may enter. Short, because it holds the socket.
        self.folder = Path(tempfile.mkdtemp(prefix="pg-"))
        self.port = free_port()
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None
        if self._user:
            shutil.chown(self.folder, self._user)
        self._make()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _make(self) -> None:
        secret = self.folder / "password"
        secret.write_text(self._password)
        secret.chmod(0o644)
        options = ["--pgdata", str(self.folder / "data"), "--username", "tuner", "--pwfile", str(secret)]
        options += ["--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C", "--no-sync"]
        subprocess.run(
            [self._bin / "initdb", *options], user=self._user, cwd=self.folder, check=True, capture_output=True
        )

    def start(self) -> None:
        command = [
            self._bin / "postgres",
            "-D",
            str(self.folder / "data"),
            "-p",
            str(self.port),
            "-k",
            str(self.folder),
        ]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "-h", "127.0.0.1", "-F"],
                user=self._user,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until = time.monotonic() + START_S
        while not self._is_ready():
            assert time.monotonic() < until, (self.folder / "log").read_text()[-2000:]
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        asked = [self._bin / "pg_isready", "--host", "127.0.0.1", "--port", str(self.port)]
        return subprocess.run(asked, capture_output=True, check=False).returncode == 0

    def create_database(self, name: str) -> None:
        command = [self._bin / "createdb", "--host", "127.0.0.1", "--port", str(self.port), "--username", "tuner", name]
        subprocess.run(command, env={**os.environ, "PGPASSWORD": self._password}, check=True, capture_output=True)

    def stop(self) -> None:
        """End it at once; what was committed is there at the next start."""
        if self._process is not None:
            os.killpg(self._process.pid, 3)  # SIGQUIT: an immediate shutdown
            self._process.wait(timeout=30)
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)
