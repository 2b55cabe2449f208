"""Device and scheduler series of a trial as stepped metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tuner.series import Readings, device_series, step_series
from tuner.tracking.content import Point, finite

MOST_POINTS = 60
"""Of one series: a database takes about 0.15 ms a point, and four GPUs make 23. The tables have every reading."""


def trial_series(folder: Path, started_at: float) -> tuple[Point, ...]:
    """Return the series of the trial whose tables lie in `folder`; empty where there are none.

    The UI groups charts by what stands before the slash: `gpu0/power_w`, `host/memory_used_gib`, `engine/kv_usage`.
    The step is in whole seconds from the first reading.
    """
    groups = {**device_series(folder, MOST_POINTS), "engine": step_series(folder, MOST_POINTS)}
    return finite(p for group, columns in groups.items() for p in _points(group, columns, started_at))


def _points(group: str, columns: dict[str, Readings], started_at: float) -> Iterator[Point]:
    for column, (since_s, values) in columns.items():
        for at_s, value in zip(since_s.tolist(), values.tolist(), strict=True):
            yield Point(f"{group}/{column}", value, round((started_at + at_s) * 1000), round(at_s))
