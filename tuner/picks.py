"""Which trial a `--pick` means.

    knee                                  the trial that gives up least of either objective (the default)
    min:METRIC, max:METRIC                the least or the most of any metric
    trial:N                               that very trial, whatever became of it
    slo:METRIC<=LIMIT,METRIC>=LIMIT,...   the knee of what is left when every limit holds
    weights:METRIC=WEIGHT,...             the best weighted geometric mean

All but `trial:N` choose among the study's results: complete configurations, each once, with the median of their
measurements. Metrics may be shortened to the start of an objective's name (`ttft` for `ttft_p95_s`).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from objectives.metrics import UnknownMetricError, lookup
from tuner.errors import PickError
from tuner.ledger import TrialRecord, TrialState
from tuner.view import Result, StudyView, knee_of

FORMS = (
    "knee",
    "min:METRIC",
    "max:METRIC",
    "trial:N",
    "slo:METRIC<=LIMIT,...",
    "weights:METRIC=WEIGHT,...",
)
"""Every form of a pick, as an error message shows them."""

_LIMIT = re.compile(r"\s*(?P<metric>[^<>=\s]+)\s*(?P<sign><=|>=)\s*(?P<limit>[^<>=\s]+)\s*")
_WEIGHT = re.compile(r"\s*(?P<metric>[^<>=\s]+)\s*=\s*(?P<weight>[^<>=\s]+)\s*")


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of an `slo:` pick, in the metric's own unit."""

    metric: str
    sign: str
    value: float

    def holds(self, values: Mapping[str, float]) -> bool:
        """Whether these values keep the limit; a metric that is undefined keeps none."""
        value = values.get(self.metric)
        if value is None:
            return False
        return value <= self.value if self.sign == "<=" else value >= self.value

    def __str__(self) -> str:
        return f"{self.metric}{self.sign}{self.value:g}"


def pick(study: StudyView, text: str = "knee") -> TrialRecord:
    """Return the trial that `text` names; of equals the one with the lowest number.

    Parameters
    ----------
    text:
        One of `FORMS`.

    Raises
    ------
    PickError
        When the text is no pick, names a metric or trial that the study does not have, or nothing is left to choose
        from. The sentence says what there is.
    """
    kind, _, rest = text.strip().partition(":")
    chosen = _CHOICES.get(kind)
    if chosen is None or (kind == "knee") == bool(rest):
        near = difflib.get_close_matches(kind, _CHOICES, n=1)
        hint = f"did you mean {near[0]!r}? " if near and near[0] != kind else ""
        raise PickError(f"--pick {text!r}: this is no pick; {hint}the forms are {', '.join(FORMS)}")
    return study.trial(chosen(study, rest))


def _knee(study: StudyView, _: str) -> int:
    if study.knee is None:
        _require_results(study, "knee")
        raise PickError("--pick knee: the study has no front; name a trial as trial:N")
    return study.knee


def _least(study: StudyView, name: str) -> int:
    return _extreme(study, name, sign=1.0)


def _most(study: StudyView, name: str) -> int:
    return _extreme(study, name, sign=-1.0)


def _extreme(study: StudyView, name: str, sign: float) -> int:
    _require_results(study, f"{'min' if sign > 0 else 'max'}:{name}")
    metric = _metric(study, name)
    return _best(_with_metric(study, metric), lambda values: sign * values[metric])


def _trial(study: StudyView, number: str) -> int:
    finished = [t.number for t in study.trials if t.state is not TrialState.RUNNING]
    if not re.fullmatch(r"\d+", number) or int(number) not in finished:
        there = f"trials {_ranges(finished)}" if finished else "no finished trial yet"
        raise PickError(f"--pick trial:{number}: no such finished trial; the study has {there}")
    return int(number)


def _within_limits(study: StudyView, text: str) -> int:
    limits = [_limit(study, part) for part in text.split(",")]
    _require_results(study, f"slo:{text}")
    within = [r for r in study.results.values() if all(limit.holds(r.values) for limit in limits)]
    if not within:
        raise PickError(f"--pick slo:{text}: no complete trial keeps every limit; {_nearest(study, limits)}")
    return within[knee_of([r.values for r in within], study.objectives)].number


