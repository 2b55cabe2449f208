"""Reads why an engine failed out of its log: the kind, the stage, the memory figures and the one line of evidence.

Works on the text alone, of any vLLM from 0.10 on and any device, with the lines of several processes interleaved. The
texts it knows are data in `failure_causes` and `failure_rules`. It must not start, stop or ask anything.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from objectives.measurement import Failure, FailureKind, Stage
from tuner.engine.failure_causes import RULES
from tuner.engine.failure_rules import (
    AVAILABLE,
    BENIGN,
    FITTING_TOKENS,
    FRAMES,
    KV_LEFT,
    KV_OVERDRAWN,
    NEEDED,
    PROGRESS,
    STAGE_MARK,
    WATCHDOG_MARK,
    WRAPPERS,
    Rank,
    Rule,
)

_WINDOW_BEFORE, _WINDOW_AFTER = 600, 1400
"""Characters round a phrase that are looked at: a line may be a megabyte long, a message of an engine is not."""
_TRACEBACK_LINES = 250
_FRAMES_AFTER_LINES = 40

_STAGES = tuple(Stage)
_OOM_KINDS = {
    Stage.GATE: FailureKind.OOM_WEIGHTS,
    Stage.CONFIG: FailureKind.OOM_WEIGHTS,
    Stage.WEIGHTS: FailureKind.OOM_WEIGHTS,
    Stage.PROFILE: FailureKind.OOM_PROFILE,
    Stage.KV_CACHE: FailureKind.OOM_PROFILE,
    Stage.GRAPH_CAPTURE: FailureKind.OOM_GRAPH_CAPTURE,
    Stage.WARMUP: FailureKind.OOM_WARMUP,
    Stage.RUN: FailureKind.OOM_RUNTIME,
    Stage.STOP: FailureKind.OOM_RUNTIME,
}
_MEMORY_KINDS = frozenset({FailureKind.MEMORY_NOT_FREE, FailureKind.HOST_MEMORY})
_GIB_PER_UNIT = {"b": 1 / 2**30, "k": 1 / 2**20, "m": 1 / 2**10, "g": 1.0, "t": 2.0**10}

_ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
_PROCESS = re.compile(r"\(([A-Za-z][\w.\-]{0,60}(?: rank=\d+)?(?: pid=\d+)?)(?:, ip=[\w.:]{1,40})?\)\s?")
_STAMP = re.compile(
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,:+Z]{0,16}\]?\s?(?:\[[A-Za-z]{1,8}\]\s|std(?:out|err) [FP]\s)?"
    r"|[\w.\-]{1,40}\s{0,20}\|\s"
)
_LEVEL = re.compile(
    r"(?:\[rank\d{1,4}\]:?\s?)?(?:- )?(?:[\w.]{1,80} - )?"
    r"\[?(?:(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b[:|\]]?|([IWEF])(?=\d{4} ))"
    r"(?:\s?\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)?(?:\s?\[?[\w.\-/]{1,120}:\d+\])? ?"
)
_JSON_LEVEL = re.compile(r'"level(?:name)?": ?"(\w+)"')
_QUIET = frozenset({"DEBUG", "INFO", "WARNING", "WARN", "I", "W"})
_ERRORS = frozenset({"ERROR", "CRITICAL", "FATAL", "E", "F"})
_ERROR_SHAPED = re.compile(
    r"\s{0,3}(?:value error,|assertion failed,|[\w.]{0,200}(?:error|exception)\b|[\w .\-]{0,60}: error:)"
)
_PYTHON_WARNING = re.compile(r"\b\w*Warning: |NCCL INFO ")
_NO_EVIDENCE = re.compile(r'\s*(?:raise\b|File ")')
"""Lines of a traceback that lead to the exception; what it says stands at its end."""
_SOURCE_CODE = re.compile(r"\s{4,}")
_FRAME = re.compile(r"(?<!\w)(" + "|".join(sorted(FRAMES, key=len, reverse=True)) + r")(?!\w)")
_INNER_VALIDATION = re.compile(r"value error, |assertion failed, |\[type=\w", re.IGNORECASE)


def classify(log_text: str, exit_code: int | None = None) -> Failure:
    """Say why an engine failed.

    Parameters
    ----------
    log_text:
        Everything that the engine's processes wrote, in any chunking; may be empty or not text at all.
    exit_code:
        Of the process that ended; negative for a signal. `None` or 0 where unknown. It is evidence of nothing
        but an end: SIGKILL becomes `host_memory` only where the log shows that memory was the reason.

    Returns
    -------
    Failure
        `message` is one line of the log (colours and log prefix removed) unless the log is empty.
    """
    log = _Log(log_text)
    hit = _decide(log)
    if hit is None:
        return Failure(FailureKind.CRASHED, log.progress_stage(len(log.lowered), None), _last_words(log, exit_code))
    stage = max(_stage_of(log, hit), hit.rule.earliest, key=_STAGES.index)
    kind = hit.rule.kind
    if kind is None:
        stage = _memory_stage(log, hit, stage)
        kind = _OOM_KINDS[stage]
    if WATCHDOG_MARK in hit.line.text and stage is Stage.CONFIG and "using nccl==" in log.lowered:
        kind = FailureKind.COMMUNICATION  # the ranks never met: the last thing done was to set NCCL up
    needed_gib, available_gib, fitting_tokens = _figures(log, hit, kind)
    return Failure(kind, stage, _message(log, hit), needed_gib, available_gib, fitting_tokens)


def stage_line(stage: Stage) -> str:
    """Return a line to write into an engine's log when the tuner itself enters a stage, so that `classify` sees it."""
    return f"{STAGE_MARK} {stage.value}"


