from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.design import place_of, position_of, value_at
from tuner.search.coordinates import Coordinates, keys, unseen
from tuner.space import Parameter

PARAMETERS = [
    Parameter(choices=(16, 4, 64)),
    Parameter(choices=(True, False)),
    Parameter(choices=("a", None, [1, 2], {"x": 1})),
    Parameter(choices=("only",)),
    Parameter(low=1, high=512, log=True),
    Parameter(low=2**28, high=2**36, log=True),
    Parameter(low=0.001, high=3.5, log=True),
    Parameter(low=0, high=4096),
    Parameter(low=0, high=10, step=3),
    Parameter(low=0.5, high=0.95, step=0.05),
    Parameter(low=0.5, high=0.95),
    Parameter(low=7, high=7),
    Parameter(low=7, high=7, log=True),
    Parameter(low=0.7, high=0.7),
]
SPACE = {f"p{i}": parameter for i, parameter in enumerate(PARAMETERS)}


@given(st.sampled_from(PARAMETERS), st.floats(0, 1, exclude_max=True))
def test_value_at_a_position_belongs_to_the_parameter_and_lies_where_it_is_found(
    parameter: Parameter, position: float
) -> None:
    value = value_at(parameter, position)

    assert parameter.contains(value)
    assert value_at(parameter, position_of(parameter, value)) == pytest.approx(value)


@given(st.sampled_from([p for p in PARAMETERS if p.is_ordered]), st.lists(st.floats(0.0005, 1e6), min_size=2))
def test_places_of_values_beside_a_parameter_are_in_their_order(parameter: Parameter, values: list[float]) -> None:
    ends = [position_of(parameter, value_at(parameter, x)) for x in (0.0, 0.999999)]
    own = {value_at(parameter, x): position_of(parameter, value_at(parameter, x)) for x in np.linspace(0, 0.999999, 50)}
    placed = {v: p for v in values if (p := place_of(parameter, v)) is not None} | own

    places = [placed[v] for v in sorted(placed)]

    assert places == sorted(places)
    assert all(p < ends[0] or p > ends[1] for v, p in placed.items() if not min(own) <= v <= max(own))


@pytest.mark.parametrize("value", [True, None, "a", float("nan"), float("inf")])
def test_what_is_no_number_has_no_place_among_numbers(value: object) -> None:
    assert place_of(Parameter(choices=(1, 2, 4)), value) is None
    assert place_of(Parameter(low=1, high=512, log=True), value) is None


def test_no_limit_has_no_place_among_limits_unless_the_space_has_it() -> None:
    limits = Parameter(choices=(128, 512, 2048)).with_zero_above_all()

    assert place_of(limits, 0) is None
    assert place_of(limits, 1280) == pytest.approx((1.5 + 0.5) / 3)


@given(st.integers(0, 2**32 - 1))
def test_snapping_moves_to_the_position_of_the_value_and_no_further(seed: int) -> None:
    coordinates = Coordinates(SPACE)
    positions = np.random.default_rng(seed).random((3, coordinates.size))

    snapped = coordinates.snapped(positions)

    assert np.allclose(coordinates.snapped(snapped), snapped, atol=1e-12)
    for raw, row in zip(positions, snapped, strict=True):
        assert coordinates.position(coordinates.changes(raw)) == pytest.approx(row, abs=1e-9)


def test_ordered_values_are_one_feature_and_true_categories_one_each() -> None:
    coordinates = Coordinates({"seqs": PARAMETERS[0], "flag": PARAMETERS[1], "word": PARAMETERS[2]})
    positions = np.array([coordinates.position({"seqs": 64, "flag": True, "word": None})])

    assert coordinates.features(positions).shape == (1, 1 + 1 + 4)


def test_every_category_is_as_far_from_every_other() -> None:
    coordinates = Coordinates({"word": PARAMETERS[2]})

    features = coordinates.features(coordinates.everything())
    distances = np.linalg.norm(features[:, None] - features[None], axis=2)

    assert distances[~np.eye(4, dtype=bool)] == pytest.approx(1.0)


def test_listing_everything_gives_each_configuration_once() -> None:
    coordinates = Coordinates({"seqs": PARAMETERS[0], "step": PARAMETERS[8], "flag": PARAMETERS[1]})

    positions = coordinates.everything()

    assert len(positions) == coordinates.points == 3 * 4 * 2
    assert len(set(keys(positions))) == len(positions)


def test_space_with_more_configurations_than_an_integer_can_count_is_not_taken_for_a_small_one() -> None:
    bytes_of_memory = Parameter(low=2**28, high=2**32, log=True)

    assert Coordinates({f"p{i}": bytes_of_memory for i in range(4)}).points > 1e37


def test_unseen_leaves_out_what_is_known_and_what_stands_twice() -> None:
    positions = np.array([[0.5, 0.5], [0.1, 0.2], [0.5, 0.5], [0.9, 0.9]])

    assert unseen(positions, set(keys(positions[1:2]))).tolist() == [[0.5, 0.5], [0.9, 0.9]]


CONDITIONAL = {
    "threshold": Parameter(choices=(128, 512, 2048), when={"chunked": (True,)}),
    "chunked": Parameter(choices=(True, False)),
    "long": Parameter(choices=(1, 2, 4), when={"threshold": (128, 512)}),
    "seqs": Parameter(low=1, high=64, log=True),
}


@given(st.integers(0, 2**32 - 1))
def test_what_is_not_searched_is_not_set_and_makes_no_configuration_of_its_own(seed: int) -> None:
    coordinates = Coordinates(CONDITIONAL)
    positions = coordinates.snapped(np.random.default_rng(seed).random((20, coordinates.size)))

    for position, key in zip(positions, keys(positions), strict=True):
        changes = coordinates.changes(position)
        assert ("threshold" in changes) == changes["chunked"]
        assert ("long" in changes) == (changes.get("threshold") in (128, 512))
        assert keys(coordinates.position(changes)[None, :]) == [key]
    texts = {str(sorted(coordinates.changes(position).items())) for position in positions}
    assert len(texts) == len(set(keys(positions)))


def test_everything_holds_each_configuration_once_where_parameters_hang_on_others() -> None:
    small = {name: parameter for name, parameter in CONDITIONAL.items() if name != "seqs"}

    everything = Coordinates(small).everything()

    assert len(everything) == len(set(keys(everything))) == 8  # not chunked; 2048; two thresholds with three each


def test_what_is_set_beside_the_space_has_a_place_though_a_parameter_is_not_searched_there() -> None:
    coordinates = Coordinates(CONDITIONAL)

    place = coordinates.place({"chunked": False, "seqs": 100})

    assert place is not None
    assert place[3] > 1
    assert (place[[0, 2]] == coordinates.position({"chunked": False, "seqs": 64})[[0, 2]]).all()
