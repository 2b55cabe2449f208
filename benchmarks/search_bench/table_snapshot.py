"""What `benchmarks/cpu_table.py` measured, as the table that the search is held against: made by `search.py --table`.

The machine is not as fast in one minute as in the next, and queues make more of it than it is slower. So a measurement
counts for what it would have been on average over the speeds that the machine had: its raw value times the mean of what
the twin says at those over what it says at the speed of that run. How fast the machine was is read off the run's own
steps: what they took over what the twin says of such steps, its coefficients fitted to all runs together. What the twin
has wrong of all steps of a kind must not pass for speed: the grid was measured in random order, so that the machine was
as fast on average for one `max_num_batched_tokens` as for another, and the speeds are set to show that.

Some schedules tip over at a certain speed: one request more waits, and the p95 of TPOT is twice what it was. Where the
twin says that this happens is not exactly where it does. Whether a run was before or beyond is seen in its values, so
that the twin's speeds are shifted by what explains them best.

That this is right is seen where a configuration was measured more than once: `make_snapshot` says by how much such
measurements differ as they are, as they would in one sitting, and as they are counted. What was measured more than once
is worth the mean.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from search_bench.table_twin import Cell, TableTwin, figures
from tuner.artifacts import load, write_json
from tuner.engine.twin.calibrate import Followed, fit_by_probe, own_speed
from tuner.engine.twin.steptime import Coefficients

Array = NDArray[np.float64]
Row = dict[str, Any]

MEASURED = Path(__file__).parents[1] / "data" / "cpu_table" / "quickstart"
SNAPSHOT = Path(__file__).parents[1] / "data" / "search" / "cpu-table.json"
LOG_SPEEDS = np.linspace(-0.16, 0.16, 33)
"""Logarithms of the speeds that the twin is asked at: what runs had, and shifts."""
SHIFTS = np.linspace(-0.06, 0.06, 25)
SHIFT_DEVIATION = 0.02
"""How far the twin's speed may be from that at which the engine does the same; as the probes' was from the steps'."""
PAUSE_S = 20 * 60.0
"""Between two measurements of one sitting lies less: a start, or a look at what there is."""
NOISE = 0.03
"""What two runs differ by beyond speed; of Student's distribution with 4 degrees of freedom, since some differ more."""


class Measured(NamedTuple):
    """One measurement of the campaign, in the folder `path`, at a Unix time."""

    path: Path
    args: dict[str, Any]
    again: bool
    at: float


def measurements(space: dict[str, list[int]]) -> Iterator[Measured]:
    """Return everything that was measured of a grid, by name."""
    for path in sorted(MEASURED.iterdir()):
        if not (path / "case.json").exists():
            continue
        case = json.loads((path / "case.json").read_text())
        args, at = case["args"], datetime.fromisoformat(case["measured_at"]).timestamp()
        cell = {"long_prefill_token_threshold": 0, **args}
        if cell.keys() == space.keys() and all(cell[n] in space[n] for n in space):
            yield Measured(path, {n: cell[n] for n in space}, "-again" in path.name, at)


def make_snapshot(measured: Sequence[Measured], cells: Sequence[Cell], twin: TableTwin) -> str:
    """Take what was measured into the snapshot; says in lines what is in it.

    Parameters
    ----------
    cells:
        Of each measurement, the configuration of the grid that schedules the same.
    """
    followed = [twin.follow(cell, one.path) for one, cell in zip(measured, cells, strict=True)]
    firsts = [f for f, one in zip(followed, measured, strict=True) if not one.again]
    fitted = fit_by_probe(firsts, twin.catalogue)
    speeds = _speeds(measured, followed, fitted)
    curves = {cell: _curve(twin, cell, fitted) for cell in dict.fromkeys(cells)}
    rows = []
    for one, cell, speed in zip(measured, cells, speeds, strict=True):
        measurement = load(one.path)
        raw = figures(measurement)
        counted = np.exp(worth(np.log(raw), math.log(speed), curves[cell], float(np.log(speeds).std())))
        values = {
            "raw_ttft_s": raw[0],
            "raw_tpot_s": raw[1],
            "duration_s": sum(measurement.duration_s),
            "ttft_s": counted[0],
            "tpot_s": counted[1],
        }
        rounded = {name: float(f"{value:.6g}") for name, value in values.items()}
        rows.append({"args": one.args, "again": one.again, "speed": round(speed, 4), **rounded})
    _add_what_one_sitting_would_see(rows, _sittings([one.at for one in measured]))
    groups = _by_configuration(rows)
    write_json(SNAPSHOT, {"configurations": [_averaged(group) for group in groups], "measurements": rows})
    return "\n".join(
        (
            f"{len(groups)} configurations, {sum(len(g) > 1 for g in groups)} of them measured again",
            f"speed of the machine: standard deviation {np.log(speeds).std():.1%}",
            f"repeated measurements as they are: {_spread(deviations(rows, 'raw_'))}",
            f"in one sitting: {_spread(deviations(rows, 'seen_'))}",
            f"as they are counted: {_spread(deviations(rows))}",
        )
    )