def watchdog_line(what: str, budget_s: float) -> str:
    """Return a line to write into an engine's log when its start, run or stop was ended for taking too long."""
    return f"{WATCHDOG_MARK} {what}: no end within {budget_s:.0f} s"


@dataclass(frozen=True, slots=True)
class _Line:
    """One line taken apart: who wrote it, at which level, and the text without prefix."""

    process: str
    level: str
    text: str

    @property
    def family(self) -> str:
        """`Worker` of `Worker_TP1 pid=7`: processes of one family do the same work side by side."""
        return re.split(r"[^A-Za-z]", self.process, maxsplit=1)[0]

    @property
    def is_quiet(self) -> bool:
        """Whether the writer itself says that this is no failure."""
        return self.level in _QUIET or _PYTHON_WARNING.search(self.text[:200]) is not None


@dataclass(frozen=True, slots=True)
class _Hit:
    """A rule that matched, where, and the line."""

    rule: Rule
    position: int
    line: _Line


@dataclass(frozen=True, slots=True)
class _Mark:
    """A progress line: the stage under way once it was written."""

    position: int
    stage: Stage
    line: _Line


class _Log:
    """A log that is searched often: normalised text, a lower-case shadow with equal offsets, and its lines."""

    def __init__(self, text: str) -> None:
        self.text = _ANSI.sub("", text).replace("\r", "\n")
        # ASCII only, one character for one: str.lower() may change the length, and offsets must agree.
        self.lowered = self.text.encode("ascii", "replace").decode("ascii").lower()
        starts = [0]
        starts.extend(match.end() for match in re.finditer("\n", self.text))
        self._starts = starts
        self._parsed: dict[int, _Line] = {}
        self._muted: dict[int, bool] = {}
        self.running_since: dict[str, int] = {}
        """Per process, where the first traceback out of a run was seen; filled while reading."""

    def find(self, phrase: str) -> Iterator[int]:
        """Yield every position of a lower-case literal."""
        position = self.lowered.find(phrase)
        while position >= 0:
            yield position
            position = self.lowered.find(phrase, position + len(phrase))

    def index(self, position: int) -> int:
        """Return the number of the line that holds `position`, from 0."""
        return bisect_right(self._starts, position) - 1

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the offsets of a line, without its line end."""
        end = self._starts[index + 1] - 1 if index + 1 < len(self._starts) else len(self.text)
        return self._starts[index], end

    def line_at(self, position: int) -> _Line:
        """Take apart the line round `position`; of an overlong one only the surroundings."""
        index = self.index(position)
        start, end = self.bounds(index)
        if end - start <= _WINDOW_BEFORE + _WINDOW_AFTER:
            if index not in self._parsed:
                self._parsed[index] = _parse(self.text[start:end])
            return self._parsed[index]
        head = _parse(self.text[start : start + _WINDOW_BEFORE])
        window = self.text[max(start, position - _WINDOW_BEFORE) : min(end, position + _WINDOW_AFTER)]
        return _Line(head.process, head.level, window if position - start > _WINDOW_BEFORE else _parse(window).text)

    def is_muted(self, position: int) -> bool:
        """Whether the line round `position` can decide nothing: its writer, or the text, says that it is harmless."""
        index = self.index(position)
        start, end = self.bounds(index)
        if end - start > _WINDOW_BEFORE + _WINDOW_AFTER:
            return _is_harmless(self.line_at(position))
        if index not in self._muted:
            self._muted[index] = _is_harmless(self.line_at(position))
        return self._muted[index]

    def line(self, index: int) -> _Line | None:
        """Take apart a line by number; `None` outside the log."""
        if not 0 <= index < len(self._starts):
            return None
        return self.line_at(self._starts[index])

    @cached_property
    def marks(self) -> tuple[_Mark, ...]:
        """The first line of each stage that each process wrote, in order."""
        first: dict[tuple[str, Stage], _Mark] = {}
        for phrase, stage in PROGRESS:
            for position in self.find(phrase):
                line = self.line_at(position)
                known = first.get((line.process, stage))
                if known is None or position < known.position:
                    first[line.process, stage] = _Mark(position, stage, line)
        own = (_Mark(at, stage, self.line_at(at)) for stage in Stage for at in self.find(stage_line(stage)))
        return tuple(sorted((*first.values(), *own), key=lambda mark: mark.position))

    def progress_stage(self, position: int, line: _Line | None) -> Stage:
        """Return the stage that the writer of `line` was in at `position`.

        What a sibling wrote does not count (another rank may be further on), unless this process writes no progress
        lines at all, as ranks above 0 do in newer versions.
        """
        seen = [mark for mark in self.marks if mark.position <= position]
        if line is not None and any(mark.line.process == line.process for mark in seen):
            seen = [m for m in seen if m.line.process == line.process or m.line.family != line.family]
        return max((mark.stage for mark in seen), key=_STAGES.index, default=Stage.CONFIG)

    @cached_property
    def tells_own_stages(self) -> bool:
        """Whether the tuner wrote its own stage lines into this log."""
        return STAGE_MARK in self.lowered


def _parse(raw: str) -> _Line:
    """Split the prefix (time stamps, process, level, source file) off a line."""
    at, process, level = 0, "", ""
    while match := _STAMP.match(raw, at) or _PROCESS.match(raw, at):
        process = (match.group(1) or process) if match.re is _PROCESS else process
        at = match.end()
    if match := _LEVEL.match(raw, at):
        level = match.group(1) or match.group(2)
        at = match.end() if match.group(1) else at
    elif raw.startswith("{") and (match := _JSON_LEVEL.search(raw, 0, 400)):
        level = match.group(1).upper()
    return _Line(process, level, raw[at:].rstrip())


def _decide(log: _Log) -> _Hit | None:
    """Find the text that explains most; among equals the one written first, then the narrower rule."""
    best: _Hit | None = None
    for rule in RULES:
        hit = _first_hit(log, rule)
        if hit and (best is None or _precedence(log, hit) < _precedence(log, best)):
            best = hit
    return best


def _precedence(log: _Log, hit: _Hit) -> tuple[int, int]:
    return -hit.rule.rank, log.index(hit.position)


def _first_hit(log: _Log, rule: Rule) -> _Hit | None:
    """Return the first line of the log to which `rule` applies."""
    first: _Hit | None = None
    for phrase in rule.phrases:
        for position in log.find(phrase):
            if first and position >= first.position:
                break
            hit = _Hit(rule, position, log.line_at(position))
            if _applies(log, hit):
                first = hit
                break
    return first


def _is_harmless(line: _Line) -> bool:
    lowered = line.text.lower()
    return line.is_quiet or bool(_NO_EVIDENCE.match(line.text)) or any(phrase in lowered for phrase in BENIGN)


def _applies(log: _Log, hit: _Hit) -> bool:
    rule, line = hit.rule, hit.line
    if log.is_muted(hit.position):
        return False
    lowered = line.text.lower()
    if rule.pattern and not rule.pattern.search(lowered):
        return False
    if rule.rank <= Rank.EXCEPTION and any(phrase in lowered for phrase in WRAPPERS):
        return rule.kind is FailureKind.HUNG
    if rule.rank not in (Rank.CAUSE, Rank.KILLED) and _SOURCE_CODE.match(line.text):
        return False
    if rule.as_error and line.level not in _ERRORS and not _ERROR_SHAPED.match(lowered):
        return False
    return not rule.start_only or _is_starting(log, hit)


def _is_starting(log: _Log, hit: _Hit) -> bool:
    """Whether the engine served no request yet. The traceback is read only where progress lines leave it open."""
    progress = log.progress_stage(hit.position, hit.line)
    if progress is Stage.WARMUP:
        process = hit.line.process
        if hit.position < log.running_since.get(process, len(log.lowered)) and _frame_stage(log, hit) is Stage.RUN:
            log.running_since[process] = hit.position
        return hit.position < log.running_since.get(process, len(log.lowered))
    return _STAGES.index(progress) < _STAGES.index(Stage.RUN)


def _stage_of(log: _Log, hit: _Hit) -> Stage:
    """Return the stage of a hit: from the functions in its traceback, else from the progress lines before it."""
    frame = _frame_stage(log, hit)
    progress = log.progress_stage(hit.position, hit.line)
    if frame is None or (frame is Stage.RUN and log.tells_own_stages):
        return progress
    return frame


def _frame_stage(log: _Log, hit: _Hit) -> Stage | None:
    """Return the stage that the innermost of vLLM's functions in the traceback of a hit belongs to."""
    index = log.index(hit.position)
    names: list[str] = []
    for number in range(index, max(-1, index - _TRACEBACK_LINES), -1):
        line = log.line(number)
        if line is None or line.process != hit.line.process or (line.is_quiet and number != index):
            continue
        if "Traceback (most recent call last)" in line.text:
            break
        names.extend(reversed(_FRAME.findall(line.text)))
    stages = [FRAMES[name] for name in names or reversed(_frames_below(log, index, hit.line.process))]
    starting = (stage for stage in stages if stage is not Stage.RUN)  # profiling may call what a run calls
    return next(starting, Stage.RUN if stages else None)


