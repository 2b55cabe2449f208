"""Files of a trial as they go into MLflow: copies without secrets, and logs trimmed to what shows the cause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from objectives.measurement import Failure
from tuner.artifacts import TABLES
from tuner.secrets import mask

LOG = "engine.log"
HEAD_LINES, TAIL_LINES, AROUND_LINES = 20, 60, 30
LONGEST_LOG_BYTES = 64 * 2**20
"""Of a longer log only this much is read, from its end."""


def stage_files(
    into: Path, folder: Path, documents: Mapping[str, Any], failure: Failure | None, secrets: tuple[str, ...]
) -> None:
    """Put everything that is stored for a trial into the empty folder `into`.

    Parameters
    ----------
    folder:
        Of the trial, with the tables and the log that its engine left; it need not exist.
    """
    for name, document in documents.items():
        (into / name).write_text(json.dumps(document, indent=1))
    for name in TABLES:
        table = folder / f"{name}.parquet"
        if table.exists():
            _copy_table(table, into / table.name, secrets)
    log = folder / LOG
    if failure is not None and log.exists():
        (into / LOG).write_text(mask(trim_log(_tail(log), failure.message), secrets))


def trim_log(log: str, evidence: str) -> str:
    """Keep the head, the tail and the surroundings of the evidence; say how many lines were left out between."""
    lines = log.splitlines()
    keep = set(range(HEAD_LINES)) | set(range(len(lines) - TAIL_LINES, len(lines)))
    for index in _evidence_lines(lines, evidence):
        keep |= set(range(index - AROUND_LINES, index + AROUND_LINES + 1))
    kept = sorted(i for i in keep if 0 <= i < len(lines))
    out: list[str] = []
    for before, index in zip([-1, *kept], kept, strict=False):
        if index > before + 1:
            out.append(f"[… {index - before - 1} lines left out …]")
        out.append(lines[index])
    return "\n".join(out) + "\n" if out else ""


def _evidence_lines(lines: Sequence[str], evidence: str) -> list[int]:
    """Lines that hold the evidence, at most the first three; a classifier may have cut or joined what it quotes."""
    needle = evidence.strip()[:60]
    return [i for i, line in enumerate(lines) if needle and needle in line][:3]


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - LONGEST_LOG_BYTES))
        return file.read().decode("utf-8", errors="replace")


def _copy_table(source: Path, target: Path, secrets: tuple[str, ...]) -> None:
    """Copy a table; the text of errors, the only free text in any, without secrets.

    A table that a crash cut off is left out: it must not keep everything else of the study out of MLflow.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(source)
    except pa.ArrowException:
        return
    errors = table["error"].to_pylist() if "error" in table.column_names else []
    if not any(errors):
        shutil.copyfile(source, target)
        return
    masked = pa.array([None if e is None else mask(e, secrets) for e in errors], pa.string())
    pq.write_table(table.set_column(table.column_names.index("error"), "error", masked), target)
