"""The figures that need the trials' tables: distribution of TTFT and TPOT, and the machine over the night."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from objectives.engine_use import HOST
from objectives.intervals import FloatArray
from objectives.latency import Latencies
from objectives.measurement import Measurement
from objectives.speed import speed_index
from tuner import artifacts
from tuner.errors import StoreError
from tuner.ledger import TrialRecord
from tuner.probe import probes_alike
from tuner.report.chart import Axis, Chart, Panel, Series
from tuner.report.charts import compared
from tuner.report.words import scaled
from tuner.series import device_series
from tuner.view import StudyView

MOST_READINGS = 12
"""Of one device in one trial; the figure spans a night of hundreds."""

HOURS = Axis("time since the first trial (h)")
GPU_ROLES = 4
"""Devices that have a style of their own; further ones share them in turn."""

_DEVICE_PANELS = {
    "memory_used_gib": "memory in use (GiB)",
    "sm_clock_mhz": "SM clock (MHz)",
    "temperature_c": "temperature (°C)",
}


def distribution_chart(study: StudyView, folder: Path) -> Chart | None:
    """Draw the share of requests up to each TTFT and TPOT, knee against reference; `None` without their tables."""
    latencies = [
        (name, f"{role} line", Latencies.of(measurement.requests))
        for name, role, trial in compared(study)
        if (measurement := _measurement(folder, trial)) is not None
    ]
    if not latencies:
        return None
    panels = []
    for column, title in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
        known = [(name, role, np.sort(_known(getattr(found, column)))) for name, role, found in latencies]
        factor, unit = scaled("s", [float(v) for _, _, values in known for v in values])
        series = tuple(_cumulative(name, role, values * factor, unit) for name, role, values in known if values.size)
        panels.append(Panel(Axis(f"{title} ({unit})"), Axis("share of requests up to it"), series))
    caption = "Every request of the two trials; further left is better."
    title = "Latency of single requests" + (", predicted" if study.predicted else "")
    return Chart("latency_distribution", title, caption, tuple(panels), panel_height=380)


def night_chart(study: StudyView, folder: Path) -> Chart | None:
    """Draw memory, clocks and temperature of each device, and the machine's speed, over the hours of the study."""
    panels = _device_panels(study, folder)
    speed = _speed_series(study)
    if speed is not None:
        panels.append(Panel(HOURS, Axis("speed index (1 = first trial)"), (speed,)))
    if not panels:
        return None
    caption = (
        "The worst reading of each stretch of a trial. The speed index is how many times as long a fixed probe took as "
        "at the first trial: above 1 the machine was slower."
    )
    return Chart("night", "The machine over the study", caption, tuple(panels), stacked=True, panel_height=230)


def _measurement(folder: Path, trial: TrialRecord) -> Measurement | None:
    """Return the tables of a trial, or `None` where they are gone: figures are drawn from what is left."""
    try:
        return artifacts.load(folder / "trials" / str(trial.number))
    except StoreError:
        return None


def _known(column: FloatArray) -> FloatArray:
    known: FloatArray = column[~np.isnan(column)]
    return known


def _cumulative(name: str, role: str, values: FloatArray, unit: str) -> Series:
    shares = (np.arange(values.size) + 1) / values.size
    hover = tuple(
        f"{name}<br>{share:.0%} of requests within {v:.3g} {unit}" for v, share in zip(values, shares, strict=True)
    )
    return Series(name, role, tuple(values.tolist()), tuple(shares.tolist()), hover=hover)


def _device_panels(study: StudyView, folder: Path) -> list[Panel]:
    curves: dict[tuple[str, str], list[tuple[float, float | None]]] = {}
    for trial in study.trials:
        begun_h = (trial.started_at - study.started_at) / 3600
        for device, columns in device_series(folder / "trials" / str(trial.number), MOST_READINGS).items():
            for column in columns.keys() & _DEVICE_PANELS.keys():
                at_s, values = columns[column]
                points = zip((begun_h + at_s / 3600).tolist(), values.tolist(), strict=True)
                # The gap keeps the line from running through the time between two trials.
                curves.setdefault((column, device), []).extend([*points, (begun_h, None)])
    panels = []
    for column, title in _DEVICE_PANELS.items():
        series = [_curve(device, rows) for (name, device), rows in sorted(curves.items()) if name == column]
        if series:
            panels.append(Panel(HOURS, Axis(title), tuple(series)))
    return panels


def _curve(device: str, rows: Sequence[tuple[float, float | None]]) -> Series:
    role = "host line" if device == HOST else f"gpu{int(device.removeprefix('gpu')) % GPU_ROLES} line"
    return Series(device, role, tuple(x for x, _ in rows), tuple(y for _, y in rows))


def _speed_series(study: StudyView) -> Series | None:
    """Speed probes of the study against the first one, of the trials whose probe is the same as its."""
    first = next((t for t in study.trials if t.speed_before is not None), None)
    probes = [
        (at, probe, trial.number)
        for trial in study.trials
        if first is not None and probes_alike(first.config, trial.config)
        for at, probe in ((trial.started_at, trial.speed_before), (trial.finished_at, trial.speed_after))
        if probe is not None and at is not None
    ]
    if not probes:
        return None
    hours = tuple((at - study.started_at) / 3600 for at, _, _ in probes)
    indices = tuple(speed_index(probe, probes[0][1]) for _, probe, _ in probes)
    hover = tuple(
        f"trial {number}<br>speed index {index:.3f}" for index, (_, _, number) in zip(indices, probes, strict=True)
    )
    return Series("speed index", "speed", hours, indices, hover=hover, in_legend=False)
