from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from scipy import stats

from tuner.workload.arrivals import arrivals
from tuner.workload.spec import ArrivalsSpec
from tuner.workload.streams import stream

ADAPTER: TypeAdapter[Any] = TypeAdapter(ArrivalsSpec)
rates = st.floats(0.01, 1000)
open_loops = st.one_of(
    st.builds(lambda r: {"kind": "poisson", "rate_per_s": r}, rates),
    st.builds(lambda r: {"kind": "constant", "rate_per_s": r}, rates),
    st.builds(lambda r, b: {"kind": "gamma", "rate_per_s": r, "burstiness": b}, rates, st.floats(0.05, 20)),
)
ramps = st.builds(
    lambda a, b, k: {"kind": "ramp", "start_rate_per_s": a, "end_rate_per_s": b, "burstiness": k},
    rates,
    rates,
    st.floats(0.1, 10),
)


def times(section: dict[str, Any], count: int, seed: int = 0) -> list[float]:
    return [a.arrival_s for a in arrivals(ADAPTER.validate_python(section), count, stream("test", seed))]


@given(st.one_of(open_loops, ramps), st.integers(1, 60), st.integers(0, 2**32))
def test_arrivals_start_at_zero_never_go_back_and_repeat_with_the_seed(section: Any, count: int, seed: int) -> None:
    first = times(section, count, seed)

    assert len(first) == count
    assert first[0] == 0.0
    assert first == sorted(first)
    assert first == times(section, count, seed)


@given(open_loops, st.integers(2, 60), st.integers(0, 2**32))
def test_the_requested_rate_is_met_exactly_over_the_run(section: Any, count: int, seed: int) -> None:
    last = times(section, count, seed)[-1]

    assert last == pytest.approx((count - 1) / section["rate_per_s"], abs=1e-6)


@given(ramps, st.integers(2, 60), st.integers(0, 2**32))
def test_a_ramp_lasts_as_long_as_its_mean_rate_says(section: Any, count: int, seed: int) -> None:
    last = times(section, count, seed)[-1]

    mean_rate = (section["start_rate_per_s"] + section["end_rate_per_s"]) / 2
    assert last == pytest.approx((count - 1) / mean_rate, rel=1e-9, abs=1e-6)


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(times({"kind": "poisson", "rate_per_s": 5.0}, 3000))

    assert stats.kstest(gaps, stats.expon(scale=0.2).cdf).pvalue > 0.001


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_vary_as_their_burstiness_says(burstiness: float) -> None:
    gaps = np.diff(times({"kind": "gamma", "rate_per_s": 5.0, "burstiness": burstiness}, 4000))

    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.1)


def test_constant_gaps_are_equal() -> None:
    assert times({"kind": "constant", "rate_per_s": 4}, 4) == [0.0, 0.25, 0.5, 0.75]


def test_a_ramp_rises_from_its_first_rate_to_its_last() -> None:
    at = np.array(times({"kind": "ramp", "start_rate_per_s": 1, "end_rate_per_s": 9, "burstiness": 1e6}, 5001))

    assert 100 / (at[100] - at[0]) == pytest.approx(1.3, rel=0.15)
    assert 100 / (at[-1] - at[-101]) == pytest.approx(9, rel=0.02)
    assert np.searchsorted(at, at[-1] / 2) / 5000 == pytest.approx(0.3, abs=0.01)


def test_a_ramp_between_rates_twelve_decades_apart_still_ends() -> None:
    steep = times({"kind": "ramp", "start_rate_per_s": 1e6, "end_rate_per_s": 1e-9}, 50)

    assert all(a <= b for a, b in pairwise(steep))


def test_closed_loop_users_take_turns_and_think_only_after_an_answer() -> None:
    sent = arrivals(ADAPTER.validate_python({"kind": "closed_loop", "users": 2, "think_s": 1.5}), 5, stream("loop"))

    assert [a.user for a in sent] == [0, 1, 0, 1, 0]
    assert [a.think_s for a in sent] == [0.0, 0.0, 1.5, 1.5, 1.5]
    assert {a.arrival_s for a in sent} == {0.0}


def test_another_seed_gives_other_arrivals() -> None:
    assert times({"kind": "poisson", "rate_per_s": 1}, 20, 1) != times({"kind": "poisson", "rate_per_s": 1}, 20, 2)
