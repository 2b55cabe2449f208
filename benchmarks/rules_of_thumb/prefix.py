"""Rule 5: a prefix that many requests share."""

from __future__ import annotations

from benchmarks.rules_of_thumb import a6000, cpu
from benchmarks.rules_of_thumb.a6000 import point
from benchmarks.rules_of_thumb.model import Finding, Outcome, Tried, ms, reaching
from benchmarks.rules_of_thumb.record import (
    ANSWER_TOKENS,
    GAP_S,
    PREFIX_TOKENS,
    QUESTION_TOKENS,
    SHARERS,
    recorded,
    shared_prefix,
)

SAID_GAIN = 0.90
TOLERANCE = 0.05
GAINS = "TTFT gains 90%"
QUESTIONS = (16, 64, 128, 256, 512, 1024)
TWIN_OUTPUT_TOKENS = 64
PACES = {"all at once": 0.0, "0.1 s apart": 0.1, "2 s apart": 2.0}
"""On the twin: a burst, a rate that keeps several requests running, and requests that meet no other."""
CACHES = {"block128": "blocks of 128 (the default there)", "block32": "blocks of 32"}


def shared_prefixes() -> Finding:
    """Rule 5."""
    return Finding(
        number=5,
        rule="100 requests that share a prefix of 500 tokens gain 90% of TTFT by prefix caching.",
        criterion=(
            f"Mean TTFT with the cache is at most {1 - SAID_GAIN + TOLERANCE:.0%} of that without (a gain of 90%, less "
            f"{TOLERANCE * 100:.0f} points for noise)."
        ),
        tried=(_twin(), _cpu()),
        turns_on="the tokens after the prefix, the block size, and whether requests queue",
        why=(
            "The cache saves the prefix's share of the prompt, in whole blocks, and nothing of the step's fixed cost "
            "or of reading the weights: a request that is alone cannot gain more than that share. A queue multiplies "
            "it, since every request in front is shorter too. Of requests that come together, those of the first "
            "step find nothing cached."
        ),
    )


def judge_gain(situation: str, off_s: float, on_s: float) -> Outcome:
    """Hold TTFT without and with the cache against rule 5."""
    return Outcome(situation, GAINS, gain(off_s, on_s) >= SAID_GAIN - TOLERANCE)


def gain(off_s: float, on_s: float) -> float:
    """Share of TTFT that the cache saves."""
    return 1 - on_s / off_s


def _twin() -> Tried:
    rows: list[tuple[str, ...]] = []
    outcomes: list[Outcome] = []
    notes: list[str] = []
    for pace, gap_s in PACES.items():
        gains = []
        for question in QUESTIONS:
            workload = shared_prefix(SHARERS, PREFIX_TOKENS, question, TWIN_OUTPUT_TOKENS, gap_s)
            off, on = (
                a6000.succeeded(a6000.play(workload, enable_prefix_caching=caching)).ttft_mean_s
                for caching in (False, True)
            )
            gains.append(gain(off, on))
            outcomes.append(judge_gain(f"{pace}, {question} tokens after the prefix", off, on))
            share = PREFIX_TOKENS / (PREFIX_TOKENS + question)
            rows.append((pace, str(question), ms(off), ms(on), f"{gains[-1]:.0%}", f"{share:.0%}"))
        notes.append(_reach_note(pace, gains))
    return Tried(
        where=a6000.WHERE,
        predicted=True,
        how=(
            f"Predicted, one run each: {SHARERS} requests, a prefix of {PREFIX_TOKENS} tokens, {TWIN_OUTPUT_TOKENS} "
            "output tokens, equal gaps, the cache empty at first; blocks of 16, else vLLM's defaults."
        ),
        header=("requests", "tokens after the prefix", "TTFT, cache off", "TTFT, cache on", "gain", "prefix's share"),
        rows=tuple(rows),
        outcomes=tuple(outcomes),
        notes=tuple(notes),
    )


def _reach_note(pace: str, gains: list[float]) -> str:
    level = SAID_GAIN - TOLERANCE
    at = reaching(QUESTIONS, gains, level)
    if at is not None:
        return f"{pace}: the gain falls below {level:.0%} at about {at:.0f} tokens after the prefix."
    best = max(gains)
    return f"{pace}: the gain is {'never below' if min(gains) >= level else 'nowhere'} {level:.0%} (best {best:.0%})."


def _cpu() -> Tried:
    rows: list[tuple[str, ...]] = []
    outcomes: list[Outcome] = []
    for pace, words in (("at_once", "all at once"), ("apart", f"{GAP_S} s apart")):
        off = recorded("prefix-off", pace)
        for name, cache in CACHES.items():
            on = recorded(f"prefix-{name}", pace)
            if off is None or on is None:
                continue
            off_s, on_s = point(off).ttft_mean_s, point(on).ttft_mean_s
            hits = sum(step.prefix_hits for step in on.steps) / SHARERS
            rows.append((words, cache, ms(off_s), ms(on_s), f"{gain(off_s, on_s):.0%}", f"{hits:.0f}"))
            outcomes.append(judge_gain(f"{words}, {cache}", off_s, on_s))
    share = PREFIX_TOKENS / (PREFIX_TOKENS + QUESTION_TOKENS)
    return Tried(
        where=cpu.WHERE,
        predicted=False,
        how=(
            f"Measured, one run each, SmolLM2-135M: {SHARERS} requests, {QUESTION_TOKENS} tokens after the prefix (its "
            f"share is {share:.0%}), {ANSWER_TOKENS} output tokens, `max_num_seqs` 32, budget 2048. Not repeated; the "
            "differences are many times the 4 to 10% by which repeated measurements differ here."
        ),
        header=("requests", "cache", "TTFT, cache off", "TTFT, cache on", "gain", "cached tokens a request"),
        rows=tuple(rows),
        outcomes=tuple(outcomes),
    )
