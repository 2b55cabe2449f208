"""Time series of a trial, read from its tables and thinned for a chart. Shared by tracking and report.

Series are for looking at: a table that is missing, or that a crash cut off, gives none, and keeps nobody from the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from objectives.engine_use import HOST

DEVICE_COLUMNS = ("memory_used_gib", "utilisation", "power_w", "temperature_c", "sm_clock_mhz")
STEP_COLUMNS = ("kv_usage", "running", "waiting")
_WORST_IS_LEAST = frozenset({"sm_clock_mhz"})

FloatArray = NDArray[np.float64]
Readings = tuple[FloatArray, FloatArray]
"""Seconds since the first reading, and values; both of one length."""


def device_series(folder: Path, most: int) -> dict[str, dict[str, Readings]]:
    """Return the readings of each device of a trial, column by column, at most `most` of each.

    Devices are named `gpu0`, `gpu1`, … in the order in which the table lists them, and `host`: UUIDs are too long for
    the name of a chart. A column that a device does not offer is absent.
    """
    columns = _read(folder / "device.parquet", ("at_s", "device", *DEVICE_COLUMNS))
    if not columns:
        return {}
    devices = columns["device"]
    series: dict[str, dict[str, Readings]] = {}
    for uuid in dict.fromkeys(devices.tolist()):
        rows = devices == uuid
        name = HOST if uuid == HOST else f"gpu{len(series.keys() - {HOST})}"
        series[name] = _thinned(columns["at_s"][rows], {c: columns[c][rows] for c in DEVICE_COLUMNS}, most)
    return series


def step_series(folder: Path, most: int) -> dict[str, Readings]:
    """Return KV use, running and waiting requests of a trial over its steps, at most `most` readings of each."""
    columns = _read(folder / "steps.parquet", ("start_s", *STEP_COLUMNS))
    return _thinned(columns["start_s"], {c: columns[c] for c in STEP_COLUMNS}, most) if columns else {}


def thin(at_s: FloatArray, values: FloatArray, most: int, *, least: bool = False) -> Readings:
    """Cut a series into at most `most` stretches; of each its first second, and its largest (or least) value."""
    stretches = np.array_split(np.arange(at_s.size), min(most, at_s.size)) if at_s.size else []
    worst = np.min if least else np.max
    return (
        np.array([at_s[rows[0]] for rows in stretches], dtype=np.float64),
        np.array([worst(values[rows]) for rows in stretches], dtype=np.float64),
    )


def _thinned(at_s: FloatArray, columns: Mapping[str, FloatArray], most: int) -> dict[str, Readings]:
    since_s = _continuous(at_s)
    series = {}
    for name, values in columns.items():
        known = np.isfinite(values)
        if known.any():
            series[name] = thin(since_s[known], values[known], most, least=name in _WORST_IS_LEAST)
    return series


def _continuous(at_s: FloatArray) -> FloatArray:
    """Seconds since the first reading. The run's clock starts again with each repeat; the next one follows on."""
    passed = np.diff(at_s, prepend=at_s[:1])
    result: FloatArray = np.cumsum(np.maximum(passed, 0.0))
    return result


def _read(path: Path, columns: tuple[str, ...]) -> dict[str, FloatArray]:
    """Columns of a table as arrays, numbers as floats with NaN for null; empty where it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=list(columns))
        arrays = {name: table[name].to_numpy(zero_copy_only=False) for name in columns}
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return {}
    return {n: a if a.dtype == object and n == "device" else a.astype(np.float64) for n, a in arrays.items()}
