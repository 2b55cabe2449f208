"""The report: one HTML file that needs no network, read from top to bottom, on a phone and on paper too."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from tuner.errors import StoreError
from tuner.ledger import TrialState
from tuner.report import interactive
from tuner.report.figures import Drawn, write_figures
from tuner.report.table import Cell, Row, front_rows
from tuner.report.verdict import Verdict, change_text, failures_by_kind, verdict
from tuner.report.words import count, interval, label, param_text, percent, quantity
from tuner.secrets import mask
from tuner.view import StudyView

_SECTIONS = {
    "The front": ("front",),
    "What matters": ("importance", "parameters"),
    "Progress": ("hypervolume",),
    "Latency, knee against the defaults": ("ttft_by_prompt_length", "latency_distribution"),
}


def write_report(study: StudyView, folder: Path, into: Path) -> Path:
    """Write `report.html` and `figures/` and return the report's path.

    Raises
    ------
    StoreError
        When the file system refuses.
    """
    figures = write_figures(study, folder, into / "figures")
    target = into / "report.html"
    try:
        target.write_text(report_page(study, figures), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{target}: the report cannot be written ({error.strerror}); free or mend it") from error
    return target


def report_page(study: StudyView, drawn: Sequence[Drawn]) -> str:
    """Return the whole page."""
    said = verdict(study)
    body = [_head(study, said), _front_table(study)]
    figures = {figure.chart.name: _figure(figure) for figure in drawn}
    for title, names in _SECTIONS.items():
        if shown := [figures[name] for name in names if name in figures]:
            body.append(_section(title, *shown))
    body.append(_failures(study))
    body.append(_section("Validity and noise", _list(said.trust), figures.get("night", "")))
    body.append(_method(study))
    title = escape(f"{study.study}: tuning report")
    style = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{style}</style>\n'
        f"<script>{interactive.script()}</script></head>\n<body><main>\n{''.join(body)}\n</main></body></html>\n"
    )


def _head(study: StudyView, said: Verdict) -> str:
    header = study.header
    facts = [f"Study <b>{_text(study.study)}</b>"]
    if study.trials:
        facts.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(study.started_at)))
    engine = next((t.engine for t in study.trials if t.engine), None)
    if engine:
        facts.append(f"{_text(engine.model)} on {engine.device_count} × {_text(engine.device_name)}")
    if header:
        facts.append(f"vLLM {_text(header.vllm_version)}, workload {_text(header.workload_name)}")
    parts = [f'<p class="facts">{" · ".join(facts)}</p>']
    if study.predicted:
        parts.append('<p class="warning">Predicted by the twin, not measured.</p>')
    parts.append(f"<h1>{_text(said.headline)}</h1>")
    if said.verification:
        parts.append(f'<p class="verified">{_text(said.verification)}</p>')
    parts += [_trade_off(t.title, t.row, t.changed, t.pick) for t in said.trade_offs]
    if said.deploy:
        commands = "\n".join(_text(command) for command in said.deploy)
        parts.append(f"<p>Prove it again, then deploy it:</p><pre>{commands}</pre>")
    return f"<header>{''.join(parts)}</header>"


def _trade_off(title: str, row: Row, changed: str, pick: str) -> str:
    lines = "".join(f"<li>{_text(label(c.objective.name))}: {_text(change_text(c))}</li>" for c in row.cells)
    return (
        f'<div class="card"><h3>{_text(title)}: trial {row.number}</h3><ul>{lines}</ul>'
        f"<p><code>{_text(changed)}</code></p><p>--pick {_text(pick)}</p></div>"
    )


def _front_table(study: StudyView) -> str:
    rows = front_rows(study)
    if not rows:
        return ""
    heads = "".join(f"<th>{_text(label(o.name))}</th>" for o in study.objectives)
    lines = "".join(
        f'<tr class="{"knee" if row.knee else ""}"><td>{row.number}{_marks(row)}</td>'
        f"{''.join(_cell(cell) for cell in row.cells)}<td>{_changed(row)}</td></tr>"
        for row in rows
    )
    table = f"<table><thead><tr><th>trial</th>{heads}<th>what differs from the defaults</th></tr></thead><tbody>{lines}"
    return _section("Front against the defaults", f'<div class="wide">{table}</tbody></table></div>')


def _marks(row: Row) -> str:
    marks = [
        name for name, holds in (("defaults", row.reference), ("knee", row.knee), ("verified", row.verified)) if holds
    ]
    marks += [f"{row.measurements} measurements"] if row.measurements > 1 else []
    return f"<br><small>{', '.join(marks)}</small>" if marks else ""


def _cell(cell: Cell) -> str:
    ends = f"<br><small>{_text(interval(*cell.interval, cell.objective.unit))}</small>" if cell.interval else ""
    kind = {True: "better", False: "worse", None: "same"}[cell.better]
    change = f' <span class="{kind}">{percent(cell.change)}</span>' if cell.change is not None else ""
    return f"<td class='figure'>{_text(quantity(cell.value, cell.objective.unit))}{change}{ends}</td>"


def _changed(row: Row) -> str:
    if not row.changed:
        return "nothing"
    return "<br>".join(f"<code>{_text(param_text(name, value))}</code>" for name, value in row.changed.items())


def _failures(study: StudyView) -> str:
    failed = failures_by_kind(study)
    lines = "".join(
        f"<tr><td>{kind}</td><td>{stage}</td><td>{number}</td>"
        f"<td>trial {trial.number}: {_text(trial.failure.message)}</td></tr>"
        for kind, stage, number, trial in failed
        if trial.failure
    )
    table = (
        f'<div class="wide"><table><thead><tr><th>kind</th><th>stage</th><th>trials</th><th>latest example</th></tr>'
        f"</thead><tbody>{lines}</tbody></table></div>"
        if lines
        else "<p>No trial failed.</p>"
    )
    beyond = [t for t in study.trials if t.state is TrialState.INFEASIBLE and t.score]
    note = f"<p>{count(len(beyond), 'trial')} ran, and broke a constraint.</p>" if beyond else ""
    return _section("Failures by kind", table, note)


def _method(study: StudyView) -> str:
    better = {"minimize": "less is better", "maximize": "more is better"}
    objectives = ", ".join(f"{label(o.name)} ({better[o.direction]})" for o in study.objectives)
    sentences = [
        f"Objectives: {objectives}.",
        "TTFT is the time from a request's scheduled arrival to its first token, so waiting in the client counts; TPOT "
        "is the time per output token after the first.",
        "Each trial ran on a warmed engine of its own with prompts that no earlier run had seen. Intervals are 95% "
        "bootstrap intervals over requests.",
        "A change counts as better or worse only where the intervals do not overlap and the difference is above the "
        "noise floor, as far as that is known.",
        "The front holds complete trials that no other dominates, each configuration once, with the median where it "
        "was measured more than once. The knee is the member where giving up a little of one objective stops buying "
        "much of another, on a logarithmic scale.",
    ]
    if study.header:
        sentences.append(
            f"Workload fingerprint {study.header.workload_fingerprint}, study file {study.header.spec_hash}, "
            f"tuner {study.header.tuner_version}."
        )
    return _section("Method", _list(sentences))


def _figure(drawn: Drawn) -> str:
    chart = drawn.chart
    kind = "screen pair" if len(chart.panels) > 1 and not chart.stacked else "screen"
    still_copy = base64.b64encode(drawn.png).decode("ascii")
    return (
        f'<figure><div class="{kind}">{interactive.fragment(chart)}</div>'
        f'<img class="paper" alt="{_text(chart.title)}" src="data:image/png;base64,{still_copy}">'
        f"<figcaption><b>{_text(chart.title)}.</b> {_text(chart.caption)}</figcaption></figure>"
    )


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{''.join(parts)}</section>"


def _list(sentences: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(sentence)}</li>' for sentence in sentences)}</ul>"


def _text(value: str) -> str:
    return escape(mask(value))