def _frames_below(log: _Log, index: int, process: str) -> list[str]:
    """Return the functions right below a line: some logs name the exception before its traceback."""
    names: list[str] = []
    for number in range(index + 1, index + _FRAMES_AFTER_LINES):
        line = log.line(number)
        if line is not None and line.process == process and not line.is_quiet:
            names.extend(_FRAME.findall(line.text))
    return names


def _memory_stage(log: _Log, hit: _Hit, stage: Stage) -> Stage:
    """Sharpen the stage of a device that ran out of memory.

    Between the size of the KV cache and the end of start-up vLLM captures graphs, or, told to be eager, only warms up.
    """
    if stage is Stage.CONFIG:
        return Stage.WEIGHTS
    if stage is not Stage.KV_CACHE or _frame_stage(log, hit) is Stage.KV_CACHE:
        return stage
    return Stage.WARMUP if "enforce_eager=true" in log.lowered else Stage.GRAPH_CAPTURE


def _figures(log: _Log, hit: _Hit, kind: FailureKind) -> tuple[float | None, float | None, int | None]:
    """Read needed GiB, available GiB and the length that would fit out of the evidence and the lines below it."""
    if not (kind.is_oom or kind in _MEMORY_KINDS):
        return None, None, None
    text = _with_next_lines(log, hit)
    if overdrawn := KV_OVERDRAWN.search(text):
        left_gib, budget_gib = float(overdrawn.group(1)), float(overdrawn.group(2))
        if left_gib <= 0:  # all else already takes more than the budget
            return budget_gib - left_gib, budget_gib, None
    needed, available = _amount(NEEDED, text), _amount(AVAILABLE, text)
    if available is None and kind is FailureKind.OOM_KV_CACHE:
        left = list(KV_LEFT.finditer(log.lowered, 0, hit.position))
        available = _gib(left[-1].group(1), left[-1].group(2)) if left else None
    fitting = next((match for pattern in FITTING_TOKENS if (match := pattern.search(text))), None)
    return needed, available, int(fitting.group(1)) if fitting and len(fitting.group(1)) < 19 else None


