from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectives.pareto import hypervolume
from tuner.search.improvement import expected_improvement


@pytest.mark.parametrize("objectives", [1, 2, 3, 4])
def test_expectation_is_that_of_drawn_points(objectives: int) -> None:
    generator = np.random.default_rng(objectives)
    front, corner = generator.random((5, objectives)), np.full(objectives, 1.1)
    means, deviations = generator.random((3, objectives)), 0.1 + 0.3 * generator.random((3, objectives))

    expected = expected_improvement(means, deviations, front, corner)

    before = hypervolume(front, corner)
    for mean, deviation, value in zip(means, deviations, expected, strict=True):
        drawn = mean + deviation * generator.standard_normal((1000, objectives))
        gains = [hypervolume(np.vstack([front, point]), corner) - before for point in drawn]
        assert value == pytest.approx(np.mean(gains), abs=5 * np.std(gains) / 1000**0.5 + 1e-9)


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_another_point_on_the_front_never_makes_a_candidate_worth_more(seed: int, objectives: int) -> None:
    generator = np.random.default_rng(seed)
    front, corner = generator.random((4, objectives)), np.ones(objectives)
    means, deviations = generator.random((6, objectives)), 0.01 + generator.random((6, objectives))

    before = expected_improvement(means, deviations, front[:3], corner)
    after = expected_improvement(means, deviations, front, corner)

    assert (after <= before + 1e-9).all()
    assert (after >= 0).all()


def test_certain_point_is_worth_what_it_adds() -> None:
    front, corner = np.array([[0.2, 0.8], [0.8, 0.2]]), np.ones(2)
    point = np.array([[0.4, 0.4]])

    expected = expected_improvement(point, np.full((1, 2), 1e-6), front, corner)

    added = hypervolume(np.vstack([front, point]), corner) - hypervolume(front, corner)
    assert expected[0] == pytest.approx(added, abs=1e-4)


def test_points_of_the_front_beyond_the_corner_do_not_count() -> None:
    front, corner = np.array([[0.5, 0.5], [0.1, 3.0]]), np.ones(2)
    means, deviations = np.array([[0.3, 0.3]]), np.array([[0.1, 0.1]])

    assert expected_improvement(means, deviations, front, corner) == pytest.approx(
        expected_improvement(means, deviations, front[:1], corner)
    )
