"""Rules 1 and 4: the token budget of a step, and small pieces of prompts."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.rules_of_thumb import a6000, cpu, published
from benchmarks.rules_of_thumb.a6000 import LOADS, MIXES, Mix
from benchmarks.rules_of_thumb.cpu import paired
from benchmarks.rules_of_thumb.model import Change, Direction, Finding, Outcome, Tried, crossing, ms, percent

BUDGETS = (512, 2048, 8192, 32_768)
TTFT, TPOT = "ttft_p95_s", "tpot_p95_s"
PUBLISHED_NOISE = 0.03
"""Assumed: a published figure says nothing of its spread."""
TPOT_IMPROVES, TTFT_LENGTHENS = "TPOT improves", "TTFT lengthens"
TTFT_FALLS = "TTFT falls"


def larger_budget() -> Finding:
    """Rule 1."""
    return Finding(
        number=1,
        rule="A larger `max_num_batched_tokens` improves TPOT and lengthens TTFT.",
        criterion=(
            "For each step to the next larger budget: p95 TPOT falls and p95 TTFT rises by more than the noise, in "
            "every draw."
        ),
        tried=(*(_twin_budgets(mix) for mix in MIXES), _cpu_budgets(), _published_budgets()),
        turns_on=(
            "the load, for TTFT: it lengthens at light loads on the twin, where prompts share a large step and all "
            "wait for its end, and shortens near saturation; TPOT improves in a few pairs of the saturated CPU engine, "
            "and never where TTFT lengthens"
        ),
        why=(
            "The budget is shared by prompt tokens and running requests. A larger one takes prompts in with fewer, "
            "longer steps: the queue moves on sooner, while requests that are writing wait through longer steps. "
            "That is the opposite of the rule, and what [vLLM's own page on "
            "optimisation](https://docs.vllm.ai/en/stable/configuration/optimization/) says. Beyond the prompts that "
            "are there to be taken in, a larger budget changes nothing."
        ),
    )


def judge_budget(situation: str, ttft: Change, tpot: Change, noise: float) -> tuple[Outcome, Outcome]:
    """Hold one step to a larger budget against rule 1."""
    return (
        Outcome(situation, TPOT_IMPROVES, tpot.direction(noise) is Direction.LOWER),
        Outcome(situation, TTFT_LENGTHENS, ttft.direction(noise) is Direction.HIGHER),
    )


def _twin_budgets(mix: Mix) -> Tried:
    rows: list[tuple[str, ...]] = []
    outcomes: list[Outcome] = []
    ratios: dict[tuple[int, int], list[tuple[Change, Change]]] = {}
    for load in LOADS:
        found = {budget: a6000.points(mix, load, max_num_batched_tokens=budget) for budget in BUDGETS}
        cells = [f"{ms(a6000.mean(p, TTFT))} / {ms(a6000.mean(p, TPOT))}" for p in found.values()]
        rows.append((f"{load:.0%}", *cells))
        for old, new in pairwise(BUDGETS):
            ttft, tpot = (a6000.change(found[old], found[new], name) for name in (TTFT, TPOT))
            ratios.setdefault((old, new), []).append((ttft, tpot))
            outcomes += judge_budget(f"{mix.name}, {load:.0%}, {old} → {new}", ttft, tpot, a6000.NOISE)
    return Tried(
        where=f"{a6000.WHERE}, {mix.name}",
        predicted=True,
        how=a6000.how([mix], "p95 TTFT / p95 TPOT, mean over the draws."),
        header=("load", *(f"budget {budget}" for budget in BUDGETS)),
        rows=tuple(rows),
        outcomes=tuple(outcomes),
        notes=tuple(_budget_note(old, new, changes) for (old, new), changes in ratios.items()),
    )


def _budget_note(old: int, new: int, changes: list[tuple[Change, Change]]) -> str:
    texts = []
    for name, index in (("TTFT", 0), ("TPOT", 1)):
        mids = [pair[index].mid for pair in changes]
        at = crossing(LOADS, mids, a6000.NOISE)
        where = "no change of sign" if at is None else f"changes sign at about {at:.0%} load"
        texts.append(
            f"p95 {name} {percent(mids[0])} at {LOADS[0]:.0%} load … {percent(mids[-1])} at {LOADS[-1]:.0%} ({where})"
        )
    return f"{old} → {new}: {'; '.join(texts)}."


def _cpu_budgets() -> Tried:
    found = [case for case in cpu.cases() if not case.settings["long_prefill"]]
    return paired(found, "tokens", "budget", judge_budget)


def _published_budgets() -> Tried:
    runs = published.budgets()
    outcomes = [
        outcome
        for a, b in pairwise(runs)
        for outcome in judge_budget(
            f"{a.budget} → {b.budget}",
            Change.of([a.ttft_s], [b.ttft_s]),
            Change.of([a.tpot_s], [b.tpot_s]),
            PUBLISHED_NOISE,
        )
    ]
    return Tried(
        where="published, A100",
        predicted=False,
        how=(
            "gpt-oss-20b on one A100-80GB, vLLM 0.11, 1,000 ShareGPT prompts sent at once, one run each; a change "
            f"within {PUBLISHED_NOISE:.0%} counts as none ({runs[0].source})."
        ),
        header=("budget", "TTFT mean", "TPOT mean", "TPOT p99"),
        rows=tuple((str(r.budget), ms(r.ttft_s), ms(r.tpot_s), ms(r.tpot_p99_s)) for r in runs),
        outcomes=tuple(outcomes),
    )


THRESHOLDS = (0, 2048, 512)
SMALL_BUDGETS = (8192, 2048, 512)


def small_chunks() -> Finding:
    """Rule 4."""
    return Finding(
        number=4,
        rule="Small chunks lower TTFT.",
        criterion=(
            "A smaller budget, or a smaller `long_prefill_token_threshold` (most tokens of one prompt in a step), "
            "lowers mean TTFT by more than the noise, in every draw; told apart for the shorter half of the prompts "
            "and for the longest."
        ),
        tried=(_twin_small_budgets(), _twin_thresholds(), _cpu_small(), _cpu_thresholds()),
        turns_on=(
            "which chunks and whose TTFT: the threshold helps short prompts behind long ones, at the cost of the "
            "long ones, and only where several requests may run at once; a smaller budget alone helped nobody on the "
            "twin, and on the CPU engine in a few steps down to 1024 or 512"
        ),
        why=(
            "A prompt's own first token hardly comes sooner in pieces: each piece reads the weights again. What can "
            "gain is a short prompt behind a long one, and only where the threshold keeps room in the step for it; a "
            "smaller budget alone gives the whole step to the prompt that came first."
        ),
    )


def judge_chunks(situation: str, ttft: Change, noise: float) -> Outcome:
    """Hold one step to smaller chunks against rule 4."""
    return Outcome(situation, TTFT_FALLS, ttft.direction(noise) is Direction.LOWER)


def _twin_small_budgets() -> Tried:
    return _twin_chunks(
        "budget",
        [({"max_num_batched_tokens": budget}, str(budget)) for budget in SMALL_BUDGETS],
        "Mean TTFT of the shorter half of the prompts / of the longest.",
    )


def _twin_thresholds() -> Tried:
    return _twin_chunks(
        "threshold",
        [
            ({"max_num_batched_tokens": 8192, "long_prefill_token_threshold": tokens}, str(tokens or "none"))
            for tokens in THRESHOLDS
        ],
        "Budget 8192 throughout. Mean TTFT of the shorter half of the prompts / of the longest.",
    )


def _twin_chunks(name: str, settings: list[tuple[dict[str, int], str]], what: str) -> Tried:
    mix = a6000.DOCUMENTS
    figures = {"short prompts": "ttft_short_s", "longest prompts": "ttft_long_s"}
    rows: list[tuple[str, ...]] = []
    outcomes: list[Outcome] = []
    mids: dict[tuple[str, str], list[float]] = {}
    for load in LOADS:
        found = [a6000.points(mix, load, **args) for args, _ in settings]
        rows.append((f"{load:.0%}", *(" / ".join(ms(a6000.mean(p, f)) for f in figures.values()) for p in found)))
        for new, (_, label) in list(zip(found, settings, strict=True))[1:]:
            for who, figure in figures.items():
                ttft = a6000.change(found[0], new, figure)
                mids.setdefault((label, who), []).append(ttft.mid)
                outcomes.append(judge_chunks(f"{load:.0%}, {name} {label}, {who}", ttft, a6000.NOISE))
    notes = []
    for (label, who), ratios in mids.items():
        at = crossing(LOADS, ratios, a6000.NOISE)
        where = "" if at is None else f", changes sign at about {at:.0%} load"
        span = f"{percent(ratios[0])} at {LOADS[0]:.0%} load … {percent(ratios[-1])} at {LOADS[-1]:.0%}"
        notes.append(f"{name} {label} against {settings[0][1]}, {who}: {span}{where}.")
    return Tried(
        where=f"{a6000.WHERE}, {mix.name}, {name}",
        predicted=True,
        how=a6000.how([mix], what),
        header=("load", *(f"{name} {label}" for _, label in settings)),
        rows=tuple(rows),
        outcomes=tuple(outcomes),
        notes=tuple(notes),
    )


def _cpu_small() -> Tried:
    found = [case for case in cpu.cases() if not case.settings["long_prefill"]]
    return _cpu_chunks(found, "tokens", "budget")


def _cpu_thresholds() -> Tried:
    return _cpu_chunks(list(cpu.cases()), "long_prefill", "threshold")


def _cpu_chunks(found: list[cpu.CpuCase], setting: str, name: str) -> Tried:
    """Make a table of pairs in which the second has smaller pieces; a threshold of 0 is none at all."""
    figures = ("ttft_short_s", "ttft_long_s")
    floor, floor_text = cpu.noise(found, "ttft_mean_s")
    rows: list[tuple[str, ...]] = []
    outcomes: list[Outcome] = []
    for a, b in cpu.pairs(found, setting):
        large, small = (a, b) if a.settings[setting] == 0 else (b, a)
        values = f"{large.settings[setting] or 'none'} → {small.settings[setting]}"
        cells = []
        for who, figure in zip(("short prompts", "longest prompts"), figures, strict=True):
            change = Change.of([large.seconds(figure)], [small.seconds(figure)])
            cells.append(f"{ms(large.seconds(figure))} → {ms(small.seconds(figure))} ({percent(change.mid)})")
            outcomes.append(judge_chunks(f"{cpu.label(large, setting)}, {values}, {who}", change, floor))
        rows.append((cpu.label(large, setting), values, *cells))
    return Tried(
        where=f"{cpu.WHERE}, {name}",
        predicted=False,
        how=(
            f"Measured, the quickstart's workload (saturated), one to four runs a configuration, pairs that differ in "
            f"nothing else; {cpu.speeds()}. Noise: {floor_text}."
        ),
        header=("configuration", name, "mean TTFT, short prompts", "mean TTFT, longest prompts"),
        rows=tuple(rows),
        outcomes=tuple(outcomes),
    )
