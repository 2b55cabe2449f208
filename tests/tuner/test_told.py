from __future__ import annotations

import math
from typing import Any

import numpy as np
import optuna
import pytest

from tuner.proposer import Proposer
from tuner.search.coordinates import Coordinates, keys
from tuner.search.suggest import Past
from tuner.space import Parameter
from tuner.spec import Search
from tuner.told import past_of

SPACE = {"seqs": Parameter(choices=(1, 4, 16)), "tokens": Parameter(choices=(64, 256, 1024))}
COORDINATES = Coordinates(SPACE)


@pytest.fixture
def storage() -> Any:
    return optuna.storages.InMemoryStorage()


@pytest.fixture
def proposer(storage: Any) -> Proposer:
    return Proposer(storage, "toy", SPACE, Search(), constraints=["ttft<1"], objectives=[(True, 1), (False, -1)])


def past(storage: Any) -> Past:
    trials = optuna.load_study(study_name="toy", storage=storage).get_trials()
    return past_of(trials, COORDINATES, [True, False], ("starts", "ttft<1"))


def test_trial_that_was_ended_early_is_no_measurement_and_breaks_no_constraint(
    storage: Any, proposer: Proposer
) -> None:
    changes = {"seqs": 4, "tokens": 256}
    proposer.enqueue("design", changes)
    proposer.tell_censored(proposer.ask().number, [2.0, 30.0])

    known = past(storage)

    assert known.measured == 0
    assert known.positions.shape == (0, 2)
    assert np.allclose(known.censored, [COORDINATES.position(changes)])
    assert np.allclose(known.bounds, [[math.log(2.0), -30.0]])
    assert set(keys(known.censored)) <= set(keys(known.everything))


def test_running_trial_beside_the_space_is_pending_with_its_own_configuration(storage: Any, proposer: Proposer) -> None:
    changes = {"seqs": 5, "tokens": 256}
    proposer.enqueue("recipe:some", changes)
    assert past(storage).pending.shape == (0, 2), "it waits"

    number = proposer.ask().number
    running = past(storage)
    proposer.tell_measured(number, [2.0, 30.0], {"memory": -0.5})
    over = past(storage)

    assert running.beside == over.beside == {keys(running.pending)[0]: changes}
    assert (len(running.pending), len(over.pending), over.measured) == (1, 0, 1)
    assert np.allclose(over.positions, running.pending)


def test_differences_from_predictions_are_expected_in_the_unit_that_is_modelled(
    storage: Any, proposer: Proposer
) -> None:
    proposer.enqueue("design", {"seqs": 4, "tokens": 256})
    assert np.allclose(past(storage).ratios, [0.15, 0.15])

    proposer.tell_measured(proposer.ask().number, [2.0, 400.0], {"memory": -0.5})

    assert np.allclose(past(storage).ratios, [0.15, 60.0])
