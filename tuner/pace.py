"""How long trials take, from those that were run: what says whether another one fits into the night.

A start is what differs most between trials of one study: a configuration that is compiled for the first time starts
slower than one that finds its compiled code in the cache, and one that runs eagerly compiles nothing.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tuner.ledger import History, TrialRecord

FIRST_GUESS_S = 600.0
"""Before anything was measured: ten minutes, what a trial of a 32B model takes with its start."""
TWIN_GUESS_S = 5.0
"""The twin plays 400 s of serving in about a second."""
MARGIN = 1.1
"""Trials of the same study differ; a tenth more than the slower half has covered most of them."""
BUILT_INTO = (
    "model", "dtype", "quantization", "kv_cache_dtype", "block_size", "max_model_len", "max_num_batched_tokens",
    "max_num_seqs", "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "compilation_config",
)  # fmt: skip
"""Arguments that are part of the name under which vLLM 0.32 keeps compiled code (`compute_hash` of its configurations).
Every environment variable of the study counts too: vLLM lists hundreds that do."""


class StartKind(StrEnum):
    """What a start had to build."""

    EAGER = "eager"
    COMPILED = "compiled"
    CACHED = "cached"


@dataclass(frozen=True, slots=True)
class Pace:
    """Expected seconds of trials.

    Parameters
    ----------
    trial_s:
        Of a configuration that was not measured yet, start and stop included.
    start_s:
        Of the starts that were seen, by kind: their median.
    """

    trial_s: float
    start_s: Mapping[StartKind, float] = field(default_factory=dict)

    @classmethod
    def of(cls, history: History, first_guess_s: float = FIRST_GUESS_S) -> Pace:
        """Estimate from finished trials: the upper quartile of those that an engine ran, and a margin.

        Repeated measurements find their code compiled and say nothing about a new configuration, unless there is
        nothing else.
        """
        starts = list(starts_of(history))
        by_kind = {kind: [t.engine.start_s for k, t in starts if k is kind and t.engine] for kind in StartKind}
        medians = {kind: statistics.median(seen) for kind, seen in by_kind.items() if seen}
        own = [t for _, t in starts if t.repeats is None] or [t for _, t in starts]
        return cls(MARGIN * _upper_quartile([t.engine_s for t in own]) if own else first_guess_s, medians)

    def again_s(self, record: TrialRecord) -> float:
        """Expected seconds of measuring a trial again: as long as it took, with the start that finds its code compiled.

        Failed and void tries before the one that counted are left out.
        """
        if record.engine is None or record.engine_s <= 0:
            return self.trial_s
        took_s = record.engine_s - sum(attempt.seconds for attempt in record.attempts)
        start_s = record.engine.start_s
        usual_s = self.start_s.get(StartKind.CACHED, start_s)
        return MARGIN * (max(took_s - start_s, 0.0) + min(start_s, max(usual_s, 0.0)))


def first_guess_s(backend: str) -> float:
    """Return the seconds of a trial before anything was measured, by the study's backend (`vllm` or `twin`)."""
    return TWIN_GUESS_S if backend == "twin" else FIRST_GUESS_S


def _upper_quartile(values: Sequence[float]) -> float:
    return values[0] if len(values) == 1 else statistics.quantiles(sorted(values), n=4, method="inclusive")[2]


def starts_of(history: History) -> Iterator[tuple[StartKind, TrialRecord]]:
    """Every trial whose workload an engine ran, in order, with what its start had to build."""
    built: set[str] = set()
    for trial in history.finished:
        if trial.engine is None or trial.engine_s <= 0:
            continue
        if trial.engine.effective_args.get("enforce_eager", trial.config.args.get("enforce_eager")):
            yield StartKind.EAGER, trial
            continue
        key = build_key(trial)
        yield StartKind.CACHED if key in built else StartKind.COMPILED, trial
        built.add(key)


def build_key(trial: TrialRecord) -> str:
    """Equal for configurations that share what is compiled at their start."""
    effective = trial.engine.effective_args if trial.engine is not None else {}
    args = {name: effective.get(name, trial.config.args.get(name)) for name in BUILT_INTO}
    return json.dumps([args, dict(trial.config.env)], sort_keys=True, default=str)


@dataclass(frozen=True, slots=True)
class Saving:
    """What the compile cache has saved: starts that found their code there, and seconds against compiling it."""

    cached: int
    compiled_s: float
    cached_s: float

    @property
    def saved_s(self) -> float:
        """Seconds over all cached starts; 0 where the cache was no help."""
        return max(0.0, self.cached * (self.compiled_s - self.cached_s))

    @property
    def sentence(self) -> str:
        """All of it in one sentence."""
        return (
            f"{self.cached} starts found their code compiled and took {self.cached_s:.0f} s instead of "
            f"{self.compiled_s:.0f} s: {self.saved_s:.0f} s saved"
        )


def saving(history: History) -> Saving | None:
    """Compare starts that compiled with those of code that was compiled before; `None` while one of both is unseen."""
    starts = [(kind, trial) for kind, trial in starts_of(history) if not trial.predicted]
    seen = {kind: [t.engine.start_s for k, t in starts if k is kind and t.engine] for kind in StartKind}
    compiled, cached = seen[StartKind.COMPILED], seen[StartKind.CACHED]
    if not compiled or not cached:
        return None
    return Saving(len(cached), statistics.median(compiled), statistics.median(cached))