def deviations(rows: Sequence[Row], prefix: str = "") -> Array:
    """Return by how much repeated measurements differ from their mean (n, 2), as logarithms.

    A mean of few lies closer to each of them than the truth does: they are stretched to the size that a deviation from
    the truth has.

    Parameters
    ----------
    prefix:
        `raw_` for the values as they were measured, `seen_` for what they would have been in one sitting.
    """
    repeated = [_logarithms(group, prefix) for group in _by_configuration(rows) if len(group) > 1]
    return np.vstack([(g - g.mean(axis=0)) * (len(g) / (len(g) - 1)) ** 0.5 for g in repeated])


def worth(raw: Array, log_speed: float, curve: Array, spread: float) -> Array:
    """Return the logarithms (2,) of what a measurement would have been on average over the machine's speeds.

    Parameters
    ----------
    raw:
        Logarithms (2,) of what was measured.
    curve:
        The twin's at each of `LOG_SPEEDS` (n, 2).
    spread:
        Standard deviation of the logarithms of the machine's speeds.
    """
    then = np.column_stack([np.interp(log_speed + SHIFTS, LOG_SPEEDS, column) for column in curve.T])
    shares = np.exp(-0.5 * ((LOG_SPEEDS - SHIFTS[:, None]) / spread) ** 2)
    usual = shares @ curve / shares.sum(axis=1, keepdims=True)
    likely = -0.5 * (SHIFTS / SHIFT_DEVIATION) ** 2 - 2.5 * np.log1p(((raw - then) / NOISE) ** 2 / 4).sum(axis=1)
    weights = np.exp(likely - likely.max())
    return raw + weights @ (usual - then) / weights.sum()


def _speeds(measured: Sequence[Measured], followed: Sequence[Followed], fitted: Coefficients) -> list[float]:
    """Return how many times as long the machine took for everything in each run as on average."""
    own = np.log([own_speed(f, fitted) for f in followed])
    of_size = defaultdict(list)
    for one, speed in zip(measured, own, strict=True):
        if not one.again:
            of_size[one.args["max_num_batched_tokens"]].append(speed)
    usual = np.array([np.mean(of_size[one.args["max_num_batched_tokens"]]) for one in measured])
    return [float(s) for s in np.exp(own - usual)]


def _curve(twin: TableTwin, cell: Cell, fitted: Coefficients) -> Array:
    """Return the logarithms of what the twin says of a configuration at each of `LOG_SPEEDS` (n, 2)."""
    return np.log([twin.at(cell, fitted.scaled(float(speed))) for speed in np.exp(LOG_SPEEDS)])


def _sittings(at: Sequence[float]) -> list[int]:
    """Number the sittings of measurements, from their times: between two of them lies a pause."""
    order = np.argsort(at)
    number = np.zeros(len(at), dtype=int)
    number[order[1:]] = np.cumsum(np.diff(np.array(at)[order]) > PAUSE_S)
    return [int(n) for n in number]


def _add_what_one_sitting_would_see(rows: Sequence[Row], sittings: Sequence[int]) -> None:
    """Add to each measurement what it would have been had all sittings been on the same machine and day."""
    for name in ("ttft_s", "tpot_s"):
        slower = np.log([row[f"raw_{name}"] / row[name] for row in rows])
        for row, sitting in zip(rows, sittings, strict=True):
            level = float(np.exp(slower[np.array(sittings) == sitting].mean()))
            row[f"seen_{name}"] = float(f"{row[f'raw_{name}'] / level:.6g}")


def _spread(found: Array) -> str:
    half, most = (np.percentile(np.abs(found), share, axis=0) for share in (50, 95))
    return (
        f"standard deviation of TTFT and of TPOT {_each(found.std(axis=0))}, half within {_each(half)}, "
        f"95% within {_each(most)}"
    )


def _each(shares: Any) -> str:
    return " and ".join(f"{share:.1%}" for share in shares)


def _by_configuration(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the measurements of each configuration of the grid, the first of them first."""
    firsts = [row for row in rows if not row["again"]]
    return [[first, *(r for r in rows if r["again"] and r["args"] == first["args"])] for first in firsts]


def _logarithms(group: Sequence[Row], prefix: str = "") -> Array:
    return np.log([[row[f"{prefix}ttft_s"], row[f"{prefix}tpot_s"]] for row in group])


def _averaged(group: Sequence[Row]) -> Row:
    """Return a configuration with the geometric mean of its measurements as its values."""
    first = group[0]
    ttft_s, tpot_s = (float(f"{v:.6g}") for v in np.exp(_logarithms(group).mean(axis=0)))
    kept = {name: first[name] for name in ("args", "speed", "duration_s")}
    return {**kept, "ttft_s": ttft_s, "tpot_s": tpot_s, "measurements": len(group)}
