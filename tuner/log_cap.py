"""Engine logs of trials that are over, cut to a size that a year of nights can keep.

The head says what was started, the tail how it ended; the evidence of a failure is kept whole wherever it stands.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from objectives.measurement import Failure

MOST_BYTES = 4 * 2**20
"""An engine that starts, serves and stops prints 10 to 300 KiB."""
HEAD_BYTES = 2**18
AROUND_BYTES = 2**17
"""Before and after a line of evidence: more than the longest traceback that vLLM's wrappers pile up."""
NEEDLE_CHARACTERS = 60
"""Of the evidence's first line; a classifier may have cut or joined the rest of what it quotes."""
CHUNK_BYTES = 2**20
MOST_PLACES = 3


def cap_logs(folder: Path, failure: Failure | None, most_bytes: int = MOST_BYTES) -> None:
    """Cut every log in a trial's folder that is longer than `most_bytes`, and its evidence.

    Raises
    ------
    OSError
        When the file system refuses; the log is then as it was.
    """
    for path in sorted(folder.glob("*.log")):
        if path.stat().st_size > most_bytes:
            _cap(path, failure.message if failure is not None else "", most_bytes)


def _cap(path: Path, evidence: str, most_bytes: int) -> None:
    size = path.stat().st_size
    spans = [(0, HEAD_BYTES), (size - (most_bytes - HEAD_BYTES), size)]
    with path.open("rb") as log:
        places = _places(log, _needle(evidence))
        spans += [(max(0, at - AROUND_BYTES), min(size, at + AROUND_BYTES)) for at in places]
        _write(path, log, list(_joined(spans)))


def _needle(evidence: str) -> bytes:
    lines = evidence.strip().splitlines()
    return lines[0][:NEEDLE_CHARACTERS].encode() if lines else b""


def _places(log: BinaryIO, needle: bytes) -> list[int]:
    """Where the evidence stands first, without reading the whole log at once."""
    places: list[int] = []
    offset, carry = 0, b""
    while needle and len(places) < MOST_PLACES and (chunk := log.read(CHUNK_BYTES)):
        text = carry + chunk
        found = text.find(needle)
        if found >= 0:
            places.append(offset - len(carry) + found)
        offset += len(chunk)
        carry = text[-(len(needle) - 1) :] if len(needle) > 1 else b""
    return places


def _joined(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Spans in order, without overlap."""
    first, *rest = sorted(spans)
    low, high = first
    for next_low, next_high in rest:
        if next_low <= high:
            high = max(high, next_high)
        else:
            yield low, high
            low, high = next_low, next_high
    yield low, high


def _write(path: Path, log: BinaryIO, spans: list[tuple[int, int]]) -> None:
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as out:
            end = 0
            for low, high in spans:
                if low > end:
                    out.write(f"\n[… {low - end:,} bytes left out …]\n".encode())
                log.seek(low)
                while low < high and (chunk := log.read(min(CHUNK_BYTES, high - low))):
                    out.write(chunk)
                    low += len(chunk)
                end = high
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
