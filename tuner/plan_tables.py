"""A plan's tables on screen. Every title says that what it shows is predicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.table import Table

from tuner.display import duration
from tuner.forecast import SpaceShare
from tuner.report.importance import Importance
from tuner.study_hours import Hours
from tuner.view import StudyView

ROW_APART = 0.05
"""A row of the front differs from the one above by this share in some objective; the JSON document has every row."""


def thinned(study: StudyView) -> StudyView:
    """Leave out members of the front that hardly differ from the one before; its ends and its knee stay."""
    kept: list[int] = []
    for number in study.front:
        values = study.results[number].values
        last = study.results[kept[-1]].values if kept else None
        apart = last is None or any(
            abs(values[o.name] - last[o.name]) > ROW_APART * abs(last[o.name]) for o in study.objectives
        )
        if apart or number in (study.knee, study.front[-1]):
            kept.append(number)
    return replace(study, front=tuple(kept))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def space_table(space: SpaceShare) -> Table:
    """Show how much of the space fits."""
    table = _table(f"predicted memory of {space.samples} points of the space", "outcome", "share")
    table.add_row("fits, also where the memory model errs", f"{space.fits:.0%}")
    table.add_row("on the edge: an engine has to show it", f"{space.uncertain / space.samples:.0%}")
    for kind, number in space.reasons.items():
        table.add_row(f"refused without an engine: {kind}", f"{number / space.samples:.0%}")
    return table


def importance_table(found: Sequence[Importance], names: Iterable[str], not_modelled: Sequence[str]) -> Table:
    """Show what matters for each target; parameters that the twin does not know are named as such."""
    columns = [f"predicted {i.target} (R² {i.explained:.2f})" for i in found]
    title = "what matters most, predicted: variance added by shuffling it"
    table = _table(title, "parameter", *columns)
    for name in sorted(names, key=lambda n: -sum(i.shares.get(n, 0.0) for i in found)):
        if name in not_modelled:
            table.add_row(name, *("not modelled" for _ in found))
        else:
            table.add_row(name, *(f"{i.shares[name]:.2f}" if name in i.shares else "–" for i in found))
    return table


def hours_table(found: Hours) -> Table:
    """Show what one trial and the whole budget take."""
    trial = found.trial
    table = _table("predicted time", "part", "predicted", "between")
    for name, part in (("start of an engine", trial.start_s), ("workload", trial.workload_s), ("stop", trial.stop_s)):
        if part.value:
            table.add_row(name, duration(part.value), f"{duration(part.low)} and {duration(part.high)}")
    if trial.warmup_s:
        table.add_row("warm-up and probes", duration(trial.warmup_s + trial.probe_s), "")
    total = trial.total_s
    table.add_row("one trial", duration(total.value), f"{duration(total.low)} and {duration(total.high)}")
    low, high = found.hours_interval
    what = f"{found.candidates} trials and {found.repeats} repeats of the reference, ended by the budget's "
    table.add_row(what + found.ended_by, f"{found.hours:.1f} h", f"{low:.1f} and {high:.1f} h")
    table.caption = trial.basis
    return table
