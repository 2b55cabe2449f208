"""Latencies of single requests, and of all requests as columns.

Definitions: time to first token (TTFT) and end-to-end latency (E2EL) run from the *scheduled* arrival, so that a wait
in the client counts; time per output token (TPOT) is (last - first token) / (output tokens - 1); inter-token
latencies (ITL) are the gaps between tokens. What is undefined for a request is `None` (NaN in a column), never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from objectives.intervals import FloatArray, IntArray
from objectives.measurement import RequestRecord

_NOT_SERVED = frozenset({"abort", "error"})
"""Finish reasons of vLLM for a request that was ended before its tokens were complete."""


def is_served(record: RequestRecord) -> bool:
    """Whether the request was answered to its end. One that was not adds to no metric: it is lost, not slow."""
    return (
        record.error is None
        and record.finish_reason not in _NOT_SERVED
        and record.output_tokens > 0
        and record.first_token_s is not None
        and record.last_token_s is not None
    )


def ttft_s(record: RequestRecord) -> float | None:
    """Time from the scheduled arrival to the first output token, in seconds."""
    return None if record.first_token_s is None else record.first_token_s - record.scheduled_s


def ttft_sent_s(record: RequestRecord) -> float | None:
    """Time from the moment of sending to the first output token, in seconds: TTFT without the wait in the client."""
    return None if record.first_token_s is None else record.first_token_s - record.sent_s


def ttft_per_1k_prompt_s(record: RequestRecord) -> float | None:
    """TTFT in seconds per 1,000 prompt tokens."""
    ttft = ttft_s(record)
    return None if ttft is None or record.prompt_tokens < 1 else ttft * 1000.0 / record.prompt_tokens


def tpot_s(record: RequestRecord) -> float | None:
    """Mean time of an output token after the first, in seconds; undefined for fewer than two tokens."""
    if record.first_token_s is None or record.last_token_s is None or record.output_tokens < 2:
        return None
    return (record.last_token_s - record.first_token_s) / (record.output_tokens - 1)


def e2el_s(record: RequestRecord) -> float | None:
    """Time from the scheduled arrival to the last output token, in seconds."""
    return None if record.last_token_s is None else record.last_token_s - record.scheduled_s


def queue_s(record: RequestRecord) -> float | None:
    """Time in the engine's queue, by the engine's own stamps, in seconds."""
    if record.queued_s is None or record.first_scheduled_s is None:
        return None
    return record.first_scheduled_s - record.queued_s


def itl_gaps_s(record: RequestRecord) -> FloatArray:
    """Gaps between consecutive tokens in seconds, shape (tokens - 1,).

    k tokens that arrived together are k tokens: k - 1 gaps of 0. The gaps sum to last - first token, in whatever
    order the arrivals were noted down.
    """
    return np.diff(np.sort(np.asarray(record.token_times_s, dtype=np.float64)))


@dataclass(frozen=True, slots=True)
class Latencies:
    """The latencies of all served requests, a row a request: arrays of shape (n,), NaN where undefined.

    Rows are ordered by repeat, scheduled arrival and id, so that nothing depends on the order of completion. `gaps_s`
    and `gap_owners` have shape (m,): every gap between tokens and the row it belongs to.
    """

    repeats: IntArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    ttft_s: FloatArray
    ttft_sent_s: FloatArray
    ttft_per_1k_prompt_s: FloatArray
    tpot_s: FloatArray
    e2el_s: FloatArray
    queue_s: FloatArray
    gaps_s: FloatArray
    gap_owners: IntArray

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> Latencies:
        """Columns of those records that were served."""
        served = sorted(filter(is_served, records), key=lambda r: (r.repeat, r.scheduled_s, r.request_id))
        gaps = [itl_gaps_s(r) for r in served]
        return cls(
            repeats=np.array([r.repeat for r in served], dtype=np.int64),
            prompt_tokens=np.array([r.prompt_tokens for r in served], dtype=np.int64),
            output_tokens=np.array([r.output_tokens for r in served], dtype=np.int64),
            ttft_s=_column(served, ttft_s),
            ttft_sent_s=_column(served, ttft_sent_s),
            ttft_per_1k_prompt_s=_column(served, ttft_per_1k_prompt_s),
            tpot_s=_column(served, tpot_s),
            e2el_s=_column(served, e2el_s),
            queue_s=_column(served, queue_s),
            gaps_s=np.concatenate([np.empty(0), *gaps]),
            gap_owners=np.repeat(np.arange(len(served)), [g.size for g in gaps]),
        )

    def of_prompts(self, low: int, high: int) -> Latencies:
        """Select the rows whose prompts have `low` to `high` tokens, both included."""
        rows = (self.prompt_tokens >= low) & (self.prompt_tokens <= high)
        gaps = rows[self.gap_owners]
        return Latencies(
            repeats=self.repeats[rows],
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            ttft_s=self.ttft_s[rows],
            ttft_sent_s=self.ttft_sent_s[rows],
            ttft_per_1k_prompt_s=self.ttft_per_1k_prompt_s[rows],
            tpot_s=self.tpot_s[rows],
            e2el_s=self.e2el_s[rows],
            queue_s=self.queue_s[rows],
            gaps_s=self.gaps_s[gaps],
            gap_owners=(np.cumsum(rows) - 1)[self.gap_owners[gaps]],
        )


def _column(records: list[RequestRecord], of: Callable[[RequestRecord], float | None]) -> FloatArray:
    values = [of(r) for r in records]
    return np.array([np.nan if v is None else v for v in values], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Requests whose prompts have `low` to `high` tokens; `label` is what follows the `@` in a metric's name."""

    low: int
    high: int

    @property
    def label(self) -> str:
        """`2048` for one exact length, `1025-2048` for a range."""
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


MOST_EXACT_LENGTHS = 12


def prompt_groups(prompt_tokens: IntArray) -> tuple[PromptGroup, ...]:
    """Group requests by prompt length: each exact length, or doubling ranges when there are more than 12 lengths.

    A range ends at a power of two and begins after the one below: 1025-2048.
    """
    lengths = np.unique(prompt_tokens)
    if lengths.size <= MOST_EXACT_LENGTHS:
        return tuple(PromptGroup(int(n), int(n)) for n in lengths)
    exponents = sorted({(int(n) - 1).bit_length() for n in lengths if n > 0})
    return tuple(PromptGroup(2 ** (e - 1) + 1 if e else 1, 2**e) for e in exponents)
