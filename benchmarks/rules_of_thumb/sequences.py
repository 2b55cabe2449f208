"""Rules 2 and 3: how many requests run at once, and how long their context is."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.rules_of_thumb import a6000, cpu
from benchmarks.rules_of_thumb.a6000 import MIXES, Mix, Point
from benchmarks.rules_of_thumb.cpu import paired
from benchmarks.rules_of_thumb.model import Change, Direction, Finding, Outcome, Tried, ms, percent, reaching, within
from tuner.workload.model import Request, Workload

TTFT, TPOT = "ttft_mean_s", "tpot_mean_s"
COMBINED = ((32, 16), (24, 24), (16, 32))
"""`max_num_seqs` and block size, as the rule pairs them …"""
SAID_TTFT_S, SAID_TPOT_S = (1.243, 0.945, 0.876), (0.089, 0.098, 0.112)
"""… and what it says of each."""
ONLY_BLOCKS = (32, 32)
SOME_LOADS = (0.5, 1.0, 1.3)
TTFT_FALLS, TPOT_RISES = "TTFT falls", "TPOT rises"
NEAR = 0.25
"""A figure of a guide that names neither workload nor load counts as met within a quarter."""


def fewer_sequences() -> Finding:
    """Rule 2."""
    return Finding(
        number=2,
        rule=(
            "`max_num_seqs` 32/24/16 with block size 16/24/32 gives TTFT 1243/945/876 ms and TPOT 89/98/112 ms: fewer "
            "sequences and larger blocks lower TTFT and raise TPOT."
        ),
        criterion=(
            "Mean TTFT falls and mean TPOT rises by more than the noise in every draw, from the first combination to "
            "the last (twin), or between neighbours in `max_num_seqs` or block size (CPU engine, p95)."
        ),
        tried=(*(_twin(mix) for mix in MIXES), _cpu_sequences(), _cpu_blocks()),
        turns_on=(
            "nothing that gives both: TTFT falls mostly where prompts come in limited pieces or the KV pool is full, "
            "TPOT rises mostly where the pool is full; elsewhere, where the limit matters at all, it works the other "
            "way round"
        ),
        why=(
            "A request beyond `max_num_seqs` waits in the queue until another has ended, and that wait is TTFT; those "
            "inside share each step with fewer others, which is TPOT. A smaller limit therefore trades the other way "
            "round: longer TTFT, shorter TPOT, and changes nothing while fewer requests than the limit are there. The "
            "block size only decides how finely the pool is divided and a prefix is cached."
        ),
    )


def judge_fewer(situation: str, ttft: Change, tpot: Change, noise: float) -> tuple[Outcome, Outcome]:
    """Hold a step to fewer sequences or larger blocks against rule 2."""
    return (
        Outcome(situation, TTFT_FALLS, ttft.direction(noise) is Direction.LOWER),
        Outcome(situation, TPOT_RISES, tpot.direction(noise) is Direction.HIGHER),
    )


def _twin(mix: Mix) -> Tried:
    rows: list[tuple[str, ...]] = []
    outcomes: list[Outcome] = []
    notes: list[str] = []
    for load in SOME_LOADS:
        found = {
            pair: a6000.points(mix, load, max_num_seqs=pair[0], block_size=pair[1]) for pair in (*COMBINED, ONLY_BLOCKS)
        }
        ttft, tpot = (a6000.change(found[COMBINED[0]], found[COMBINED[-1]], f) for f in (TTFT, TPOT))
        rows.append(
            (
                f"{load:.0%}",
                *(f"{ms(a6000.mean(p, TTFT))} / {ms(a6000.mean(p, TPOT))}" for p in found.values()),
                f"{percent(ttft.mid)} / {percent(tpot.mid)}",
            )
        )
        outcomes += judge_fewer(f"{mix.name}, {load:.0%}", ttft, tpot, a6000.NOISE)
        blocks = [a6000.change(found[COMBINED[0]], found[ONLY_BLOCKS], f).mid for f in (TTFT, TPOT)]
        notes.append(
            f"{load:.0%} load: blocks of {ONLY_BLOCKS[1]} instead of {COMBINED[0][1]} alone change TTFT by "
            f"{percent(blocks[0])} and TPOT by {percent(blocks[1])}; "
            f"{_figures_met([found[pair] for pair in COMBINED])} of the rule's six figures are met within a quarter."
        )
    return Tried(
        where=f"{a6000.WHERE}, {mix.name}",
        predicted=True,
        how=a6000.how([mix], "Mean TTFT / mean TPOT, mean over the draws."),
        header=(
            "load",
            *(f"seqs {seqs}, block {block}" for seqs, block in (*COMBINED, ONLY_BLOCKS)),
            "first to third",
        ),
        rows=tuple(rows),
        outcomes=tuple(outcomes),
        notes=tuple(notes),
    )


def _figures_met(found: list[tuple[Point, ...]]) -> int:
    ttft = sum(within(a6000.mean(p, TTFT), said, NEAR) for p, said in zip(found, SAID_TTFT_S, strict=True))
    return ttft + sum(within(a6000.mean(p, TPOT), said, NEAR) for p, said in zip(found, SAID_TPOT_S, strict=True))


def _cpu_sequences() -> Tried:
    def judge(situation: str, ttft: Change, tpot: Change, noise: float) -> tuple[Outcome, Outcome]:
        """Turn a pair round, since pairs come with the smaller limit first."""
        return judge_fewer(situation, ttft.reversed(), tpot.reversed(), noise)

    return paired(cpu.cases(), "seqs", "max_num_seqs", judge, f"{cpu.WHERE}, max_num_seqs")


def _cpu_blocks() -> Tried:
    return paired(cpu.cases(), "block", "block size", judge_fewer, f"{cpu.WHERE}, block size")


SAID_FROM_TTFT_S, SAID_TO_TTFT_S = 2.7, 8.9
SAID_FROM_TPOT_S, SAID_TO_TPOT_S = 0.058, 0.112
LONG_OUTPUT_TOKENS = 256
LONGEST = 65_536
PROMPTS = tuple(length - LONG_OUTPUT_TOKENS for length in (8192, 16_384, 32_768, LONGEST))
USERS = (1, 2, 4, 8)
TURNS = 3
LIMITS = (33_792, LONGEST, 131_072)
TTFT_GROWS, TPOT_GROWS = "TTFT grows to 3.3 times", "TPOT grows to 1.9 times"


def longer_context() -> Finding:
    """Rule 3."""
    return Finding(
        number=3,
        rule="When the context grows to 65536, TTFT goes from 2.7 to 8.9 s and TPOT from 58 to 112 ms.",
        criterion=(
            f"Mean TTFT grows {SAID_TO_TTFT_S / SAID_FROM_TTFT_S:.1f} times and mean TPOT "
            f"{SAID_TO_TPOT_S / SAID_FROM_TPOT_S:.1f} times, each give or take a quarter (the guide does not say from "
            "which context, nor how many requests run)."
        ),
        tried=(_twin_argument(), _twin_prompts()),
        turns_on="the length of the prompts that really come, the context one starts from, and how many run at once",
        why=(
            "`max_model_len` is a limit and costs nothing by itself. What costs is prompts that use it: TTFT grows "
            "with the prompt, a little faster than in proportion for its attention; TPOT grows with the contexts "
            "that each step reads, and much more with other users' prompts in the same steps. The CPU engine was not "
            "tried: its model's context ends at 8,192."
        ),
    )


def judge_growth(situation: str, ttft: float, tpot: float) -> tuple[Outcome, Outcome]:
    """Hold growth factors of TTFT and TPOT against rule 3."""
    return (
        Outcome(situation, TTFT_GROWS, within(ttft, SAID_TO_TTFT_S / SAID_FROM_TTFT_S, NEAR)),
        Outcome(situation, TPOT_GROWS, within(tpot, SAID_TO_TPOT_S / SAID_FROM_TPOT_S, NEAR)),
    )


def _twin_argument() -> Tried:
    load, mix = 0.8, a6000.DOCUMENTS
    found = {limit: a6000.points(mix, load, max_model_len=limit) for limit in LIMITS}
    outcomes: list[Outcome] = []
    for limit in LIMITS[1:]:
        growth = (a6000.change(found[LIMITS[0]], found[limit], figure).mid for figure in (TTFT, TPOT))
        outcomes += judge_growth(f"same prompts, max_model_len {limit}", *growth)
    return Tried(
        where=f"{a6000.WHERE}, the argument alone",
        predicted=True,
        how=a6000.how([mix], f"{load:.0%} load; only `max_model_len` differs."),
        header=("max_model_len", "TTFT mean", "TPOT mean"),
        rows=tuple((str(limit), ms(a6000.mean(p, TTFT)), ms(a6000.mean(p, TPOT))) for limit, p in found.items()),
        outcomes=tuple(outcomes),
    )


def closed_loop(users: int, prompt_tokens: int) -> Workload:
    """Return what so many users ask one after the other, each waiting for the answer; all begin together."""
    made = tuple(
        Request(0.0, (a6000.VOCABULARY[0] + turn * users + user,) * prompt_tokens, LONG_OUTPUT_TOKENS, user=user)
        for turn in range(TURNS)
        for user in range(users)
    )
    return Workload("closed loop", made, a6000.VOCABULARY, 0)


def _twin_prompts() -> Tried:
    rows: list[tuple[str, ...]] = []
    outcomes: list[Outcome] = []
    notes: list[str] = []
    for users in USERS:
        played = [a6000.play(closed_loop(users, prompt), max_model_len=LONGEST) for prompt in PROMPTS]
        found = [a6000.succeeded(outcome) for outcome in played]
        rows.append((str(users), *(f"{ms(p.ttft_mean_s)} / {ms(p.tpot_mean_s)}" for p in found)))
        for prompt, point in list(zip(PROMPTS, found, strict=True))[:-1]:
            growth = found[-1].ttft_mean_s / point.ttft_mean_s, found[-1].tpot_mean_s / point.tpot_mean_s
            outcomes += judge_growth(f"{users} users, prompts {prompt} → {PROMPTS[-1]}", *growth)
        doubled = [b.ttft_mean_s / a.ttft_mean_s for a, b in pairwise(found)]
        notes.append(
            f"{users} user{'s' if users > 1 else ''}: each doubling of the prompt makes TTFT "
            f"{' then '.join(f'{r:.1f}' for r in doubled)} times as long; TPOT grows "
            f"{found[-1].tpot_mean_s / found[0].tpot_mean_s:.1f} times in all. "
            f"{_where_said([p.ttft_mean_s for p in found])}"
        )
    return Tried(
        where=f"{a6000.WHERE}, prompts that grow",
        predicted=True,
        how=(
            f"Predicted, one run each: users who each ask {TURNS} times and wait for the answer of "
            f"{LONG_OUTPUT_TOKENS} tokens; `max_model_len` {LONGEST}, else vLLM's defaults. Mean TTFT / mean TPOT."
        ),
        header=("users", *(f"prompts of {prompt}" for prompt in PROMPTS)),
        rows=tuple(rows),
        outcomes=tuple(outcomes),
        notes=tuple(notes),
    )


def _where_said(ttft_s: list[float]) -> str:
    """Say which prompts have the rule's TTFTs."""
    at = [reaching(PROMPTS, ttft_s, said) for said in (SAID_FROM_TTFT_S, SAID_TO_TTFT_S)]
    texts = [f"fewer than {PROMPTS[0]}" if tokens is None else f"about {tokens:.0f}" for tokens in at]
    return f"TTFT is {SAID_FROM_TTFT_S} s at {texts[0]} tokens, {SAID_TO_TTFT_S} s at {texts[1]}."
