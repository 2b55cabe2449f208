"""A measurement on disk: one Parquet file a table, and back. Shared by the study, the tracking and the twin."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import TypeAdapter

from objectives.measurement import (
    DeviceSample,
    EngineFacts,
    Measurement,
    RequestRecord,
    SpeedProbe,
    StepRecord,
)
from tuner.errors import StoreError

if TYPE_CHECKING:
    import pyarrow as pa

Row = TypeVar("Row", RequestRecord, StepRecord, DeviceSample)

TABLES: Mapping[str, type] = {"requests": RequestRecord, "steps": StepRecord, "device": DeviceSample}


@dataclasses.dataclass(frozen=True, slots=True)
class _Facts:
    """What a measurement holds beside its tables."""

    engine: EngineFacts
    workload_fingerprint: str
    duration_s: tuple[float, ...]
    speed_before: SpeedProbe | None
    speed_after: SpeedProbe | None
    predicted: bool
    notes: Mapping[str, float]


_FACTS = TypeAdapter(_Facts)


def save(measurement: Measurement, folder: Path) -> None:
    """Write `requests.parquet`, `steps.parquet`, `device.parquet` and `facts.json` into `folder`.

    Raises
    ------
    StoreError
        When the file system refuses.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    facts = _Facts(**{f.name: getattr(measurement, f.name) for f in dataclasses.fields(_Facts)})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in TABLES:
            rows = [dataclasses.asdict(row) for row in getattr(measurement, name)]
            pq.write_table(pa.Table.from_pylist(rows, schema=_schema(name)), folder / f"{name}.parquet")
        (folder / "facts.json").write_bytes(_FACTS.dump_json(facts, indent=1))
    except OSError as error:
        raise StoreError(
            f"{folder}: the trial's tables cannot be written ({error.strerror}); free or mend it"
        ) from error


def load(folder: Path) -> Measurement:
    """Read what `save` wrote.

    Raises
    ------
    StoreError
        When a file is missing or is not what `save` writes.
    """
    import pyarrow as pa

    try:
        facts = _FACTS.validate_json((folder / "facts.json").read_bytes())
        return Measurement(
            engine=facts.engine,
            workload_fingerprint=facts.workload_fingerprint,
            requests=_read(folder, "requests", RequestRecord),
            steps=_read(folder, "steps", StepRecord),
            device=_read(folder, "device", DeviceSample),
            duration_s=facts.duration_s,
            speed_before=facts.speed_before,
            speed_after=facts.speed_after,
            predicted=facts.predicted,
            notes=facts.notes,
        )
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        raise StoreError(f"{folder}: the trial's tables cannot be read ({error})") from error


def is_whole(folder: Path) -> bool:
    """Whether everything that `save` wrote is there and can be read, as far as its heads tell."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        _FACTS.validate_json((folder / "facts.json").read_bytes())
        for name in TABLES:
            pq.read_metadata(folder / f"{name}.parquet")
    except (OSError, ValueError, pa.ArrowException):
        return False
    return True


def _read(folder: Path, name: str, kind: type[Row]) -> tuple[Row, ...]:
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(folder / f"{name}.parquet").to_pylist()
    make = cast("Callable[..., Row]", kind)
    return tuple(make(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows)


def _schema(name: str) -> pa.Schema:
    """Arrow schema of a table, so that a column of nothing but `None` keeps its type."""
    import pyarrow as pa

    types = {
        "str": pa.string(),
        "int": pa.int64(),
        "float": pa.float64(),
        "tuple[float, ...]": pa.list_(pa.float64()),
    }
    return pa.schema([(f.name, types[str(f.type).removesuffix(" | None")]) for f in dataclasses.fields(TABLES[name])])


def write_json(path: Path, document: object) -> None:
    """Write a JSON document so that a reader sees the old one or the new one, never a half; only the owner may read it.

    It may hold values of environment variables.
    """
    temporary = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(document, indent=1))
        temporary.replace(path)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror}); free or mend it") from error
