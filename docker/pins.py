"""Pins for an image on somebody else's base: what the base has stays as it is, a lock file says all the rest.

Usage: python3 pins.py LOCK_FILE > constraints.txt
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path


def main(lock_file: Path) -> None:
    """Print a constraint for every installed distribution, then the lines of the lock for those that are missing."""
    installed = {canonical(d.name): d.version for d in importlib.metadata.distributions()}
    for name, version in sorted(installed.items()):
        print(f"{name}=={version}")
    for line in lock_file.read_text(encoding="utf-8").splitlines():
        name, sign, _ = line.partition("==")
        if sign and not name.startswith("#") and canonical(name) not in installed:
            print(line)


def canonical(name: str) -> str:
    """Return the name as all spellings of it compare (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
