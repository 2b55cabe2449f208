"""A log taken apart: its lines, who wrote each of them and how seriously, and how far the engine had come.

Works on the text alone, with the lines of several processes interleaved and wrapped by whatever carried them: Ray,
containers, Kubernetes, journald, JSON. What the lines mean is not known here; see `failures`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from objectives.measurement import Stage
from tuner.engine.failure_rules import BENIGN, PROGRESS, STAGE_MARK

STAGES = tuple(Stage)

WINDOW_BEFORE, WINDOW_AFTER = 600, 1400
"""Characters round a phrase that are looked at: a line may be a megabyte long, a message of an engine is not."""
_LONGEST_JSON = 2**16

_ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
_PROCESS = re.compile(r"\(([A-Za-z][\w.\-]{0,60}(?: rank=\d+)?(?: pid=\d+)?)(?:, ip=[\w.:]{1,40})?\)\s?")
_STAMP = re.compile(
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,:+Z]{0,16}\]?\s?(?:\[[A-Za-z]{1,8}\]\s|std(?:out|err) [FP]\s)?"
    r"|[\w.\-]{1,40}\s{0,20}\|\s"  # docker compose
    r"|\[pod/[\w./\-]{1,120}\]\s|\[(?:default)?\d{1,3}\]:\s?"  # kubectl logs --prefix; torchrun
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.\-]{1,60} [\w.\-@/]{1,60}(?:\[\d{1,9}\])?: "  # journald
)
_LEVEL = re.compile(
    r"(?:\[rank\d{1,4}\]:?\s?)?(?:[|\-] )?(?:[\w.]{1,80} - )?"
    r"\[?(?:(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b[:|\]]?|([IWEF])(?=\d{4} ))"
    r"(?:\s?\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)?(?:\s?\[?[\w.\-/]{1,120}:\d+\])?(?:\s{0,8}\|)? ?"
)
_JSON_LEVEL = re.compile(r'"level(?:name)?": ?"(\w+)"')
_JSON_TEXTS = ("log", "message", "msg", "text", "MESSAGE", "event")
_JSON_LEVELS = ("level", "levelname", "severity", "lvl")
_JSON_TRACES = ("exc_info", "exception", "traceback", "stack_trace", "stacktrace")
_QUIET = frozenset({"DEBUG", "INFO", "WARNING", "WARN", "I", "W"})
ERRORS = frozenset({"ERROR", "CRITICAL", "FATAL", "E", "F"})
_PYTHON_WARNING = re.compile(r"\b\w*Warning: |NCCL INFO ")
_NO_EVIDENCE = re.compile(r'\s*(?:raise\b|File ")')
"""Lines of a traceback that lead to the exception; what it says stands at its end."""


def stage_line(stage: Stage) -> str:
    """Return a line to write into an engine's log when the tuner itself enters a stage, so that `classify` sees it."""
    return f"{STAGE_MARK} {stage.value}"


@dataclass(frozen=True, slots=True)
class LogLine:
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
class Mark:
    """A progress line: the stage under way once it was written."""

    position: int
    stage: Stage
    line: LogLine


