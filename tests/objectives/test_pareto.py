import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives.metrics import Direction
from objectives.pareto import dominates, front, front_with_noise, hypervolume, knee

DOWN: tuple[Direction, ...] = ("minimize", "minimize")
Row = tuple[float, float, float]
coordinates = st.integers(min_value=1, max_value=6).map(float)
point = st.tuples(coordinates, coordinates)
point3 = st.tuples(coordinates, coordinates, coordinates)
directions = st.tuples(*[st.sampled_from(["minimize", "maximize"])] * 3)
points = st.lists(point, min_size=1, max_size=12)


@given(point3, point3, point3, directions)
def test_dominance_is_a_strict_partial_order(a: Row, b: Row, c: Row, ways: list[Direction]) -> None:
    assert not dominates(a, a, ways)
    assert not (dominates(a, b, ways) and dominates(b, a, ways))
    if dominates(a, b, ways) and dominates(b, c, ways):
        assert dominates(a, c, ways)


@given(point3, point3, directions)
def test_turning_every_direction_turns_dominance(a: Row, b: Row, ways: list[Direction]) -> None:
    turned = ["maximize" if w == "minimize" else "minimize" for w in ways]
    assert dominates(a, b, ways) == dominates(b, a, turned)


@given(st.lists(point3, min_size=1, max_size=12), directions)
def test_front_is_what_nothing_dominates(rows: list[tuple[float, float]], ways: list[Direction]) -> None:
    expected = {i for i, a in enumerate(rows) if not any(dominates(b, a, ways) for b in rows)}
    assert set(front(rows, ways)) == expected
    assert expected


@given(points)
def test_every_point_off_the_front_is_dominated_by_one_on_it(rows: list[tuple[float, float]]) -> None:
    members = front(rows)
    for i, row in enumerate(rows):
        assert i in members or any(dominates(rows[m], row) for m in members)


def test_front_begins_with_the_best_first_objective_and_keeps_equal_points() -> None:
    assert front([(3, 1), (1, 3), (2, 2), (2, 2), (3, 3)], DOWN) == [1, 2, 3, 0]
    assert front([(3, 1), (1, 3)], ("maximize", "minimize")) == [0]
    assert front([]) == []


@pytest.mark.parametrize("rows", [[(1.0, math.nan)], [(1.0, math.inf)], [(1.0, 2.0, 3.0)], [1.0, 2.0]])
def test_points_that_cannot_be_compared_are_refused(rows: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="finite rows"):
        front(rows, DOWN)


@given(points, point)
def test_hypervolume_never_falls_when_a_point_is_added(
    rows: list[tuple[float, float]], extra: tuple[float, float]
) -> None:
    reference = (5.0, 5.0)
    assert hypervolume([*rows, extra], reference, DOWN) >= hypervolume(rows, reference, DOWN) - 1e-12


@given(points)
def test_hypervolume_is_the_share_of_cells_that_some_point_dominates(rows: list[tuple[float, float]]) -> None:
    corner = (5.0, 5.0)
    cells = sum(any(x <= i and y <= j for x, y in rows) for i in range(5) for j in range(5))
    assert hypervolume(rows, corner) == pytest.approx(cells)


@given(points)
def test_hypervolume_of_the_front_is_that_of_all_points(rows: list[tuple[float, float]]) -> None:
    corner = np.array([7.0, 7.0])
    assert hypervolume([rows[i] for i in front(rows)], corner) == pytest.approx(hypervolume(rows, corner))


def test_hypervolume_follows_directions_and_is_zero_without_points() -> None:
    assert hypervolume([(3.0, 1.0)], (1.0, 4.0), ("maximize", "minimize")) == pytest.approx(6.0)
    assert hypervolume([], (1.0, 1.0), DOWN) == 0.0


def test_knee_lies_where_the_front_bends() -> None:
    assert knee([(1, 100), (2, 10), (10, 9), (100, 1)], DOWN) == 1


def test_knee_of_a_single_point_is_that_point_even_among_dominated_ones() -> None:
    assert knee([(5.0, 5.0), (1.0, 1.0), (0.0, 9.0)][:2], DOWN) == 1
    assert knee([(4.0, 2.0)], DOWN) == 0


def test_knee_of_a_front_that_does_not_bend_inwards_is_the_most_balanced_point() -> None:
    assert knee([(-1.0, 0.0), (-0.7, -0.7), (0.0, -1.0), (-0.1, -0.99)], DOWN) == 1


def test_knee_of_two_points_is_the_better_first_objective() -> None:
    assert knee([(2.0, 1.0), (1.0, 2.0)], DOWN) == 1


def test_an_empty_front_has_no_knee() -> None:
    with pytest.raises(ValueError, match="no knee"):
        knee([], DOWN)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8, unique=True), st.randoms())
def test_knee_does_not_depend_on_order_units_or_dominated_points(
    rows: list[tuple[float, float]], shuffle: random.Random
) -> None:
    chosen = rows[knee(rows, DOWN)]
    turned = list(rows)
    shuffle.shuffle(turned)
    assert turned[knee(turned, DOWN)] == chosen
    in_ms = [(1000.0 * a, b) for a, b in rows]
    assert rows[knee(in_ms, DOWN)] == chosen
    assert [*rows, (10.0, 10.0)][knee([*rows, (10.0, 10.0)], DOWN)] == chosen


@given(points)
def test_knee_is_on_the_front(rows: list[tuple[float, float]]) -> None:
    assert knee(rows, DOWN) in front(rows, DOWN)


def test_members_that_differ_by_less_than_the_floor_are_the_same() -> None:
    rows = [(1.0, 10.0), (1.01, 9.95), (2.0, 5.0), (9.0, 9.0)]
    members = {m.row: m for m in front_with_noise(rows, DOWN, floors=(0.05, 0.05))}
    assert members[0].same_as == (1,)
    assert members[1].same_as == (0,)
    assert members[2].separable
    assert set(members) == {0, 1, 2}


def test_members_whose_intervals_overlap_in_every_objective_are_the_same() -> None:
    rows = [(1.0, 10.0), (2.0, 5.0)]
    wide = [[(0.5, 2.5), (4.0, 11.0)], [(1.0, 3.0), (4.5, 6.0)]]
    narrow = [[(0.9, 1.1), (4.0, 11.0)], [(1.9, 2.1), (4.5, 6.0)]]
    unknown = [[None, (4.0, 11.0)], [None, (4.5, 6.0)]]
    assert not any(m.separable for m in front_with_noise(rows, DOWN, intervals=wide))
    assert all(m.separable for m in front_with_noise(rows, DOWN, intervals=narrow))
    assert all(m.separable for m in front_with_noise(rows, DOWN, intervals=unknown))
    assert not any(m.separable for m in front_with_noise(rows, DOWN, intervals=narrow, floors=(0.9, 0.9)))


@given(points)
def test_without_intervals_or_floors_only_equal_points_are_the_same(rows: list[tuple[float, float]]) -> None:
    for member in front_with_noise(rows, DOWN):
        assert all(rows[other] == rows[member.row] for other in member.same_as)
