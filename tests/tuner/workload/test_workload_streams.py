from __future__ import annotations

import decimal
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tuner.workload.streams import Draws, Stream, stream

PINNED_DRAWS = [
    "0.09897717851951343126515325821",
    "0.5617800926335272000622393372",
    "-0.7345490212272087589978402509",
    "0.07291276014618639407905958922",
]


def test_words_are_those_of_the_published_splitmix64() -> None:
    assert [int(w) for w in Stream(0).words(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert int(Stream(1234567).words(1)[0]) == 6457827717110365317


@given(st.integers(0, 2**64 - 1), st.integers(0, 50), st.integers(0, 50))
def test_a_stream_can_be_read_from_any_position(key: int, start: int, count: int) -> None:
    whole = Stream(key).words(start + count)

    assert np.array_equal(whole[start:], Stream(key).words(count, start))


@given(st.integers(0, 2**63), st.integers(1, 2**31), st.integers(0, 1000))
def test_ids_stay_in_the_vocabulary(low_seed: int, span: int, low: int) -> None:
    ids = Stream(low_seed).ids(100, (low, low + span))

    assert ids.min() >= low
    assert ids.max() < low + span


def test_ids_are_uniform() -> None:
    counts = np.bincount(stream("uniform").ids(100_000, (0, 50)), minlength=50)

    assert stats.chisquare(counts).pvalue > 0.001


@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=8))
def test_equal_names_give_equal_blocks_and_others_do_not(names: list[int]) -> None:
    blocks = stream("blocks").blocks(names, 16, (0, 1 << 20))

    for name, block in zip(names, blocks, strict=True):
        for other, other_block in zip(names, blocks, strict=True):
            same = (name - other) % 2**64 == 0
            assert np.array_equal(block, other_block) is same


def test_labels_of_another_type_or_split_are_another_stream() -> None:
    keys = {stream(*labels).key for labels in [("a", 1), ("a", "1"), ("a1",), ("a", 1, 0), (1, "a")]}

    assert len(keys) == 5


def test_an_order_holds_every_index_once() -> None:
    assert sorted(stream("order").order(1000)) == list(range(1000))


@pytest.mark.parametrize("shape", ["0.3", "1", "4.5"])
def test_gamma_draws_follow_the_gamma_distribution(shape: str) -> None:
    draws = Draws(stream("gamma", shape))

    sample = [float(draws.gamma(Decimal(shape))) for _ in range(3000)]

    assert stats.kstest(sample, stats.gamma(float(shape)).cdf).pvalue > 0.001


def test_normal_and_exponential_draws_follow_their_distributions() -> None:
    draws = Draws(stream("shapes"))

    normal = [float(draws.normal()) for _ in range(3000)]
    exponential = [float(draws.exponential()) for _ in range(3000)]

    assert stats.kstest(normal, stats.norm.cdf).pvalue > 0.001
    assert stats.kstest(exponential, stats.expon.cdf).pvalue > 0.001


def test_draws_do_not_depend_on_the_callers_decimal_context() -> None:
    def some() -> list[Decimal]:
        draws = Draws(stream("context"))
        return [draws.uniform(), draws.exponential(), draws.normal(), draws.gamma(Decimal("0.7"))]

    with decimal.localcontext(prec=4, rounding=decimal.ROUND_UP):
        narrow = some()

    assert narrow == some()
    assert [str(value) for value in some()] == PINNED_DRAWS
