"""The Ray head of docker/compose.yaml on free ports of this machine, for one test module."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from mlflow_server import Server, wait_for

from tuner.tracking.server import free_port

ROOT = Path(__file__).parents[2]
PROGRAMS = sysconfig.get_path("scripts")
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]


@dataclass
class Head:
    """The head of compose.yaml on ports of this machine that are free, with what its clients need."""

    root: Path
    dashboard: int
    process: subprocess.Popen[bytes]

    def tuner(self, *arguments: str, token: str = "token") -> subprocess.CompletedProcess[str]:
        """Run `docker compose run tuner …` as the service's entry point does, with a token of `root`."""
        *submit, program = SERVICES["tuner"]["entrypoint"]
        assert program == "tuner"
        words = [word.replace("ray:8265", f"127.0.0.1:{self.dashboard}") for word in submit]
        return subprocess.run(
            [f"{PROGRAMS}/{words[0]}", *words[1:], sys.executable, "-m", "tuner", *arguments],
            env=environment("tuner", self.root / token),
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def health(self, port: int) -> int:
        test = [word.replace("6379", str(port)) for word in SERVICES["ray"]["healthcheck"]["test"][1:]]
        env = environment("ray", self.root / "token")
        command = [f"{PROGRAMS}/{test[0]}", *test[1:]]
        return subprocess.run(command, env=env, capture_output=True, check=False, timeout=60).returncode


def environment(service: str, token: Path) -> dict[str, str]:
    defined = {**SERVICES[service]["environment"], "RAY_AUTH_TOKEN_PATH": str(token)}
    path = os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", os.defpath)])
    return {**os.environ, **defined, "PYTHONPATH": str(ROOT), "PATH": path}


@contextmanager
def ray_head() -> Iterator[Head]:
    """Start it, and end it with everything that it started."""
    port = free_port()
    root = Path(tempfile.mkdtemp(prefix="ray-"))  # short: Ray's sockets lie in it
    (root / "token").write_text("0123456789abcdef0123456789abcdef")
    (root / "home").mkdir()
    (root / "another").write_text("fedcba9876543210fedcba9876543210")
    dashboard = free_port()
    here = {"6379": str(port), "8265": str(dashboard), "0.0.0.0": "127.0.0.1"}
    words = list(SERVICES["ray"]["command"])
    for there, instead in here.items():
        words = [word.replace(there, instead) for word in words]
    # Beside another Ray on this machine, and away from the ports that workers take.
    words += ["--node-ip-address=127.0.0.1", f"--dashboard-agent-listen-port={free_port()}", "--num-cpus=1"]
    words += [f"--temp-dir={root / 'tmp'}", "--min-worker-port=0", "--max-worker-port=0"]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            [f"{PROGRAMS}/{words[0]}", *words[1:]],
            env={**environment("ray", root / "token"), "TUNER_HOME": str(root / "home")},
            cwd=root,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        started = Head(root, dashboard, process)
        probe = Server(root, dashboard, [], {})
        assert wait_for(lambda: probe.answer("/api/version") == 401), (root / "log").read_text()[-2000:]
        assert wait_for(lambda: started.health(port) == 0, 60)
        yield started
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(root, ignore_errors=True)
