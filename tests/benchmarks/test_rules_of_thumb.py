"""Verdicts on made-up figures, and that the page has every rule. No engine and no twin."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import rules
from benchmarks.rules_of_thumb import batching, cpu, graphs, memory, page, prefix, published, sequences
from benchmarks.rules_of_thumb.a6000 import Point
from benchmarks.rules_of_thumb.cpu import CpuCase
from benchmarks.rules_of_thumb.model import (
    Change,
    Direction,
    Finding,
    Outcome,
    Tried,
    Verdict,
    crossing,
    ms,
    percent,
    reaching,
    verdict,
)

PAGE = Path(__file__).parents[2] / "docs" / "rules-of-thumb.md"
POSITIVE = st.floats(1e-3, 1e3)


def change(*ratios: float) -> Change:
    return Change.of([1.0] * len(ratios), ratios)


def said(*as_said: bool, part: str = "x") -> list[Outcome]:
    return [Outcome(str(i), part, yes) for i, yes in enumerate(as_said)]


# Figures to verdicts ------------------------------------------------------------------------------------------------


def test_a_rule_holds_everywhere_nowhere_or_depends() -> None:
    assert verdict(said(True, True)) is Verdict.HOLDS
    assert verdict(said(False, False)) is Verdict.FAILS
    assert verdict(said(True, False)) is Verdict.DEPENDS
    assert verdict([]) is Verdict.UNTRIED


def test_a_situation_speaks_for_a_rule_only_when_all_of_its_parts_do() -> None:
    halves = [Outcome("light", "TTFT", True), Outcome("light", "TPOT", False)]

    assert verdict(halves) is Verdict.FAILS
    assert verdict([*halves, Outcome("heavy", "TTFT", True), Outcome("heavy", "TPOT", True)]) is Verdict.DEPENDS


def test_a_direction_needs_every_run_beyond_the_noise() -> None:
    assert change(0.8, 0.9).direction(0.05) is Direction.LOWER
    assert change(1.1, 1.3).direction(0.05) is Direction.HIGHER
    assert change(0.97, 1.02).direction(0.05) is Direction.SAME
    assert change(0.8, 0.97).direction(0.05) is Direction.UNCLEAR
    assert change(0.8, 1.2).direction(0.05) is Direction.UNCLEAR


@given(st.lists(POSITIVE, min_size=1, max_size=5), st.floats(0, 0.5))
def test_turning_a_change_round_turns_its_ends_round(ratios: list[float], noise: float) -> None:
    there = change(*ratios)
    back = there.reversed()

    assert back.low <= back.mid * (1 + 1e-9)
    assert back.mid <= back.high * (1 + 1e-9)
    assert math.isclose(back.reversed().mid, there.mid)
    if there.direction(noise) is Direction.HIGHER:
        assert back.direction(0.0) is Direction.LOWER


def test_a_change_needs_pairs_of_positive_figures() -> None:
    with pytest.raises(ValueError, match="positive"):
        Change.of([1.0, 0.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="positive"):
        Change.of([], [])


def test_the_crossing_of_a_ratio_lies_between_the_loads_where_it_turns() -> None:
    assert crossing((0.2, 0.6, 1.0), (0.5, 2.0, 3.0)) == pytest.approx(0.4)
    assert crossing((0.2, 0.6), (1.1, 1.2)) is None
    assert crossing((0.2, 0.6, 1.0), (1.1, 0.99, 1.1), noise=0.02) is None
    assert crossing((0.2, 0.6, 1.0), (1.1, 1.0, 1 / 1.1)) == pytest.approx(0.6)


@given(st.floats(0.0, 1.0))
def test_where_a_level_is_reached_the_line_has_that_value(level: float) -> None:
    at = reaching((0.0, 10.0), (0.0, 1.0), level)

    assert at == pytest.approx(10 * level)
    assert reaching((0.0, 10.0), (2.0, 3.0), level) is None


def test_a_larger_budget_as_the_rule_has_it_and_as_vllm_has_it() -> None:
    as_ruled = batching.judge_budget("a", ttft=change(1.2), tpot=change(0.8), noise=0.02)
    as_known = batching.judge_budget("b", ttft=change(0.8), tpot=change(1.2), noise=0.02)

    assert verdict(as_ruled) is Verdict.HOLDS
    assert verdict(as_known) is Verdict.FAILS
    assert verdict([*as_ruled, *as_known]) is Verdict.DEPENDS


def test_fewer_sequences_are_judged_by_both_times() -> None:
    assert verdict(sequences.judge_fewer("a", change(0.7), change(1.26), 0.02)) is Verdict.HOLDS
    assert verdict(sequences.judge_fewer("a", change(3.0), change(0.8), 0.02)) is Verdict.FAILS
    assert verdict(sequences.judge_fewer("a", change(1.0), change(1.0), 0.02)) is Verdict.FAILS


def test_growth_with_the_context_is_held_against_the_factors_of_the_rule() -> None:
    assert verdict(sequences.judge_growth("a", 3.3, 1.9)) is Verdict.HOLDS
    assert verdict(sequences.judge_growth("a", 9.0, 1.0)) is Verdict.FAILS


def test_small_chunks_have_to_lower_ttft_beyond_the_noise() -> None:
    assert batching.judge_chunks("a", change(0.8), 0.1).as_said
    assert not batching.judge_chunks("a", change(0.95), 0.1).as_said


def test_a_gain_of_a_prefix_is_a_share_of_ttft() -> None:
    assert prefix.gain(2.0, 0.2) == pytest.approx(0.9)
    assert prefix.judge_gain("a", 2.0, 0.25).as_said
    assert not prefix.judge_gain("a", 2.0, 1.0).as_said


def test_concurrency_that_stays_refutes_the_rule_of_the_model_length() -> None:
    assert not memory.judge_length("a", 25, 25).as_said
    assert memory.judge_length("a", 25, 50).as_said


def test_cost_without_graphs_is_as_said_only_within_its_bounds() -> None:
    assert [graphs.judge_cost("a", ratio).as_said for ratio in (1.05, 1.2, 1.5)] == [False, True, False]


def test_blocks_are_judged_by_number_and_by_growth() -> None:
    exact = memory.judge_blocks("a", {0.7: 3000, 0.9: 4500, 0.95: 5000})
    others = memory.judge_blocks("a", {0.7: 16_000, 0.9: 24_000, 0.95: 26_000})

    assert [o.as_said for o in exact] == [True, True]
    assert [o.as_said for o in others] == [False, True]


def test_doubling_is_twice_give_or_take_a_tenth() -> None:
    assert [memory.judge_doubling("a", "x", r).as_said for r in (1.0, 1.85, 2.0, 2.3)] == [False, True, True, False]


# The table of the CPU engine ----------------------------------------------------------------------------------------


def case(name: str, ttft_s: float = 1.0, index: float = 1.0, **settings: int) -> CpuCase:
    fixed = {"seqs": 4, "tokens": 512, "long_prefill": 0, "pool": "enough", "block": 128, "eager": True}
    made = Point(ttft_s, ttft_s, 0.1, 0.1, ttft_s, ttft_s, 4, 3.0, 0, 40_000, 60.0)
    return CpuCase(name, {**fixed, **settings}, made, index, 0.35, 0.017)


def test_neighbours_differ_in_one_setting_and_come_in_its_order() -> None:
    found = [case("a", tokens=2048), case("b", tokens=64), case("c", tokens=512), case("d", tokens=64, seqs=8)]

    assert [(x.name, y.name) for x, y in cpu.pairs(found, "tokens")] == [("b", "c"), ("c", "a")]


def test_a_configuration_that_was_measured_again_is_no_neighbour_of_itself() -> None:
    assert list(cpu.pairs([case("a"), case("a-again1", ttft_s=1.1)], "tokens")) == []


def test_a_configuration_that_was_measured_again_counts_for_the_mean_at_the_median_speed() -> None:
    found = [case("a", ttft_s=1.0), case("a-again1", ttft_s=2.4, index=1.2), case("b", tokens=64)]
    (pair,) = cpu.pairs(found, "tokens")

    assert [(c.name, c.seconds("ttft_mean_s")) for c in pair] == [("b", 1.0), ("a", pytest.approx(1.5))]


def test_a_long_table_is_folded() -> None:
    def shown(rows: int) -> str:
        return page.place(Tried("here", False, "", ("x",), (("1",),) * rows, ()))

    assert "<details>" not in shown(page.MOST_ROWS)
    assert "<details><summary>All 21 rows</summary>\n\n| x |" in shown(page.MOST_ROWS + 1)


def test_noise_is_assumed_until_something_was_measured_twice() -> None:
    once, _ = cpu.noise([case("a"), case("b", tokens=64)], "ttft_mean_s")
    twice, text = cpu.noise([case("a"), case("a-again1", ttft_s=1.1)], "ttft_mean_s")

    assert once == cpu.ASSUMED_NOISE
    assert 0.1 < twice < 0.5
    assert "1 configurations" in text


def test_times_are_told_at_the_usual_speed_of_the_machine() -> None:
    assert case("slow", ttft_s=3.0, index=1.5).seconds("ttft_mean_s") == pytest.approx(2.0)


# What others published ----------------------------------------------------------------------------------------------


def test_start_up_logs_that_are_compared_differ_in_one_argument_only() -> None:
    named = {"max_model_len", "kv_cache_dtype", "gpu_memory_utilization"}
    sets = (memory.SAME_BUT_LENGTH, memory.SAME_BUT_UTILISATION, *memory.SAME_BUT_TYPE)
    for ids, changed in zip(sets, ("max_model_len", "gpu_memory_utilization", *["kv_cache_dtype"] * 2), strict=True):
        logs = published.memory(*ids)
        same = {*named, "model", "gpu", "tp", "vllm_version", "max_num_seqs", "max_num_batched_tokens"} - {changed}

        assert len({log[changed] for log in logs}) == len(logs)
        assert [key for key in same if len({str(log.get(key)) for log in logs}) > 1] == []


def test_a_published_sweep_is_in_order_and_names_its_source() -> None:
    runs = published.budgets()

    assert [run.budget for run in runs] == [2048, 4096, 8192]
    assert all(run.source for run in runs)


# The page -----------------------------------------------------------------------------------------------------------


def finding(*outcomes: Outcome, predicted: bool = True) -> Finding:
    tried = Tried("twin", predicted, "How.", ("a", "b"), (("1", "2|3"),), outcomes, ("A note.",))
    return Finding(7, "A rule.", "a criterion", (tried,), "load", "Why.")


def test_a_section_says_verdict_figures_how_and_whether_predicted() -> None:
    text = page.section(finding(*said(True, False)))

    assert "## Rule 7: depends" in text
    assert "### Twin (predicted)" in text
    assert "How." in text
    assert r"| 1 | 2\|3 |" in text
    assert "All of the rule as said in 1 of 2 situations: 0." in text


def test_measured_places_are_never_called_predicted() -> None:
    assert "### Twin (measured)" in page.section(finding(*said(True), predicted=False))


def test_numbers_are_written_for_people() -> None:
    assert [ms(0.0123), ms(2.5)] == ["12 ms", "2.50 s"]
    assert [percent(r) for r in (1.25, 0.8, 1.001)] == ["+25%", "−20%", "±0%"]


def test_the_page_lists_every_rule_once_with_a_verdict_and_its_figures() -> None:
    text = PAGE.read_text(encoding="utf-8")
    sections = re.findall(r"^## Rule (\d+): (.+)$", text, re.MULTILINE)

    assert [int(number) for number, _ in sections] == list(range(1, len(rules.RULES) + 1))
    assert {word for _, word in sections} <= {v.value for v in Verdict} - {Verdict.UNTRIED.value}
    summary, *parts = text.split("\n## Rule ")
    for part in parts:
        assert "As said means:" in part
        assert "(predicted)" in part or "(measured)" in part
        assert "\n|---" in part
    assert len(re.findall(r"^\| \d \| ", summary, re.MULTILINE)) == len(rules.RULES)


def test_every_place_on_the_page_says_whether_it_is_predicted() -> None:
    places = re.findall(r"^### (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)

    assert places
    assert [p for p in places if not re.search(r"\((predicted|measured)\)$", p)] == []
    assert [p for p in places if p.startswith(("Twin", "Memory model")) and "(predicted)" not in p] == []
    assert [p for p in places if p.startswith(("CPU", "Published")) and "(measured)" not in p] == []
