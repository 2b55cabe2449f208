"""`Score`: what one trial is worth, and the only thing of a measurement that the optimiser sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from objectives.constraints import Constraint
from objectives.measurement import Measurement
from objectives.memory import memory_violation
from objectives.metrics import METRICS, compute_all
from objectives.speed import correct, correct_intervals, mean_probe, speed_index
from objectives.validity import Expectations, Reference, ValidityLimits, VoidReason, void_reasons

__all__ = ["MEMORY", "Score", "UserMetric", "VoidReason", "score"]

MEMORY = "memory"
"""Name of the constraint that every score has."""

UserMetric = Callable[[Measurement], float]
"""A user's own metric: called once with the whole measurement, returns one finite number. Lower is better unless the
study says otherwise. It must not change what it is given."""


@dataclass(frozen=True, slots=True)
class Score:
    """Every metric of a trial with its interval, its constraint violations, and whether it may be compared.

    Parameters
    ----------
    values:
        Metric name -> value, in the unit that the name ends in. A metric that is undefined here is absent.
    intervals:
        Metric name -> (low, high), the 95% interval of the value; absent where none can be given.
    violations:
        Constraint name -> signed number, <= 0 is feasible. `memory` is always there.
    void:
        Reasons that make the measurement void; empty for a valid one.
    notes:
        Sentences that a reader of the numbers should know, such as percentiles that rest on few requests.
    """

    values: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    violations: Mapping[str, float]
    void: tuple[VoidReason, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def feasible(self) -> bool:
        """Whether every constraint holds."""
        return all(v <= 0 for v in self.violations.values())


def score(
    measurement: Measurement,
    *,
    expectations: Expectations,
    constraints: Sequence[Constraint] = (),
    limits: ValidityLimits | None = None,
    reference: Reference | None = None,
    slo: Mapping[str, float] | None = None,
    user_metrics: Mapping[str, UserMetric] | None = None,
    correct_speed: bool = False,
) -> Score:
    """Judge one measurement.

    An objective or a constrained metric that this run does not define makes it void, never 0; so does a metric of the
    user's own that fails or returns no finite number.

    Parameters
    ----------
    expectations:
        What the workload asked for, and the objectives (also corrected ones and the user's own).
    reference:
        Machine state of the reference; `None` for the reference itself.
    slo:
        Limits for goodput, such as `{"ttft_s": 2.0, "tpot_s": 0.08}`.
    user_metrics:
        Name -> callable. A name of ours is refused.
    correct_speed:
        Whether `NAME_corrected` twins are added; takes speed probes here and in the reference.

    Raises
    ------
    ValueError
        For a service level or the name of a user's metric that cannot be.
    """
    computed = compute_all(measurement, slo)
    values, intervals = dict(computed.values), dict(computed.intervals)
    probe = mean_probe(measurement)
    if probe is not None and reference is not None and reference.probe is not None:
        index = speed_index(probe, reference.probe)
        if correct_speed:
            values |= correct(values, index)
            intervals |= correct_intervals(intervals, index)
        values["speed_index"] = index
    own, failed = _user_values(measurement, user_metrics or {})
    values |= own
    wanted = dict.fromkeys((*expectations.objectives, *(c.metric for c in constraints)))
    return Score(
        values=values,
        intervals=intervals,
        violations={MEMORY: memory_violation(measurement)}
        | {str(c): c.violation(values[c.metric]) for c in constraints if c.metric in values},
        void=(
            *void_reasons(measurement, reference, expectations, limits),
            *failed,
            *(VoidReason("missing_metric", f"{n} is not defined for this run") for n in wanted if n not in values),
        ),
        notes=(*computed.notes, *_preemption_note(values)),
    )


def _user_values(
    measurement: Measurement, metrics: Mapping[str, UserMetric]
) -> tuple[dict[str, float], tuple[VoidReason, ...]]:
    values: dict[str, float] = {}
    failed = []
    for name, metric in metrics.items():
        if name in METRICS:
            raise ValueError(f"{name!r} is a metric of the tuner; give your own another name")
        try:
            value = float(metric(measurement))
        except Exception as error:  # noqa: BLE001  the user's code may raise anything: it voids the trial, with the cause
            failed.append(VoidReason("user_metric", f"{name} raised {type(error).__name__}: {error}"))
            continue
        if math.isfinite(value):
            values[name] = value
        else:
            failed.append(VoidReason("user_metric", f"{name} returned {value}, not a finite number"))
    return values, tuple(failed)


def _preemption_note(values: Mapping[str, float]) -> tuple[str, ...]:
    count = values.get("preemptions", 0.0)
    if not count:
        return ()
    return (f"{count:.0f} preemptions: the KV pool did not hold what ran at once, and work was done twice",)
