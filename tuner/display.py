"""What `tuner run` shows while it works: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from objectives.measurement import FailureKind
from tuner.ledger import History, TrialRecord, TrialState
from tuner.proposal import Proposal
from tuner.report.table import Row, front_rows
from tuner.report.words import percent
from tuner.secrets import mask, mask_tree, secret_values
from tuner.view import Objective, StudyView, view


def duration(seconds: float) -> str:
    """Seconds as people say them: 45 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def clock(at: float) -> str:
    """Unix seconds as local hours and minutes."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M")


def objective_text(objective: Objective, value: float) -> str:
    """A value with the unit that people use for it: milliseconds under a second."""
    if objective.unit == "s":
        return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"
    return f"{value:.4g} {objective.unit}".strip()


def outcome_text(record: TrialRecord, objectives: tuple[Objective, ...]) -> str:
    """One line that says what became of a trial."""
    score = record.score
    prefix = "predicted " if record.predicted else ""
    if record.state is TrialState.COMPLETE and score is not None:
        return prefix + "  ".join(f"{o.name} {objective_text(o, score.values[o.name])}" for o in objectives)
    if record.failure is not None:
        refused = "refused before start: " if record.engine_s == 0 else ""
        message = mask(record.failure.message, secret_values() + secret_values(record.config.env, record.config.args))
        return f"{record.state}: {refused}{record.failure.kind} — {message[:160]}"
    if score is not None and score.void:
        return f"void: {score.void[0].evidence}"
    if score is not None:
        broken = ", ".join(name for name, violation in score.violations.items() if violation > 0)
        return f"{prefix}infeasible: beyond {broken}"
    return str(record.state)


def config_text(changes: dict[str, object] | None) -> str:
    """What a trial changes, in one line."""
    shown = mask_tree(dict(changes or {}))
    return " ".join(f"{name}={value}" for name, value in shown.items()) or "vLLM's defaults"


def front_table(study: StudyView, title: str = "") -> Table:
    """The front beside the reference: values, 95% intervals, change in percent."""
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    table.add_column("trial", justify="right")
    for objective in study.objectives:
        table.add_column(("predicted " if study.predicted else "") + objective.name, justify="right")
        table.add_column("95% interval", justify="right")
        table.add_column("change", justify="right")
    table.add_column("what differs from vLLM's defaults", overflow="fold")
    for row in front_rows(study):
        table.add_row(*_cells(row), style="bold" if row.knee else None)
    if study.noise:
        floors = ", ".join(f"{name} {percent(floor).lstrip('+')}" for name, floor in study.noise.items())
        pairs = "; ".join(f"{a} and {b}" for a, b in study.same_within_noise)
        table.caption = f"noise floor: {floors}; ≈ is not beyond it, or the intervals overlap" + (
            f"; not told apart: trials {pairs}" if pairs else ""
        )
        table.caption_justify = "left"
    return table


def _cells(row: Row) -> list[str | Text]:
    marks = " ref" if row.reference else ""
    marks += " knee" if row.knee else ""
    marks += " verified" if row.verified else ""
    cells: list[str | Text] = [f"{row.number}{marks}"]
    for cell in row.cells:
        cells.append(objective_text(cell.objective, cell.value))
        interval = cell.interval
        cells.append("–" if interval is None else " … ".join(objective_text(cell.objective, end) for end in interval))
        style = {True: "green", False: "red", None: ""}[cell.better]
        mark = "≈" if cell.better is None and cell.change else ""
        cells.append(Text("" if cell.change is None else mark + percent(cell.change), style=style))
    cells.append(config_text(dict(row.changed)))
    return cells


@dataclass(slots=True)
class _Now:
    """A trial that runs."""

    proposal: Proposal
    since: float
    stage: str = ""


@dataclass(slots=True)
class Display:
    """A `Listener` that shows a study. Used as a context manager; plain lines when the console is no terminal."""

    console: Console
    objectives: tuple[Objective, ...]
    _running: dict[int, _Now] = field(default_factory=dict)
    _of_trials: int | None = None
    _ends_at: float | None = None
    _history: History | None = None
    _live: Live | None = None

    def __enter__(self) -> Display:
        """Begin to show."""
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=2, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()

    def began(self, proposal: Proposal, of_trials: int | None, ends_at: float | None) -> None:
        """Show that a trial begins."""
        self._running[proposal.number] = _Now(proposal, time.time())
        self._of_trials, self._ends_at = of_trials, ends_at
        changes = config_text(dict(proposal.changes))
        self._line(f"{self._position(proposal.number)}: {proposal.source}: {changes}{self._left()}")

    def progressed(self, number: int, text: str) -> None:
        """Show what a trial is doing."""
        if number in self._running:
            self._running[number].stage = text

    def finished(self, record: TrialRecord, history: History) -> None:
        """Show what became of a trial."""
        self._history = history
        took = f" ({duration(record.engine_s)})" if record.engine_s else ""
        self._line(f"trial {record.number} {outcome_text(record, self.objectives)}{took}")
        if record.failure is not None and record.failure.kind is FailureKind.COMMUNICATION:
            self._line(
                "  hint: NCCL_P2P_DISABLE=1 under engine.env helps on machines whose GPUs cannot reach each other"
            )
        self._running.pop(record.number, None)

    def noted(self, text: str) -> None:
        """Show something about the study as a whole."""
        self._line(text)

    def _line(self, text: str) -> None:
        stamp = datetime.now().astimezone().strftime("%H:%M:%S")
        self.console.print(f"{stamp} {text}", highlight=False, markup=False, soft_wrap=True)

    def _position(self, number: int) -> str:
        return f"trial {number}" + (f" (of {self._of_trials} to run)" if self._of_trials else "")

    def _left(self) -> str:
        return f" — ends about {clock(self._ends_at)}" if self._ends_at else ""

    def _render(self) -> Group:
        parts: list[Table | Text] = []
        if self._history is not None:
            study = view(self._history, self.objectives)
            if study.front:
                parts.append(front_table(study, "front so far"))
        for number, now in list(self._running.items()):
            busy = duration(time.time() - now.since)
            line = f"{self._position(number)}: {now.stage or 'start'} for {busy}{self._left()}"
            parts.append(Text(line, style="cyan"))
        return Group(*parts)
