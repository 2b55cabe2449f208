"""The night: whether another trial fits in, when the front is measured again, when a study ends and why.

Pure functions of the history, the limits and the time that is left. The last part of the time is kept: each member of
the front is measured `confirm.rounds` times again, and report and export are written.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Literal

from objectives.measurement import FailureKind
from tuner.errors import UsageError
from tuner.ledger import History, TrialRecord, TrialState
from tuner.pace import Pace

NOT_A_CANDIDATE = frozenset({"sentinel", "confirm", "alone"})
"""Sources of trials that measure a known configuration again; they do not use up the budget of trials."""
OPERATOR = "operator"
"""Source of a trial that somebody asked for with `tuner try`: it is run whatever the budget of trials."""
CLOSING_S = 30.0
"""Kept for the report, the export and MLflow's last figures: seen to take 5 to 10 s on two cores."""
STAND_INS = 2
"""So many others at most are expected to join the front for each member that turns out worse when it is measured again:
what was measured once is there partly by luck, and four came where one had been (benchmarks/README.md, Nights)."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a study must be over: by the clock on the wall, by the time that it has run, or by whichever comes first.

    Parameters
    ----------
    at:
        Unix seconds. A clock that is set moves it, as the operator who named an hour would have it.
    monotonic_s:
        A reading of `time.monotonic`, which no clock change moves: for a budget of hours.
    """

    at: float | None = None
    monotonic_s: float | None = None

    def left_s(self) -> float:
        """Seconds from now; less than 0 when it has passed."""
        left = [self.at - time.time()] if self.at is not None else []
        left += [self.monotonic_s - time.monotonic()] if self.monotonic_s is not None else []
        return min(left)

    @classmethod
    def of(cls, until: str | None, hours: float | None) -> Deadline | None:
        """Return the deadline of a run that begins now; `None` without either limit.

        Raises
        ------
        UsageError
            When `until` is no time of day.
        """
        if until is None and hours is None:
            return None
        return cls(
            None if until is None else next_time(until, time.time()),
            None if hours is None else time.monotonic() + 3600 * hours,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may use.

    Parameters
    ----------
    trials:
        Budget of trials that are candidates; `None` for no limit.
    rounds:
        How often each member of the front is measured again at the end.
    first_guess_s:
        Seconds of a trial before one was measured.
    engines:
        How many work side by side.
    """

    trials: int | None
    rounds: int
    first_guess_s: float
    closing_s: float = CLOSING_S
    engines: int = 1


@dataclass(frozen=True, slots=True)
class Step:
    """What a study does next.

    Parameters
    ----------
    kind:
        `trial`: a configuration of its own; `confirm`: trial `repeats` again; `stop`: nothing more.
    code, text:
        Why it stops: `budget` or `deadline`, and the sentence.
    """

    kind: Literal["trial", "confirm", "stop"]
    repeats: int | None = None
    code: str = ""
    text: str = ""


def next_step(
    history: History,
    front: Sequence[int],
    limits: Limits,
    left_s: float | None,
    *,
    runners_up: int = 0,
    is_open: bool = False,
    searched_all: bool = False,
    under_way: Sequence[TrialRecord] = (),
) -> Step:
    """Decide what comes next.

    Parameters
    ----------
    front:
        Numbers of the trials that are on the front now.
    left_s:
        Until the deadline; `None` without one.
    runners_up:
        How many trials may join the front when members of it are measured again (`StudyView.runners_up`).
    is_open:
        Whether a trial must be run whatever the budget: it was interrupted, or an operator asked for it.
    searched_all:
        Whether nothing is left to propose.
    under_way:
        Trials that run on other engines: expected to count.
    """
    pace = Pace.of(history, limits.first_guess_s)
    done = candidates(history) + sum(t.source not in NOT_A_CANDIDATE for t in under_way)
    wanted = not searched_all and (limits.trials is None or done < limits.trials or is_open)
    missing = _missing(history, front, limits.rounds, under_way)
    kept_s = _kept_s(history, missing, pace, limits, runners_up)
    needed_s = pace.trial_s + kept_s if _has_measured(history) else limits.closing_s
    if wanted and (left_s is None or left_s >= needed_s):
        return Step("trial")
    for number, _ in missing:
        if left_s is None or left_s >= pace.again_s(_trial(history, number)) + limits.closing_s:
            return Step("confirm", repeats=number)
    if not wanted:
        return Step("stop", code="budget", text=_done(done, limits.trials))
    kept = f", of which {_words(kept_s)} are kept for the end" if kept_s else ""
    text = f"a trial takes about {pace.trial_s:.0f} s, {max(0.0, left_s or 0.0):.0f} s are left{kept}"
    return Step("stop", code="deadline", text=text)


def _missing(
    history: History, front: Sequence[int], rounds: int, under_way: Sequence[TrialRecord] = ()
) -> list[tuple[int, int]]:
    """Members of the front that are to be measured again, with how often; next first.

    Whole rounds one after the other, so that a night that ends early has measured all equally often. Within a round
    those go first whose environment the engine's process has already: another one takes a new process.
    """
    over = [t for t in (*history.finished, *under_way) if t.source == "confirm" and not is_open(t)]
    done = {n: sum(t.repeats == n for t in over) for n in front}
    ran = [t for t in history.finished if t.engine_s > 0]
    env: Mapping[str, str] = ran[-1].config.env if ran else {}
    missing = [n for n in front if done[n] < rounds]
    missing.sort(key=lambda n: (done[n], dict(_trial(history, n).config.env) != dict(env)))
    return [(n, rounds - done[n]) for n in missing]


def _kept_s(history: History, missing: Sequence[tuple[int, int]], pace: Pace, limits: Limits, runners_up: int) -> float:
    """Seconds at the end that no new trial may use: for the front as it will be, and for the trial should it join it.

    Nothing is kept before the first measurement: there is nothing to confirm, and the guess would eat a short night.
    """
    if not _has_measured(history):
        return 0.0
    return _again_s(history, missing, pace, limits) + _joining_s(missing, pace, limits, runners_up) + limits.closing_s


def _joining_s(missing: Sequence[tuple[int, int]], pace: Pace, limits: Limits, runners_up: int) -> float:
    """Seconds of measuring again what joins the front: the trial that is begun, and runners-up."""
    return limits.rounds * (1 + min(runners_up, STAND_INS * len(missing))) * pace.trial_s


def _done(done: int, wanted: int | None) -> str:
    if wanted is not None and done > wanted:
        return f"{done} trials are done, {wanted} were asked for"
    return f"{done} of {wanted} trials are done"


def _has_measured(history: History) -> bool:
    """Whether an engine ran here; before that, how long a trial takes is a guess, and refuses nothing."""
    return any(t.engine is not None for t in history.finished)


def _again_s(history: History, missing: Sequence[tuple[int, int]], pace: Pace, limits: Limits) -> float:
    """Seconds of measuring members of the front again, so many times each, on all engines."""
    return sum(times * pace.again_s(_trial(history, number)) for number, times in missing) / limits.engines


@dataclass(frozen=True, slots=True)
class Outlook:
    """When a study will end and why, as far as can be told now. `ends_in_s` is `None` where nothing limits it."""

    ends_in_s: float | None
    why: str


def outlook(
    history: History, front: Sequence[int], limits: Limits, left_s: float | None, *, runners_up: int = 0
) -> Outlook:
    """Predict the end of a study from what its trials took so far."""
    pace = Pace.of(history, limits.first_guess_s)
    missing = _missing(history, front, limits.rounds)
    again_s = _again_s(history, missing, pace, limits)
    wanted = None if limits.trials is None else max(0, limits.trials - candidates(history))
    after_s = again_s + limits.closing_s
    by_budget_s = None if wanted is None else math.ceil(wanted / limits.engines) * pace.trial_s + after_s
    if left_s is None and by_budget_s is None:
        return Outlook(None, "nothing limits it: no budget of trials and no deadline")
    if by_budget_s is not None and (left_s is None or by_budget_s <= left_s):
        return Outlook(by_budget_s, f"the budget: {_plan(wanted or 0, pace, missing, again_s)}")
    assert left_s is not None
    joining_s = _joining_s(missing, pace, limits, runners_up)
    turns = max(0, int((left_s - after_s - joining_s) // pace.trial_s))
    fit = turns * limits.engines if wanted is None else min(turns * limits.engines, wanted)
    busy_s = math.ceil(fit / limits.engines) * pace.trial_s
    ends_in_s = max(0.0, min(left_s, busy_s + after_s + (joining_s if fit else 0.0)))
    return Outlook(ends_in_s, f"the deadline: {_plan(fit, pace, missing, again_s)} fit into {_words(left_s)}")


def _plan(trials: int, pace: Pace, missing: Sequence[tuple[int, int]], again_s: float) -> str:
    parts = [f"{trials} more trial{'' if trials == 1 else 's'} of about {_words(pace.trial_s)}"]
    if missing:
        parts.append(f"the front's {len(missing)} members again in {_words(again_s)}")
    return ", then ".join(parts)


def _words(seconds: float) -> str:
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def candidates(history: History) -> int:
    """Count the trials that used up budget: an engine ran (or refused to start with) a configuration of their own."""
    return sum(
        t.engine_s > 0 and t.source not in NOT_A_CANDIDATE and not is_open(t) and t.state is not TrialState.FAILED
        for t in history.finished
    )


def is_open(record: TrialRecord) -> bool:
    """Whether a trial was interrupted and will be run again under its number."""
    return record.failure is not None and record.failure.kind is FailureKind.INTERRUPTED


def _trial(history: History, number: int) -> TrialRecord:
    return next(t for t in history.trials if t.number == number)


# The hour that an operator names -------------------------------------------------------------------------------------


def next_time(text: str, now: float, zone: tzinfo | None = None) -> float:
    """Return the next moment, in Unix seconds, at which local clocks come to show `HH:MM`.

    An hour that a change of the clocks repeats counts each time; one that it leaves out is over when the clocks jump.

    Parameters
    ----------
    zone:
        The machine's own when left out.

    Raises
    ------
    UsageError
        When the text is no time of day.
    """
    try:
        wanted = datetime.strptime(text, "%H:%M").time()
    except ValueError as error:
        raise UsageError(f"--until {text}: write it as HH:MM, such as 07:00") from error
    today = datetime.fromtimestamp(now, zone).date()
    moments = (
        _moment(datetime.combine(today + timedelta(days=days), wanted), fold, zone)
        for days in range(3)
        for fold in (0, 1)
    )
    return min(moment for moment in moments if moment > now)


def _moment(local: datetime, fold: Literal[0, 1], zone: tzinfo | None) -> float:
    """Unix seconds at which local clocks show this, or jump over it."""
    first, second = (local.replace(tzinfo=zone, fold=f).timestamp() for f in (0, 1))
    if second >= first:  # one moment, or one of two where an hour is repeated
        return second if fold else first

    def has_passed(at: int) -> bool:
        return datetime.fromtimestamp(at, zone).replace(tzinfo=None, fold=0) >= local

    span = range(int(second), int(first) + 1)
    return float(span[bisect.bisect_left(span, True, key=has_passed)])