def _with_next_lines(log: _Log, hit: _Hit) -> str:
    """Return the evidence and what the same process wrote right below, lower-cased: figures may follow there."""
    index = log.index(hit.position)
    texts = [hit.line.text]
    for number in range(index + 1, index + 4):
        line = log.line(number)
        if line is not None and line.process == hit.line.process and not line.is_quiet:
            texts.append(line.text)
    return " ".join(texts).lower()


def _amount(patterns: tuple[re.Pattern[str], ...], text: str) -> float | None:
    match = next((match for pattern in patterns if (match := pattern.search(text))), None)
    return _gib(match.group(1), match.group(2)) if match else None


def _gib(number: str, unit: str) -> float:
    return float(number) * _GIB_PER_UNIT[unit[0]]


def _message(log: _Log, hit: _Hit) -> str:
    """Return the evidence; of a pydantic report the line that names the field, not its heading."""
    text = hit.line.text.strip()
    if "validation error" in text.lower() and not _INNER_VALIDATION.search(text):
        index = log.index(hit.position)
        for number in range(index + 1, index + 4):
            line = log.line(number)
            if line is not None and line.process == hit.line.process and _INNER_VALIDATION.search(line.text):
                return line.text.strip()
    return text


def _last_words(log: _Log, exit_code: int | None) -> str:
    """Return the line that an operator should see when nothing explains the end: a wrapper's, else the last one."""
    wrapper = max((at for phrase in WRAPPERS for at in log.find(phrase)), default=None)
    if wrapper is not None:
        return log.line_at(wrapper).text.strip()
    filled = log.text.rstrip()
    if filled:
        return log.line_at(len(filled) - 1).text.strip() or filled[-_WINDOW_BEFORE:].splitlines()[-1]
    ended = f" (exit code {exit_code})" if exit_code else ""
    return f"the engine ended without a word{ended}"
