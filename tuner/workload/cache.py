"""Tokenised sources on disk, by content hash: what was tokenised once is read back in every later study and process.

A file is a SHA-256 over the rest, a line of JSON (lengths, outputs, skipped lines) and the ids as little-endian
unsigned 32-bit. It is written beside its place and moved there, so a reader sees a whole file or none; one that does
not match its checksum is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from tuner.errors import StoreError
from tuner.workload.source import Passage, SkippedLine, Source, unreadable

FORMAT = 1
"""Part of every key: raise it whenever a reader changes what it makes of the same file."""

_CHECKSUM_BYTES = 32


def content_key(files: Iterable[Path], *facts: str | int | None) -> str:
    """Return the key of a source: 32 hex digits over the names and bytes of its files and every other fact it hangs on.

    Raises
    ------
    WorkloadError
        If a file cannot be read.
    """
    digest = hashlib.sha256(json.dumps([FORMAT, *facts]).encode())
    for path in files:
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise unreadable(path, error) from error
        digest.update(json.dumps([str(path), content]).encode())
    return digest.hexdigest()[:32]


def cached(folder: Path | None, key: str, make: Callable[[], Source]) -> Source:
    """Return the source of this key: read from `folder`, or made and kept there. `None` keeps nothing.

    Raises
    ------
    StoreError
        If the folder cannot be written.
    """
    if folder is None:
        return make()
    path = folder / f"{key}.tokens"
    found = _read(path)
    if found is None:
        found = make()
        _write(path, found)
    return found


def _read(path: Path) -> Source | None:
    """Return the source in this file, or `None` if there is none or it is not whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, body = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    return _decoded(body) if hashlib.sha256(body).digest() == checksum else None


def _write(path: Path, source: Source) -> None:
    body = _encoded(source)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(body).digest() + body)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StoreError(
            f"{path.parent}: the cache of tokenised text cannot be written ({error.strerror or error}); "
            "free space or make the folder writable"
        ) from error


def _encoded(source: Source) -> bytes:
    header = {
        "passages": [[len(passage.ids), passage.output_tokens] for passage in source.passages],
        "skipped": [[line.path, line.line, line.reason] for line in source.skipped],
    }
    ids = b"".join(passage.ids.astype("<u4").tobytes() for passage in source.passages)
    return json.dumps(header).encode() + b"\n" + ids


def _decoded(body: bytes) -> Source:
    text, _, packed = body.partition(b"\n")
    header = json.loads(text)
    ids = np.frombuffer(packed, dtype="<u4").astype(np.uint32)
    ends = np.cumsum([length for length, _ in header["passages"]])
    return Source(
        tuple(
            Passage(ids[end - length : end], output_tokens)
            for end, (length, output_tokens) in zip(ends, header["passages"], strict=True)
        ),
        tuple(SkippedLine(path, line, reason) for path, line, reason in header["skipped"]),
    )
