"""One `vllm serve` process: started from a config file as a deployment starts it, told from others, ended.

It listens on a fresh port of 127.0.0.1, under a model name that nobody else has, in a process group of its own.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import IO

import psutil

from tuner.config import EngineConfig
from tuner.engine.processes import ProcessIdentity, descendants, end_tree
from tuner.errors import EngineUnsupportedError
from tuner.export.arguments import config_file
from tuner.export.text import yaml_text

_ADDRESS = "127.0.0.1"
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # Only with it does the server have the route that empties the prefix cache between repeats.
    "VLLM_SERVER_DEV_MODE": "1",
}


class Server:
    """One `vllm serve` process and its family.

    Parameters
    ----------
    config:
        Engine arguments with the model, and environment variables.
    folder:
        Where the config file is written.
    log:
        What the server's processes print goes here.
    text:
        What the config file says; made from `config` where it is left out.
    """

    def __init__(self, config: EngineConfig, folder: Path, log: IO[bytes], text: str | None = None) -> None:
        self.port = _free_port()
        self.name = f"tuner-{uuid.uuid4().hex}"
        file = folder / "serve.yaml"
        file.write_text(yaml_text(config_file(config.args)) if text is None else text, encoding="utf-8")
        self._process = subprocess.Popen(
            [vllm_command(), "serve", "--config", str(file), *self._options()],
            env={**os.environ, **config.env, **_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._family: list[ProcessIdentity] = [ProcessIdentity.of(self._process.pid)]

    def _options(self) -> list[str]:
        """What is not the deployment's own; an option on the command line wins over the file."""
        asked = f"--host={_ADDRESS}", f"--port={self.port}", f"--served-model-name={self.name}"
        return [*asked, "--enable-prompt-tokens-details"]

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://{_ADDRESS}:{self.port}"

    @property
    def exit_code(self) -> int | None:
        """Of the server's process; `None` while it runs."""
        return self._process.poll()

    def family(self) -> list[ProcessIdentity]:
        """Every process of this server that still lives; those of a dead parent are remembered."""
        found = {*self._family, *descendants(self._process.pid)} if self.exit_code is None else {*self._family}
        self._family = [process for process in found if process.is_alive()]
        return self._family

    def owns_its_port(self) -> bool:
        """Whether a process of this server is the one that listens on its port."""
        return any(_listens(process.pid, self.port) for process in self.family())

    def stop(self, budget_s: float) -> None:
        """End the server: TERM to its group and, after `budget_s`, KILL to all of its family that is left."""
        family = self.family()
        _signal_group(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(budget_s)
        except subprocess.TimeoutExpired:
            _signal_group(self._process.pid, signal.SIGKILL)
            self._process.wait()
        end_tree([process for process in family if process.is_alive()])


def vllm_command() -> str:
    """Path of the `vllm` command that belongs to this Python.

    Raises
    ------
    EngineUnsupportedError
        When there is none.
    """
    command = Path(sys.executable).with_name("vllm")
    if not command.exists():
        raise EngineUnsupportedError(
            f"{command}: vLLM's command is not installed beside this Python; run `make install`, or install vLLM"
        )
    return str(command)


def _free_port() -> int:
    """Port that nobody has now. vLLM takes it before it loads the model; if someone is faster, it ends and says so."""
    with socket.socket() as probe:
        probe.bind((_ADDRESS, 0))
        return int(probe.getsockname()[1])


def _listens(pid: int, port: int) -> bool:
    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
