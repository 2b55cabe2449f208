"""What was computed once, in a file of JSON lines that several processes may append to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Cache:
    """Key -> JSON value; each new value is appended at once, so that nothing is computed twice in later runs.

    Parameters
    ----------
    version:
        Of what the values are computed by; a file of another version is begun anew.
    """

    def __init__(self, path: Path, version: str) -> None:
        self._path = path
        self._version = version
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and lines[0] != json.dumps(version):
            path.unlink()
            lines = []
        self._values: dict[str, Any] = dict(json.loads(line) for line in lines[1:])

    def get(self, key: str) -> Any:
        """Return the value, or `None`."""
        return self._values.get(key)

    def put(self, key: str, value: Any) -> None:
        """Keep a value."""
        self._values[key] = value
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._path.exists():
            self._path.write_text(json.dumps(self._version) + "\n")
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, (json.dumps([key, value], separators=(",", ":")) + "\n").encode())
        finally:
            os.close(file)

    def known(self) -> list[str]:
        """Return all keys."""
        return list(self._values)
