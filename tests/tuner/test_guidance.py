from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tuner.guidance import Guidance, basis_of
from tuner.search.coordinates import Coordinates
from tuner.search.guide import BRIEF
from tuner.space import Parameter

SPACE = {
    "max_num_seqs": Parameter(low=1, high=512, log=True),
    "max_num_batched_tokens": Parameter(low=256, high=16384, log=True),
    "enable_prefix_caching": Parameter(choices=(True, False)),
}
COORDINATES = Coordinates(SPACE)
POSITIONS = COORDINATES.snapped(np.random.default_rng(0).random((3, 3)))


class Predictor:
    """Predicts times that follow the arguments, nothing for the largest batches; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []
        self.enough = threading.Event()

    def __call__(self, configurations: Sequence[Mapping[str, Any]], basis: int) -> list[Sequence[float] | None]:
        self.asked += [(basis, str(c)) for c in configurations]
        if len(self.asked) >= 50:
            self.enough.set()
        return [None if c["max_num_batched_tokens"] > 12_000 else self.times(c) for c in configurations]

    def times(self, c: Mapping[str, Any]) -> tuple[float, float]:
        return 2000 / c["max_num_batched_tokens"] + 10 / c["max_num_seqs"], 0.01 + c["max_num_seqs"] / 5000


def guidance(predictor: Predictor, *, ahead: bool = False) -> Guidance:
    return Guidance(COORDINATES, predictor, lambda v: [math.log(x) for x in v], 2, 0, ahead=ahead, effort=BRIEF)


def test_guide_knows_what_the_predictor_says_also_between_its_predictions() -> None:
    predictor = Predictor()
    others = COORDINATES.snapped(np.random.default_rng(1).random((20, 3)) * [1, 0.9, 1])

    guide = guidance(predictor).at(1, POSITIONS)

    assert guide is not None
    at_once = guide.predict(COORDINATES.features(POSITIONS))[0][0]
    assert np.exp(at_once) == pytest.approx(predictor.times(COORDINATES.changes(POSITIONS[0])), rel=0.03)
    between, deviation = guide.predict(COORDINATES.features(others))
    exact = np.log([predictor.times(COORDINATES.changes(p)) for p in others])
    assert np.abs(between - exact).max() < 0.1
    assert deviation.max() < 0.2


def test_nothing_is_asked_twice_with_one_calibration() -> None:
    predictor = Predictor()
    asked_of = guidance(predictor)

    asked_of.at(1, POSITIONS)
    asked_of.at(2, POSITIONS[:2])

    assert len(set(predictor.asked)) == len(predictor.asked)


def test_new_calibration_is_used_one_trial_after_it_could_be_made() -> None:
    assert [basis_of(measured) for measured in (0, 1, 3, 4, 6, 7, 12, 13)] == [0, 0, 0, 3, 3, 6, 6, 12]


def test_same_questions_have_the_same_guide_whatever_was_asked_before() -> None:
    fresh, used = guidance(Predictor()), guidance(Predictor())
    used.at(2, POSITIONS[:1])
    used.at(9, POSITIONS)

    features = COORDINATES.features(POSITIONS)

    first, second = fresh.at(4, POSITIONS), used.at(4, POSITIONS)

    assert first is not None
    assert second is not None
    assert np.array_equal(first.positions, second.positions)
    assert np.array_equal(first.predict(features)[0], second.predict(features)[0])


def test_predictor_that_says_nothing_guides_nobody() -> None:
    def silent(configurations: Sequence[Mapping[str, Any]], _: int) -> list[Sequence[float] | None]:
        return [None] * len(configurations)

    assert Guidance(COORDINATES, silent, list, 2, 0, ahead=False, effort=BRIEF).at(1, POSITIONS) is None


def test_predictions_are_made_ahead_and_not_while_something_is_measured() -> None:
    predictor = Predictor()
    asked_of = guidance(predictor, ahead=True)
    asked_of.rest(now=True)
    asked_of.prepare(4, POSITIONS, {}, lambda _: None)
    assert not predictor.enough.wait(0.1)
    assert predictor.asked == []

    asked_of.rest(now=False)

    assert predictor.enough.wait(10)
    assert {basis for basis, _ in predictor.asked} == {3}


def test_what_is_needed_now_is_predicted_though_background_work_rests() -> None:
    predictor = Predictor()
    asked_of = guidance(predictor, ahead=True)
    asked_of.rest(now=True)

    assert asked_of.at(1, POSITIONS) is not None