class Log:
    """A log that is searched often: normalised text, a lower-case shadow with equal offsets, and its lines."""

    def __init__(self, text: str) -> None:
        self.text = _unwrap(_ANSI.sub("", text).replace("\r", "\n"))
        # ASCII only, one character for one: str.lower() may change the length, and offsets must agree.
        self.lowered = self.text.encode("ascii", "replace").decode("ascii").lower()
        starts = [0]
        starts.extend(match.end() for match in re.finditer("\n", self.text))
        self._starts = starts
        self._parsed: dict[int, LogLine] = {}
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

    def line_at(self, position: int) -> LogLine:
        """Take apart the line round `position`; of an overlong one only the surroundings."""
        index = self.index(position)
        start, end = self.bounds(index)
        if end - start <= WINDOW_BEFORE + WINDOW_AFTER:
            if index not in self._parsed:
                self._parsed[index] = _parse(self.text[start:end])
            return self._parsed[index]
        head = _parse(self.text[start : start + WINDOW_BEFORE])
        window = self.text[max(start, position - WINDOW_BEFORE) : min(end, position + WINDOW_AFTER)]
        return LogLine(head.process, head.level, window if position - start > WINDOW_BEFORE else _parse(window).text)

    def is_muted(self, position: int) -> bool:
        """Whether the line round `position` can decide nothing: its writer, or the text, says that it is harmless."""
        index = self.index(position)
        start, end = self.bounds(index)
        if end - start > WINDOW_BEFORE + WINDOW_AFTER:
            return _is_harmless(self.line_at(position))
        if index not in self._muted:
            self._muted[index] = _is_harmless(self.line_at(position))
        return self._muted[index]

    def line(self, index: int) -> LogLine | None:
        """Take apart a line by number; `None` outside the log."""
        if not 0 <= index < len(self._starts):
            return None
        return self.line_at(self._starts[index])

    @cached_property
    def marks(self) -> tuple[Mark, ...]:
        """The first line of each stage that each process wrote, in order."""
        first: dict[tuple[str, Stage], Mark] = {}
        for phrase, stage in PROGRESS:
            for position in self.find(phrase):
                line = self.line_at(position)
                if line.level in ERRORS:
                    continue
                known = first.get((line.process, stage))
                if known is None or position < known.position:
                    first[line.process, stage] = Mark(position, stage, line)
        own = (Mark(at, stage, self.line_at(at)) for stage in Stage for at in self.find(stage_line(stage)))
        return tuple(sorted((*first.values(), *own), key=lambda mark: mark.position))

    def progress_stage(self, position: int, line: LogLine | None) -> Stage:
        """Return the stage that the writer of `line` was in at `position`.

        What a sibling wrote does not count (another rank may be further on), unless this process writes no progress
        lines at all, as ranks above 0 do in newer versions.
        """
        seen = [mark for mark in self.marks if mark.position <= position]
        if line is not None and any(mark.line.process == line.process for mark in seen):
            seen = [m for m in seen if m.line.process == line.process or m.line.family != line.family]
        return max((mark.stage for mark in seen), key=STAGES.index, default=Stage.CONFIG)

    def later_stage(self, position: int, line: LogLine) -> Stage | None:
        """Return the furthest stage after `position` if the process that wrote `line` went on; `None` if it did not.

        What it wrote was then overcome, by a retry for instance. Processes that are not named cannot be told apart.
        """
        if not line.process:
            return None
        _, end = self.bounds(self.index(position))
        own = [mark for mark in self.marks if mark.line.process == line.process]
        then = max((STAGES.index(mark.stage) for mark in own if mark.position <= position), default=0)
        if not any(mark.position > end and STAGES.index(mark.stage) > then for mark in own):
            return None
        return max((mark.stage for mark in self.marks if mark.position > end), key=STAGES.index)

    @cached_property
    def tells_own_stages(self) -> bool:
        """Whether the tuner wrote its own stage lines into this log."""
        return STAGE_MARK in self.lowered


def _unwrap(text: str) -> str:
    """Replace lines that are JSON records of a logger or of a container by what they carry."""
    if '{"' not in text:
        return text
    return "\n".join(_unwrap_line(line) if '{"' in line[:100] else line for line in text.split("\n"))


def _unwrap_line(line: str) -> str:
    at = line.index('{"')
    if len(line) > _LONGEST_JSON or not line.rstrip().endswith("}"):
        return line
    try:
        record = json.loads(line[at:])
    except (ValueError, RecursionError):
        return line
    carried = next((record[key] for key in _JSON_TEXTS if isinstance(record.get(key), str)), None)
    if carried is None:
        return line
    level = next((str(record[key]).upper() for key in _JSON_LEVELS if isinstance(record.get(key), str)), "")
    prefix = f"{line[:at]}{level} " if level and not _parse(carried).level else line[:at]
    more = next((record[key] for key in _JSON_TRACES if isinstance(record.get(key), str)), "")
    # JSON can spell halves of characters, which have no UTF-8 form: what is read here goes into a ledger.
    text = f"{carried}\n{more}".rstrip().encode("utf-8", "replace").decode()
    return "\n".join(prefix + each for each in text.replace("\r", "\n").split("\n"))


def _parse(raw: str) -> LogLine:
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
    return LogLine(process, level, raw[at:].rstrip())


def _is_harmless(line: LogLine) -> bool:
    lowered = line.text.lower()
    return line.is_quiet or bool(_NO_EVIDENCE.match(line.text)) or any(phrase in lowered for phrase in BENIGN)
