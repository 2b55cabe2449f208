"""How long a study will take, before its first trial: start-up, warm-up, workload, probe and stop, times the budget."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tuner.ledger import History
from tuner.pace import Pace
from tuner.spec import StudySpec


@dataclass(frozen=True, slots=True)
class Assumed:
    """A figure that nobody can know before a start, and its ends: in seconds, that of the shorter time first."""

    value: float
    low: float
    high: float

    def __add__(self, other: Assumed) -> Assumed:
        return Assumed(self.value + other.value, self.low + other.low, self.high + other.high)


# Sources. Processes and stop: our own starts of vLLM 0.32 on two cores, 2026-11 (17-30 s and 3-5 s). The rest from
# start-up logs that users published on GitHub: vllm 44881 (22 GiB of weights in 18 s, compiling 43 s the first time and
# 5 s from its cache), vllm 38820 and 44106 (0.3 and 2 GiB/s), vllm 20264 (capturing 17 s, 8 s from the compile cache,
# 24 s outside the engine core), runai-model-streamer 67 (compiling 46 s, capturing 37 s, all of it 91 s). What is
# compiled depends on max_num_batched_tokens, so that a new configuration mostly compiles anew.
PROCESSES = Assumed(25, 17, 40)
READ_GIB_PER_S = Assumed(1.2, 4.0, 0.3)
PROFILE = Assumed(8, 4, 20)
COMPILE_AND_CAPTURE = Assumed(70, 25, 95)
CPU_COMPILE = Assumed(60, 30, 120)
STOP = Assumed(5, 3, 12)

WARMUP_PROBES = 3
"""Warm-up ends when two probes in a row agree: two at least, one more where the first was cold."""


@dataclass(frozen=True, slots=True)
class TrialTime:
    """Predicted seconds of one trial.

    Parameters
    ----------
    workload_s:
        All repeats; the middle of what was predicted for the space, and its quartiles.
    basis:
        Where the figures come from, in words.
    """

    start_s: Assumed
    warmup_s: float
    workload_s: Assumed
    probe_s: float
    stop_s: Assumed
    basis: str

    @property
    def total_s(self) -> Assumed:
        """All of it."""
        fixed = self.warmup_s + self.probe_s
        return self.start_s + self.workload_s + self.stop_s + Assumed(fixed, fixed, fixed)

    def document(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        total = self.total_s
        return {
            "trial_s": round(total.value, 1),
            "trial_s_interval": [round(total.low, 1), round(total.high, 1)],
            "start_s": round(self.start_s.value, 1),
            "warmup_s": round(self.warmup_s, 1),
            "workload_s": round(self.workload_s.value, 1),
            "probe_s": round(self.probe_s, 1),
            "stop_s": round(self.stop_s.value, 1),
            "basis": self.basis,
        }


@dataclass(frozen=True, slots=True)
class Hours:
    """What a study's budget comes to.

    Parameters
    ----------
    candidates:
        Configurations that will be measured.
    repeats:
        Further measurements of the reference, for noise and drift, which take time and no budget.
    ended_by:
        `trials` or `hours`: what ends the study.
    """

    trial: TrialTime
    candidates: int
    repeats: int
    hours: float
    hours_interval: tuple[float, float]
    ended_by: str

    def document(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        return {
            "hours": round(self.hours, 2),
            "hours_interval": [round(end, 2) for end in self.hours_interval],
            "candidates": self.candidates,
            "reference_repeats": self.repeats,
            "ended_by": self.ended_by,
            **self.trial.document(),
        }


def start_time(*, weights_gib: float, on_cpu: bool, eager: bool) -> Assumed:
    """Seconds from the call to a ready engine.

    Parameters
    ----------
    weights_gib:
        All that is read from disk, over all devices.
    """
    rate = READ_GIB_PER_S
    read = Assumed(weights_gib / rate.value, weights_gib / rate.low, weights_gib / rate.high)
    compiling = Assumed(0, 0, 0) if eager else CPU_COMPILE if on_cpu else COMPILE_AND_CAPTURE
    return PROCESSES + read + PROFILE + compiling


def spread(seconds: Sequence[float]) -> Assumed:
    """Middle and quartiles of predicted times."""
    if len(seconds) < 2:
        value = seconds[0] if seconds else 0.0
        return Assumed(value, value, value)
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Assumed(middle, low, high)


def measured_time(history: History) -> TrialTime | None:
    """Return what trials of this study took so far, which is better than any assumption; `None` before the first."""
    seen = [t.engine_s for t in history.finished if t.engine is not None and not t.predicted]
    if not seen:
        return None
    nothing = Assumed(0, 0, 0)
    whole = Assumed(Pace.of(history).trial_s, min(seen), max(seen))
    return TrialTime(nothing, 0.0, whole, 0.0, nothing, f"measured in {len(seen)} trials of this study")


def hours(spec: StudySpec, trial: TrialTime) -> Hours:
    """Fit a study's budget to the time that a trial takes; as many engines as fit on a cluster are taken for one."""
    total = trial.total_s
    engines = 1 if spec.resources.engines == "all" else spec.resources.engines
    wanted = spec.budget.trials
    candidates = wanted if wanted is not None else 10**6
    ended_by = "trials"
    if spec.budget.hours is not None:
        runs = engines * int(spec.budget.hours * 3600 / max(total.value, 1e-9))
        fitting = _candidates_in(runs, spec, candidates)
        if fitting < candidates:
            candidates, ended_by = fitting, "hours"
    repeats = _repeats(candidates, spec)
    turns = math.ceil((candidates + repeats) / engines)
    low, high = (turns * seconds / 3600 for seconds in (total.low, total.high))
    if ended_by == "hours" and spec.budget.hours is not None:
        low, high = min(low, spec.budget.hours), min(high, spec.budget.hours)
    return Hours(trial, candidates, repeats, turns * total.value / 3600, (low, high), ended_by)


def _repeats(candidates: int, spec: StudySpec) -> int:
    """How often the reference is measured again beside so many candidates."""
    noise = spec.noise
    if candidates < 1:
        return 0
    return noise.aa_runs + ((candidates - 1) // noise.sentinel_every if noise.sentinel_every else 0)


def _candidates_in(runs: int, spec: StudySpec, most: int) -> int:
    """Return how many candidates, at most so many, leave room for their repeats of the reference in so many runs."""
    candidates = min(runs, most)
    while candidates > 1 and candidates + _repeats(candidates, spec) > runs:
        candidates -= 1
    return candidates
