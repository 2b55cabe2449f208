from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tuner.workload.lengths import apportioned, exact_lengths, longest_output, output_lengths
from tuner.workload.spec import ChoiceTokens, LognormalShape, LognormalTokens, UniformRange, UniformTokens
from tuner.workload.streams import stream

shares = st.dictionaries(st.integers(1, 131_072), st.floats(0.001, 1000), min_size=1, max_size=8)


@given(shares, st.integers(0, 5000))
def test_shares_are_met_to_within_one_request(weights: dict[int, float], count: int) -> None:
    counts = apportioned(weights, count)

    total = sum(weights.values())
    assert sum(counts.values()) == count
    assert all(abs(counts[length] - count * weight / total) < 1 + 1e-6 for length, weight in weights.items())


@given(st.dictionaries(st.integers(1, 131_072), st.integers(0, 50), min_size=1).filter(lambda d: any(d.values())))
def test_counts_that_add_up_come_back_unchanged(counts: dict[int, int]) -> None:
    assert apportioned({k: float(v) for k, v in counts.items()}, sum(counts.values())) == counts


def test_a_list_is_shared_equally_and_a_length_named_twice_counts_twice() -> None:
    lengths = exact_lengths((512, 1024, 512), 9, stream("list"))

    assert Counter(lengths) == {512: 6, 1024: 3}
    assert lengths != sorted(lengths)


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(0, 2**32))
def test_uniform_lengths_stay_within_their_bounds(low: int, width: int, seed: int) -> None:
    spec = UniformTokens(uniform=UniformRange(low=low, high=low + width))

    lengths = output_lengths(spec, 50, stream("uniform", seed))

    assert low <= min(lengths)
    assert max(lengths) <= low + width == longest_output(spec)


def test_lognormal_lengths_have_the_median_and_the_cut_that_were_asked_for() -> None:
    spec = LognormalTokens(lognormal=LognormalShape(median=128, sigma=1.0, max=512))

    lengths = sorted(output_lengths(spec, 2001, stream("lognormal")))

    assert 115 < lengths[1000] < 142
    assert lengths[0] >= 1
    assert lengths[-1] == longest_output(spec) == 512


def test_a_tiny_median_never_gives_an_empty_output() -> None:
    spec = LognormalTokens(lognormal=LognormalShape(median=1, sigma=3.0, max=10))

    assert min(output_lengths(spec, 200, stream("tiny"))) == 1


def test_choices_are_met_exactly() -> None:
    spec = ChoiceTokens(choices={16: 3, 256: 1})

    assert Counter(output_lengths(spec, 100, stream("choices"))) == {16: 75, 256: 25}
    assert longest_output(spec) == 256
