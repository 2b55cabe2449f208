"""The figures that a study's records alone can fill: front, importance, hypervolume, TTFT by prompt length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tuner.ledger import TrialRecord, TrialState
from tuner.report.chart import Axis, Chart, Panel, Series
from tuner.report.importance import Importance, importances
from tuner.report.words import count, digits, interval, label, param_text, quantity, scaled
from tuner.secrets import mask
from tuner.view import Objective, StudyView, hypervolume_series

LOG_FROM = 20.0
"""An axis is logarithmic when its largest value is this many times its smallest."""

_BY_LENGTH = re.compile(r"@(?P<low>\d+)(?:-(?P<high>\d+))?")


def front_chart(study: StudyView) -> Chart:
    """Draw each further objective against the first; what may not be compared stands apart."""
    first, others = study.objectives[0], study.objectives[1:]
    panels = tuple(_front_panel(study, first, other) for other in others) or (_front_panel(study, None, first),)
    unseen = sum(t.score is None and t.state is not TrialState.RUNNING for t in study.trials)
    caption = "Bars are 95% intervals" + ("; the line joins the front." if len(others) == 1 else ".")
    if unseen:
        caption += f" {count(unseen, 'trial')} without a measurement (refused, failed, ended early) cannot be drawn."
    return Chart("front", titled(study, "Front"), caption, panels, panel_height=520)


def importance_chart(study: StudyView) -> Chart:
    """Draw which parameters matter for each objective and for feasibility."""
    found = importances(study)
    told = [item for item in found if item.explained > 0]
    untold = [item.target for item in found if item.explained <= 0]
    caption = (
        "Increase of a random forest's error on trials that it has not seen when one parameter is shuffled, as a share "
        "of the variance; R² says how much of the variance the forest explains, and below 0.3 the bars mean little."
    )
    if untold:
        caption += f" The trials so far do not show what decides on: {', '.join(untold)}."
    panels = tuple(_importance_panel(item) for item in told)
    height = 60 + 24 * max((len(item.shares) for item in told), default=0)
    return Chart("importance", titled(study, "What matters"), caption, panels, stacked=True, panel_height=height)


def hypervolume_chart(study: StudyView) -> Chart:
    """Draw the hypervolume over trials and over hours."""
    series = hypervolume_series(study)
    volumes = tuple(volume for _, volume in series)
    hours = tuple(((t.finished_at or 0.0) - study.started_at) / 3600 for t, _ in series)
    hover = tuple(f"trial {t.number}<br>hypervolume {digits(v)}" for t, v in series)
    trials = tuple(t.number for t, _ in series)
    y = Axis("hypervolume (1 = the defaults alone)")
    panels = tuple(
        Panel(
            Axis(title), y, (Series("hypervolume", "volume", x, volumes, hover=hover, trials=trials, in_legend=False),)
        )
        for title, x in (("trial (number)", tuple(map(float, trials))), ("time since the first trial (h)", hours))
    )
    caption = "Area between the front and twice the defaults' values, in units of the defaults' own; more is better."
    return Chart("hypervolume", titled(study, "Hypervolume"), caption, panels, panel_height=360)


def prompt_length_chart(study: StudyView) -> Chart | None:
    """Draw TTFT by prompt length for the knee and the reference; `None` where no score tells lengths apart."""
    trials = [(name, role, trial) for name, role, trial in compared(study) if trial.score]
    metric = next((o.name for o in study.objectives if o.name.startswith("ttft_")), "ttft_p95_s")
    base = metric.removesuffix("_corrected")
    series = [s for name, role, trial in trials if (s := _by_length(study, trial, base, name, f"{role} points")).x]
    if not series:
        return None
    factor, unit = scaled("s", [v for s in series for v in s.y if v is not None])
    panel = Panel(
        Axis("prompt length (tokens)"),
        Axis(f"{label(base)} ({unit})"),
        tuple(_times(s, factor) for s in series),
    )
    caption = "Prompts of similar length taken together; bars are 95% intervals over requests."
    return Chart("ttft_by_prompt_length", titled(study, "TTFT by prompt length"), caption, (panel,))


def compared(study: StudyView) -> list[tuple[str, str, TrialRecord]]:
    """Name, role and record of the two trials that a reader compares: the knee and the reference."""
    pairs: list[tuple[str, str, TrialRecord]] = []
    if study.knee is not None:
        pairs.append((f"knee (trial {study.knee})", "knee", study.trial(study.knee)))
    if study.reference is not None and study.reference.number != study.knee:
        pairs.append((f"defaults (trial {study.reference.number})", "reference", study.reference))
    return pairs


def trial_text(study: StudyView, trial: TrialRecord) -> str:
    """Return what the pointer shows at a trial: number, objectives with intervals, parameters."""
    values, intervals = study.values(trial), study.intervals(trial)
    lines = [f"<b>trial {trial.number}</b> · {trial.state.value}{' · predicted' if trial.predicted else ''}"]
    for objective in study.objectives:
        if objective.name in values:
            line = f"{label(objective.name)}: {quantity(values[objective.name], objective.unit)}"
            if objective.name in intervals:
                line += f" ({interval(*intervals[objective.name], objective.unit)})"
            lines.append(line)
    lines += [param_text(name, value) for name, value in trial.params.items()]
    if trial.score:
        lines += [f"{name}: {value:+.2f}" for name, value in trial.score.violations.items() if value > 0]
        lines += [f"void: {reason.code}" for reason in trial.score.void]
    return mask("<br>".join(lines))


def titled(study: StudyView, text: str) -> str:
    """Return a title that says when everything in the figure is predicted."""
    return f"{text}, predicted" if study.predicted else text


def _front_panel(study: StudyView, x: Objective | None, y: Objective) -> Panel:
    groups: dict[str, list[TrialRecord]] = {"complete": [], "infeasible": [], "void": [], "front": []}
    for trial in study.trials:
        values = study.values(trial)
        if any(o is not None and o.name not in values for o in (x, y)) or trial.predicted != study.predicted:
            continue
        if (role := _point_role(study, trial)) is not None:
            groups[role].append(trial)
    shown = [t for group in groups.values() for t in group]
    factors = {o.name: scaled(o.unit, [study.values(t)[o.name] for t in shown]) for o in (x, y) if o is not None}
    names = {"complete": "complete", "infeasible": "beyond a constraint", "void": "void", "front": "front"}
    series = [
        _points(study, x, y, group, names[role], role, factors, bars=role == "front")
        for role, group in groups.items()
        if group
    ]
    if groups["front"] and len(study.objectives) == 2:
        ordered = sorted(groups["front"], key=lambda t: study.front.index(t.number))
        line = _points(study, x, y, ordered, "front", "front line", factors, bars=False)
        series.insert(0, Series(line.name, line.role, line.x, line.y, in_legend=False))
    for name, role, trial in compared(study):
        if trial in shown:
            series.append(_points(study, x, y, [trial], name, role, factors, bars=True))
    axis = Axis("trial (number)") if x is None else _axis(study, x, shown, factors)
    return Panel(axis, _axis(study, y, shown, factors), tuple(series))


def _points(
    study: StudyView,
    x: Objective | None,
    y: Objective,
    trials: Sequence[TrialRecord],
    name: str,
    role: str,
    factors: Mapping[str, tuple[float, str]],
    *,
    bars: bool,
) -> Series:
    def column(objective: Objective | None) -> tuple[float, ...]:
        if objective is None:
            return tuple(float(t.number) for t in trials)
        return tuple(study.values(t)[objective.name] * factors[objective.name][0] for t in trials)

    def ends(objective: Objective | None) -> tuple[tuple[float, float], ...]:
        if objective is None or not bars:
            return ()
        factor = factors[objective.name][0]
        pairs = [study.intervals(t).get(objective.name, (study.values(t)[objective.name],) * 2) for t in trials]
        return tuple((pair[0] * factor, pair[1] * factor) for pair in pairs)

    return Series(
        name,
        role,
        column(x),
        column(y),
        ends(x),
        ends(y),
        hover=tuple(trial_text(study, t) for t in trials),
        trials=tuple(t.number for t in trials),
    )


def _point_role(study: StudyView, trial: TrialRecord) -> str | None:
    if trial.score is None:
        return None
    if trial.number in study.front:
        return "front"
    return {TrialState.COMPLETE: "complete", TrialState.INFEASIBLE: "infeasible", TrialState.VOID: "void"}.get(
        trial.state
    )


def _axis(
    study: StudyView, objective: Objective, trials: Iterable[TrialRecord], factors: Mapping[str, tuple[float, str]]
) -> Axis:
    values = [study.values(t)[objective.name] for t in trials]
    unit = factors[objective.name][1]
    return Axis(f"{label(objective.name)} ({unit})" if unit else label(objective.name), log=_is_wide(values))


def _is_wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) / min(values) > LOG_FROM


def _importance_panel(item: Importance) -> Panel:
    ordered = sorted(item.shares.items(), key=lambda pair: pair[1])
    ticks = {float(i): name for i, (name, _) in enumerate(ordered)}
    bars = Series(
        item.target,
        "bar",
        tuple(share for _, share in ordered),
        tuple(ticks),
        hover=tuple(f"{name}: {share:.2f}" for name, share in ordered),
        bars=True,
        in_legend=False,
    )
    title = f"{item.target} (R² {item.explained:.2f}, {count(item.trials, 'trial')})"
    return Panel(Axis("error increase (share of variance)"), Axis("", ticks=ticks), (bars,), title)


def _by_length(study: StudyView, trial: TrialRecord, base: str, name: str, role: str) -> Series:
    values, intervals = study.values(trial), study.intervals(trial)
    found: list[tuple[float, str]] = []
    for metric in values:
        match = _BY_LENGTH.fullmatch(metric.removeprefix(base)) if metric.startswith(base) else None
        if match:
            low = float(match["low"])
            found.append(((low + float(match["high"] or low)) / 2, metric))
    found.sort()
    ends = tuple(intervals.get(m, (values[m], values[m])) for _, m in found)
    hover = tuple(f"{name}<br>{label(m)}: {quantity(values[m], 's')}" for _, m in found)
    return Series(name, role, tuple(x for x, _ in found), tuple(values[m] for _, m in found), (), ends, hover)


def _times(series: Series, factor: float) -> Series:
    """Return the series with its y values in another unit."""
    ends = tuple((low * factor, high * factor) for low, high in series.y_interval)
    return replace(series, y=tuple(None if v is None else v * factor for v in series.y), y_interval=ends)
