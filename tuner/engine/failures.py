"""Reads why an engine failed out of its log: the kind, the stage, the memory figures and the one line of evidence.

Works on the text alone, of any vLLM from 0.10 on and any device; `failure_log` takes it apart. The texts it knows are
data in `failure_causes` and `failure_rules`. It must not start, stop or ask anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from objectives.measurement import Failure, FailureKind, Stage
from tuner.engine.failure_causes import RULES
from tuner.engine.failure_log import ERRORS, STAGES, WINDOW_BEFORE, Log, LogLine, stage_line
from tuner.engine.failure_rules import (
    AVAILABLE,
    FITTING_TOKENS,
    FRAMES,
    KV_LEFT,
    KV_OVERDRAWN,
    NEEDED,
    WATCHDOG_MARK,
    WRAPPERS,
    Rank,
    Rule,
)

__all__ = ["classify", "stage_line", "watchdog_line"]

_TRACEBACK_LINES = 250
_FRAMES_AFTER_LINES = 40

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

_ERROR_SHAPED = re.compile(
    r"\s{0,3}(?:value error,|assertion failed,|[\w.]{0,200}(?:error|exception)\b|[\w .\-]{0,60}: error:)"
)
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
    log = Log(log_text)
    hit = _decide(log)
    if hit is None:
        return Failure(FailureKind.CRASHED, log.progress_stage(len(log.lowered), None), _last_words(log, exit_code))
    stage = max(_stage_of(log, hit), hit.rule.earliest, key=STAGES.index)
    kind = hit.rule.kind
    if kind is None:
        stage = _memory_stage(log, hit, stage)
        kind = _OOM_KINDS[stage]
    if WATCHDOG_MARK in hit.line.text and stage is Stage.CONFIG and "using nccl==" in log.lowered:
        kind = FailureKind.COMMUNICATION  # the ranks never met: the last thing done was to set NCCL up
    needed_gib, available_gib, fitting_tokens = _figures(log, hit, kind)
    return Failure(kind, stage, _message(log, hit), needed_gib, available_gib, fitting_tokens)


def watchdog_line(what: str, budget_s: float) -> str:
    """Return a line to write into an engine's log when its start, run or stop was ended for taking too long."""
    return f"{WATCHDOG_MARK} {what}: no end within {budget_s:.0f} s"


@dataclass(frozen=True, slots=True)
class _Hit:
    """A rule that matched, where, and the line; `outlived` when the line's process went on to a later stage."""

    rule: Rule
    position: int
    line: LogLine
    outlived: bool = False


def _decide(log: Log) -> _Hit | None:
    """Find the text that explains most; among equals the one written first, then the narrower rule."""
    hits = [hit for rule in RULES for hit in _first_hits(log, rule)]
    return min(hits, key=lambda hit: _precedence(log, hit), default=None)


def _precedence(log: Log, hit: _Hit) -> tuple[int, int]:
    rank = min(hit.rule.rank, Rank.ECHO) if hit.outlived else hit.rule.rank
    return -rank, log.index(hit.position)


def _first_hits(log: Log, rule: Rule) -> list[_Hit]:
    """Return the first line to which `rule` applies: of those that stand, and of those that were outlived."""
    first: dict[bool, _Hit] = {}
    for phrase in rule.phrases:
        for position in log.find(phrase):
            if False in first and position >= first[False].position:
                break
            hit = _Hit(rule, position, log.line_at(position))
            if not _applies(log, hit):
                continue
            later = log.later_stage(position, hit.line)
            if later is Stage.RUN:  # the engine served requests after it
                continue
            hit = replace(hit, outlived=later is not None)
            if hit.outlived not in first or position < first[hit.outlived].position:
                first[hit.outlived] = hit
    return list(first.values())


def _applies(log: Log, hit: _Hit) -> bool:
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
    if rule.as_error and line.level not in ERRORS and not _ERROR_SHAPED.match(lowered):
        return False
    return not rule.start_only or _is_starting(log, hit)


def _is_starting(log: Log, hit: _Hit) -> bool:
    """Whether the engine served no request yet. The traceback is read only where progress lines leave it open."""
    progress = log.progress_stage(hit.position, hit.line)
    if progress is Stage.WARMUP:
        process = hit.line.process
        if hit.position < log.running_since.get(process, len(log.lowered)) and _frame_stage(log, hit) is Stage.RUN:
            log.running_since[process] = hit.position
        return hit.position < log.running_since.get(process, len(log.lowered))
    return STAGES.index(progress) < STAGES.index(Stage.RUN)


def _stage_of(log: Log, hit: _Hit) -> Stage:
    """Return the stage of a hit: from the functions in its traceback, else from the progress lines before it."""
    frame = _frame_stage(log, hit)
    progress = log.progress_stage(hit.position, hit.line)
    if frame is None or (frame is Stage.RUN and log.tells_own_stages):
        return progress
    return frame


def _frame_stage(log: Log, hit: _Hit) -> Stage | None:
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


def _frames_below(log: Log, index: int, process: str) -> list[str]:
    """Return the functions right below a line: some logs name the exception before its traceback."""
    names: list[str] = []
    for number in range(index + 1, index + _FRAMES_AFTER_LINES):
        line = log.line(number)
        if line is not None and line.process == process and not line.is_quiet:
            names.extend(_FRAME.findall(line.text))
    return names


def _memory_stage(log: Log, hit: _Hit, stage: Stage) -> Stage:
    """Sharpen the stage of a device that ran out of memory.

    Between the size of the KV cache and the end of start-up vLLM captures graphs, or, told to be eager, only warms up.
    """
    if stage is Stage.CONFIG:
        return Stage.WEIGHTS
    if stage is not Stage.KV_CACHE or _frame_stage(log, hit) is Stage.KV_CACHE:
        return stage
    return Stage.WARMUP if "enforce_eager=true" in log.lowered else Stage.GRAPH_CAPTURE


def _figures(log: Log, hit: _Hit, kind: FailureKind) -> tuple[float | None, float | None, int | None]:
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
    tokens = fitting.group(1).replace(",", "") if fitting else ""
    return needed, available, int(tokens) if 0 < len(tokens) < 19 else None


def _with_next_lines(log: Log, hit: _Hit) -> str:
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
    return float(number.replace(",", "")) * _GIB_PER_UNIT[unit[0]]


def _message(log: Log, hit: _Hit) -> str:
    """Return the evidence; of a pydantic report the line that names the field, not its heading."""
    text = hit.line.text.strip()
    if "validation error" in text.lower() and not _INNER_VALIDATION.search(text):
        index = log.index(hit.position)
        for number in range(index + 1, index + 4):
            line = log.line(number)
            if line is not None and line.process == hit.line.process and _INNER_VALIDATION.search(line.text):
                return line.text.strip()
    return text


def _last_words(log: Log, exit_code: int | None) -> str:
    """Return the line that an operator should see when nothing explains the end: a wrapper's, else the last one."""
    wrapper = max((at for phrase in WRAPPERS for at in log.find(phrase)), default=None)
    if wrapper is not None:
        return log.line_at(wrapper).text.strip()
    filled = log.text.rstrip()
    if filled:
        return log.line_at(len(filled) - 1).text.strip() or filled[-WINDOW_BEFORE:].splitlines()[-1]
    ended = f" (exit code {exit_code})" if exit_code else ""
    return f"the engine ended without a word{ended}"
