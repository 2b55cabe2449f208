import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measurement_samples import record

from objectives.latency import (
    Latencies,
    e2el_s,
    is_served,
    itl_gaps_s,
    prompt_groups,
    queue_s,
    tpot_s,
    ttft_per_1k_prompt_s,
    ttft_s,
    ttft_sent_s,
)
from objectives.measurement import RequestRecord

times = st.floats(min_value=0.0, max_value=1e5, allow_nan=False)
deltas = st.lists(st.tuples(times, st.integers(min_value=1, max_value=8)), min_size=1, max_size=30)


def tokens_of(events: list[tuple[float, int]]) -> tuple[float, ...]:
    return tuple(at for at, count in events for _ in range(count))


def served_with(token_times: tuple[float, ...]) -> RequestRecord:
    return record(
        token_times_s=token_times,
        output_tokens=len(token_times),
        first_token_s=min(token_times),
        last_token_s=max(token_times),
    )


def test_ttft_runs_from_the_scheduled_arrival_and_the_sent_one_is_kept_apart() -> None:
    late = record(scheduled_s=10.0, sent_s=12.0, first_token_s=13.0)
    assert ttft_s(late) == 3.0
    assert ttft_sent_s(late) == 1.0


def test_normalised_ttft_is_per_thousand_prompt_tokens() -> None:
    assert ttft_per_1k_prompt_s(record(prompt_tokens=4000, scheduled_s=0.0, first_token_s=2.0)) == 0.5


def test_tpot_counts_tokens_not_chunks() -> None:
    two_chunks = record(token_times_s=(1.0, 1.0, 1.0, 2.0, 2.0), output_tokens=5)
    assert tpot_s(two_chunks) == pytest.approx(0.25)
    assert itl_gaps_s(two_chunks).tolist() == [0.0, 0.0, 1.0, 0.0]


def test_one_token_has_no_tpot_and_no_gap() -> None:
    single = record(output_tokens=1)
    assert tpot_s(single) is None
    assert itl_gaps_s(single).size == 0


def test_what_was_not_observed_is_none() -> None:
    blank = record(first_token_s=None, last_token_s=None, queued_s=None)
    assert [f(blank) for f in (ttft_s, ttft_sent_s, ttft_per_1k_prompt_s, tpot_s, e2el_s, queue_s)] == [None] * 6


def test_queue_time_is_the_engines_own() -> None:
    assert queue_s(record(queued_s=1.0, first_scheduled_s=1.75, sent_s=0.0)) == 0.75


@pytest.mark.parametrize(
    "changes",
    [
        {"error": "cancelled"},
        {"finish_reason": "abort"},
        {"first_token_s": None},
        {"last_token_s": None},
        {"output_tokens": 0, "token_times_s": ()},
    ],
)
def test_a_request_without_its_whole_answer_is_not_served(changes: dict[str, Any]) -> None:
    assert not is_served(record(**changes))
    assert Latencies.of([record(**changes)]).ttft_s.size == 0


@given(deltas)
def test_gaps_sum_to_last_minus_first_and_tpot_is_their_mean(events: list[tuple[float, int]]) -> None:
    one = served_with(tokens_of(events))
    gaps = itl_gaps_s(one)
    assert (gaps >= 0).all()
    assert gaps.sum() == pytest.approx(one.last_token_s - one.first_token_s, abs=1e-6)
    if one.output_tokens > 1:
        assert tpot_s(one) == pytest.approx(gaps.mean(), abs=1e-6)


@given(deltas, st.randoms(use_true_random=False))
def test_any_order_of_token_events_gives_the_same_gaps(events: list[tuple[float, int]], shuffle: random.Random) -> None:
    in_order = itl_gaps_s(served_with(tokens_of(events)))
    shuffle.shuffle(events)
    assert np.array_equal(itl_gaps_s(served_with(tokens_of(events))), in_order)


@given(st.lists(times, min_size=2, max_size=20))
def test_merging_tokens_into_one_delta_keeps_their_number_and_the_whole_time(arrivals: list[float]) -> None:
    arrivals.sort()
    merged = tokens_of([(arrivals[-1], len(arrivals) - 1)])
    separate, together = itl_gaps_s(served_with(tuple(arrivals))), itl_gaps_s(served_with((arrivals[0], *merged)))
    assert separate.size == together.size
    assert separate.sum() == pytest.approx(together.sum(), abs=1e-6)


@given(st.permutations(range(8)))
def test_columns_do_not_depend_on_the_order_of_completion(order: list[int]) -> None:
    records = [record(i, prompt_tokens=100 * (i + 1), repeat=i % 2, output_tokens=i + 1) for i in range(8)]
    expected, shuffled = Latencies.of(records), Latencies.of([records[i] for i in order])
    for column in Latencies.__slots__:
        assert np.array_equal(getattr(expected, column), getattr(shuffled, column), equal_nan=True)


def test_selecting_prompts_keeps_each_gap_with_its_request() -> None:
    table = Latencies.of([record(i, prompt_tokens=n, output_tokens=3) for i, n in enumerate((512, 2048, 512, 2048))])
    chosen = table.of_prompts(2048, 2048)
    assert chosen.prompt_tokens.tolist() == [2048, 2048]
    assert chosen.gap_owners.tolist() == [0, 0, 1, 1]
    assert chosen.ttft_s.tolist() == table.ttft_s[[1, 3]].tolist()


def test_few_prompt_lengths_are_told_apart_exactly() -> None:
    groups = prompt_groups(np.array([2048, 512, 2048]))
    assert [g.label for g in groups] == ["512", "2048"]


@given(st.lists(st.integers(min_value=1, max_value=200_000), min_size=13, max_size=60, unique=True))
def test_many_prompt_lengths_fall_into_doubling_ranges_that_each_hold_some(lengths: list[int]) -> None:
    groups = prompt_groups(np.array(lengths))
    for length in lengths:
        assert sum(g.low <= length <= g.high for g in groups) == 1
    assert all(any(g.low <= n <= g.high for n in lengths) for g in groups)
