"""What every reader returns, and how every reader reads lines: the good ones in order, the bad ones named."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from tuner.errors import WorkloadError
from tuner.workload.spec import MOST_TOKENS
from tuner.workload.streams import Ids


@dataclass(frozen=True, slots=True)
class SkippedLine:
    """A line that was not used, and why. `line` counts from 1; `path` is as the study file leads to it."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Passage:
    """Text as token ids, shape (tokens,), with the number of output tokens where the source says it."""

    ids: Ids
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """The usable passages of a source in the order in which they are to be used, and the lines that are not."""

    passages: tuple[Passage, ...]
    skipped: tuple[SkippedLine, ...] = ()


def decoded_lines(path: Path, skipped: list[SkippedLine]) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of the lines that are not blank; lines that are not UTF-8 go to `skipped`.

    Only a newline ends a line: JSON strings may hold the other separators that `str.splitlines` knows.

    Raises
    ------
    WorkloadError
        If the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                content = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                try:
                    text = content.decode().strip()
                except UnicodeDecodeError as error:
                    skipped.append(SkippedLine(str(path), number, f"not UTF-8 (byte {error.start + 1} of the line)"))
                    continue
                if text:
                    yield number, text
    except OSError as error:
        raise unreadable(path, error) from error


def json_objects(path: Path, skipped: list[SkippedLine]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a JSON-lines file; everything else goes to `skipped`."""
    for number, text in decoded_lines(path, skipped):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            skipped.append(SkippedLine(str(path), number, f"not JSON ({error})"))
            continue
        if isinstance(value, dict):
            yield number, value
        else:
            skipped.append(SkippedLine(str(path), number, f"a JSON {type(value).__name__}, not an object"))


def token_count(value: object) -> int | None:
    """Return `value` as a number of tokens from 1 to `MOST_TOKENS`; `None` if it is not one (128.0 and "128" are)."""
    if isinstance(value, str):
        text = value.strip()
        value = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(MOST_TOKENS)) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= MOST_TOKENS:
        return None
    return int(value) if value == int(value) else None


def collected(
    path: Path,
    candidates: Iterable[tuple[int, Passage | str]],
    wanted: int | None,
    skipped: Sequence[SkippedLine],
    expected: str,
) -> Source:
    """Take candidates, each a line with its passage or the reason why there is none, until `wanted` are usable.

    Raises
    ------
    WorkloadError
        If none is.
    """
    passages: list[Passage] = []
    passed_over: list[SkippedLine] = []
    for line, candidate in candidates:
        if isinstance(candidate, str):
            passed_over.append(SkippedLine(str(path), line, candidate))
            continue
        passages.append(candidate)
        if len(passages) == wanted:
            break
    unused = (*skipped, *passed_over)
    if not passages:
        raise none_usable(path, unused, expected)
    return Source(tuple(passages), unused)


def is_text(value: object) -> TypeGuard[str]:
    """Whether this is a string that has an UTF-8 form; JSON can also spell halves of characters, which have none."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def unreadable(path: Path, error: OSError) -> WorkloadError:
    """Return the error for a file or folder that cannot be read."""
    return WorkloadError(
        f"{path}: cannot be read ({error.strerror or error}); set the workload's path to a readable file"
    )


def none_usable(path: Path, skipped: Sequence[SkippedLine], expected: str) -> WorkloadError:
    """Return the error for a source without one usable line; `expected` says what it should hold."""
    if not skipped:
        return WorkloadError(f"{path}: empty; it must hold {expected}")
    return WorkloadError(
        f"{path}: none of {len(skipped)} lines can be used (first: {skipped[0]}); it must hold {expected}"
    )
