"""vLLM's own validation of a configuration, in a warm helper process: a bad configuration cannot hurt the driver.

`ConfigChecker` is the driver's side. Run as a module, this file is the helper: a JSON document a line in, one a line
out, on a pipe of its own, so that nothing that vLLM prints can be taken for an answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from tuner.config import EngineConfig
from tuner.errors import EngineUnsupportedError

FIRST_ANSWER_S = 180.0
"""Importing vLLM on a cold disk takes tens of seconds."""
ANSWER_S = 60.0
MOST_CHARACTERS = 400
"""Of a refusal: enough for every text of vLLM that says what is wrong before it says what might be done."""
TRIES = 2
"""A helper that died may have been killed for memory; one that dies twice died of the configuration."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """vLLM accepts the configuration and makes these arguments of it."""

    effective_args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refused:
    """vLLM refuses the configuration, in one line."""

    message: str


class _HelperDiedError(Exception):
    """The helper ended before it answered."""


class ConfigChecker:
    """Asks a helper process what vLLM says of configurations. Started on the first question, restarted when it dies.

    Parameters
    ----------
    log_path:
        Where the helper's own output goes.
    """

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: IO[bytes] | None = None

    def check(self, config: EngineConfig) -> Resolved | Refused:
        """Validate one configuration.

        Raises
        ------
        EngineUnsupportedError
            When the helper cannot import vLLM or find a device to validate for.
        """
        question = {"args": dict(config.args), "env": dict(config.env)}
        answer: dict[str, Any] | None = None
        for _ in range(TRIES):
            try:
                answer = self._ask(question)
                break
            except _HelperDiedError:
                self.close()
        if answer is None:
            self.close()
            return Refused("vLLM's validation of this configuration died or did not end")
        if "unusable" in answer:
            self.close()
            raise EngineUnsupportedError(answer["unusable"])
        return Resolved(answer["effective"]) if "effective" in answer else Refused(answer["refused"])

    def _start(self) -> None:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        read, write = os.pipe()
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(write)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write],
                start_new_session=True,
            )
        os.close(write)
        self._answers = os.fdopen(read, "rb", buffering=0)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """Return the helper's answer, or `None` when it takes too long.

        Raises
        ------
        _HelperDiedError
            When the helper ended instead of answering.
        """
        limit_s = ANSWER_S
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
            limit_s = FIRST_ANSWER_S
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise _HelperDiedError from error
        line = self._read_line(limit_s)
        if line is None:
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _read_line(self, limit_s: float) -> bytes | None:
        assert self._answers is not None
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(limit_s):
                    return None
                part = self._answers.read(65536)
                if not part:
                    raise _HelperDiedError
                line += part
        return line

    def close(self) -> None:
        """End the helper. Idempotent."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.kill()
            self._process.wait()
            with contextlib.suppress(BrokenPipeError):  # it closes all the same
                self._process.stdin.close()
            self._process = None
        if self._answers is not None:
            self._answers.close()
            self._answers = None


def _serve(answers: IO[str]) -> None:
    """Answer questions until the driver closes the pipe or is gone."""
    os.environ.update({"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"})
    for line in sys.stdin:
        question = json.loads(line)
        answers.write(json.dumps(_answer(EngineConfig(question["args"], question["env"]))) + "\n")
        answers.flush()


def _answer(config: EngineConfig) -> dict[str, Any]:
    try:
        from vllm.platforms import current_platform

        from tuner.engine.vllm import resolve
    except ImportError as error:
        return {"unusable": f"vLLM cannot be imported here: {error}"}
    if not current_platform.device_type:
        return {"unusable": "vLLM finds no device on this machine, so configurations cannot be validated here"}
    before = dict(os.environ)
    os.environ.update(config.env)
    try:
        return {"effective": resolve(config)}
    except Exception as error:  # noqa: BLE001  # vLLM's refusals have no common type, and each is an answer
        return {"refused": _one_line(error)}
    finally:
        os.environ.clear()
        os.environ.update(before)


def _one_line(error: Exception) -> str:
    """Boil vLLM's text, pydantic's wrapper included, down to the sentence that says what is wrong."""
    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if "[" not in str(part))  # a branch of a union is no name
        text = first["msg"].removeprefix("Value error, ")
        text = f"{where}: {text} (it is {first['input']!r:.60})" if where else text
    text = " ".join(text.split())
    return text[:MOST_CHARACTERS] if text else type(error).__name__


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "w") as pipe:
        _serve(pipe)