def _limit(study: StudyView, part: str) -> Limit:
    match = _LIMIT.fullmatch(part)
    value = _number(match["limit"]) if match else None
    if match is None or value is None:
        raise PickError(f"--pick slo: {part!r} is no limit; write it as METRIC<=NUMBER or METRIC>=NUMBER")
    return Limit(_metric(study, match["metric"]), match["sign"], value)


def _nearest(study: StudyView, limits: Iterable[Limit]) -> str:
    """For each limit, the best that any complete trial reaches on it."""
    reached = []
    for limit in limits:
        best = min if limit.sign == "<=" else max
        values = [r.values[limit.metric] for r in _with_metric(study, limit.metric)]
        reached.append(f"the best {limit.metric} is {best(values):.4g}, asked was {limit}")
    return "; ".join(reached)


def _weighted(study: StudyView, text: str) -> int:
    """Least weighted geometric mean: sum of weight × log(value), its sign turned where more is better.

    A geometric mean needs no scale to compare seconds of TTFT with milliseconds of TPOT: what counts is by which
    factor one configuration is better than another, so no choice of reference or unit changes the winner.
    """
    weights = dict(_weight(study, part) for part in text.split(","))
    if not math.fsum(weights.values()) > 0:
        raise PickError(f"--pick weights:{text}: all weights are 0; give at least one of them more")
    _require_results(study, f"weights:{text}")
    signs = {metric: 1.0 if _direction(study, metric) == "minimize" else -1.0 for metric in weights}
    results = [r for r in study.results.values() if all(r.values.get(m, 0.0) > 0 for m in weights)]
    if not results:
        raise PickError(f"--pick weights:{text}: no complete trial has a value above 0 for each of these metrics")
    return _best(results, lambda v: math.fsum(w * signs[m] * math.log(v[m]) for m, w in weights.items()))


def _weight(study: StudyView, part: str) -> tuple[str, float]:
    match = _WEIGHT.fullmatch(part)
    weight = _number(match["weight"]) if match else None
    if match is None or weight is None or weight < 0:
        raise PickError(f"--pick weights: {part!r} is no weight; write it as METRIC=NUMBER, the number not below 0")
    return _metric(study, match["metric"]), weight


_CHOICES: Mapping[str, Callable[[StudyView, str], int]] = {
    "knee": _knee,
    "min": _least,
    "max": _most,
    "trial": _trial,
    "slo": _within_limits,
    "weights": _weighted,
}


def _metric(study: StudyView, name: str) -> str:
    """Full name of a metric that some result has, also from the start of an objective's name."""
    measured = {metric for r in study.results.values() for metric in r.values}
    objectives = [o.name for o in study.objectives]
    if name in measured or name in objectives:
        return name
    short = [o for o in objectives if o.startswith(f"{name}_")]
    if len(short) == 1:
        return short[0]
    if short:
        raise PickError(f"--pick: {name!r} could be {' or '.join(short)}; write the whole name")
    near = difflib.get_close_matches(name, measured | set(objectives), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise PickError(f"--pick: no trial has the metric {name!r}; {hint}the objectives are {', '.join(objectives)}")


def _direction(study: StudyView, metric: str) -> str:
    """Which way is better: as the study says for an objective, else as the metric itself does."""
    for objective in study.objectives:
        if objective.name == metric:
            return objective.direction
    try:
        return lookup(metric).direction
    except UnknownMetricError as error:
        raise PickError(f"--pick: nothing says whether less or more of {metric!r} is better; weigh others") from error


def _with_metric(study: StudyView, metric: str) -> list[Result]:
    return [r for r in study.results.values() if metric in r.values]


def _best(results: Iterable[Result], cost: Callable[[Mapping[str, float]], float]) -> int:
    return min(results, key=lambda r: (cost(r.values), r.number)).number


def _require_results(study: StudyView, text: str) -> None:
    if not study.results:
        raise PickError(f"--pick {text}: the study has no complete trial yet; let it run on, or name one as trial:N")


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _ranges(numbers: Sequence[int]) -> str:
    """Short text of ascending numbers: `0-3, 5`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
