"""Recorded traces with their own arrival times: Mooncake's JSON lines and Azure's LLM inference CSV.

Neither holds text. A Mooncake line names its prompt's blocks of 512 tokens by `hash_ids`: equal ids are equal tokens
(github.com/kvcache-ai/Mooncake, FAST25-release), so prompts here share prefixes where the recorded ones did.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from tuner.errors import WorkloadError
from tuner.workload.source import SkippedLine, decoded_lines, json_objects, none_usable, token_count
from tuner.workload.spec import Trace
from tuner.workload.streams import Ids, stream

MOONCAKE_BLOCK_TOKENS = 512

LATEST_MS = 1e14
"""Year 5138 since 1970: no timestamp in milliseconds is later."""

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

EXPECTED = {
    "mooncake": '{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]} on each line',
    "azure": f"the header {','.join(AZURE_COLUMNS)} and a request on each line below it",
}


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One recorded request. `time_ms` is on the trace's own clock; `hash_ids` is empty where none are recorded."""

    line: int
    time_ms: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read(spec: Trace, path: Path) -> tuple[list[TraceLine], list[SkippedLine]]:
    """Read the first `spec.limit` usable lines, in order of time (equal times in the file's order).

    Raises
    ------
    WorkloadError
        If the format cannot be told, the file cannot be read, or no line is usable.
    """
    form = spec.format or {".jsonl": "mooncake", ".csv": "azure"}.get(path.suffix.lower())
    if form is None:
        raise WorkloadError(f"{path}: ends neither in .jsonl nor .csv; set workload.format to mooncake or azure")
    skipped: list[SkippedLine] = []
    lines: list[TraceLine] = []
    for line in _mooncake(path, skipped) if form == "mooncake" else _azure(path, skipped):
        total = line.prompt_tokens + line.output_tokens
        if spec.max_total_tokens is not None and total > spec.max_total_tokens:
            reason = f"{total} tokens are above max_total_tokens ({spec.max_total_tokens})"
            skipped.append(SkippedLine(str(path), line.line, reason))
            continue
        lines.append(line)
        if len(lines) == spec.limit:
            break
    if not lines:
        raise none_usable(path, skipped, EXPECTED[form])
    return sorted(lines, key=lambda line: line.time_ms), skipped


def _mooncake(path: Path, skipped: list[SkippedLine]) -> Iterator[TraceLine]:
    for number, value in json_objects(path, skipped):
        time_ms = value.get("timestamp")
        prompt, output = (token_count(value.get(key)) for key in ("input_length", "output_length"))
        hash_ids = value.get("hash_ids", [])
        if isinstance(time_ms, bool) or not isinstance(time_ms, int | float) or not abs(time_ms) <= LATEST_MS:
            skipped.append(SkippedLine(str(path), number, "no `timestamp` field with a number (milliseconds)"))
        elif prompt is None or output is None:
            reason = "`input_length` and `output_length` must be numbers of tokens from 1"
            skipped.append(SkippedLine(str(path), number, reason))
        elif not isinstance(hash_ids, list) or any(type(name) is not int for name in hash_ids):
            skipped.append(SkippedLine(str(path), number, "`hash_ids` is not a list of whole numbers"))
        else:
            yield TraceLine(number, float(time_ms), prompt, output, tuple(hash_ids))


def _azure(path: Path, skipped: list[SkippedLine]) -> Iterator[TraceLine]:
    columns: list[str] | None = None
    for number, text in decoded_lines(path, skipped):
        try:
            fields = next(csv.reader([text]))
        except csv.Error as error:
            skipped.append(SkippedLine(str(path), number, f"not CSV ({error})"))
            continue
        if columns is None:
            columns = [field.strip() for field in fields]
            if missing := [name for name in AZURE_COLUMNS if name not in columns]:
                raise WorkloadError(f"{path}, line {number}: no column {missing[0]}; it must hold {EXPECTED['azure']}")
            continue
        row = dict(zip(columns, fields, strict=False))
        time, context, generated = (row.get(name) for name in AZURE_COLUMNS)
        time_ms = _milliseconds(time or "")
        prompt, output = token_count(context), token_count(generated)
        if time_ms is None:
            skipped.append(SkippedLine(str(path), number, f"TIMESTAMP is not a date and time: {time!r}"))
        elif prompt is None or output is None:
            reason = "ContextTokens and GeneratedTokens must be numbers of tokens from 1"
            skipped.append(SkippedLine(str(path), number, reason))
        else:
            yield TraceLine(number, time_ms, prompt, output)


def _milliseconds(timestamp: str) -> float | None:
    """Milliseconds since 1970; a time without a zone is UTC. The trace's seventh decimal (100 ns) is dropped."""
    try:
        time = datetime.fromisoformat(timestamp.strip())
    except ValueError:
        return None
    elapsed = (time if time.tzinfo else time.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    return (elapsed.days * 86_400_000_000 + elapsed.seconds * 1_000_000 + elapsed.microseconds) / 1000


def arrival_times(lines: list[TraceLine], time_scale: float) -> list[float]:
    """Seconds from the first request, scaled and rounded to whole microseconds."""
    first = lines[0].time_ms
    return [round((line.time_ms - first) * time_scale * 1000) / 1_000_000 for line in lines]


def prompts(lines: list[TraceLine], seed: int, vocabulary: tuple[int, int]) -> list[Ids]:
    """Token ids of every prompt: a block is a function of its hash id, the rest of a prompt is its own."""
    blocks = stream("trace block", seed)
    result = []
    for line in lines:
        needed = math.ceil(line.prompt_tokens / MOONCAKE_BLOCK_TOKENS)
        shared = blocks.blocks(list(line.hash_ids[:needed]), MOONCAKE_BLOCK_TOKENS, vocabulary).reshape(-1)
        own = stream("trace own", seed, line.line).ids(max(line.prompt_tokens - len(shared), 0), vocabulary)
        result.append(np.concatenate([shared[: line.prompt_tokens], own]))
    return result
