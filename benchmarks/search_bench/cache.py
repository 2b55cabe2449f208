"""What was computed once, in a file of JSON lines that several processes may append to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Cache:
    """Key -> JSON value; each new value is appended at once, so that nothing is computed twice in later runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                key, value = json.loads(line)
                self._values[key] = value

    def get(self, key: str) -> Any:
        """Return the value, or `None`."""
        return self._values.get(key)

    def put(self, key: str, value: Any) -> None:
        """Keep a value."""
        self._values[key] = value
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps([key, value], separators=(",", ":")) + "\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def known(self) -> list[str]:
        """Return all keys."""
        return list(self._values)
