from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import check_grad

from tuner.search import gaussian
from tuner.search.gaussian import MOST_TO_FIT, fit

GENERATOR = np.random.default_rng(0)


def smooth(features: np.ndarray) -> np.ndarray:
    return np.asarray(3 + np.sin(5 * features[:, 0]) + features[:, 1] ** 2)


def test_smooth_function_is_predicted_within_its_deviations() -> None:
    features, unseen = GENERATOR.random((40, 2)), GENERATOR.random((50, 2))

    mean, deviation = fit(features, smooth(features)).predict(unseen)

    assert np.abs(mean - smooth(unseen)).max() < 0.15
    assert np.mean(np.abs(mean - smooth(unseen)) < 2.5 * deviation) > 0.9


def test_feature_without_effect_gets_a_long_length() -> None:
    features = GENERATOR.random((40, 3))

    fitted = fit(features, smooth(features)).fitted

    assert fitted.lengths[2] > 3 * fitted.lengths[0]


def test_noise_of_the_values_is_found() -> None:
    features = GENERATOR.random((80, 2))
    values = smooth(features) + 0.2 * GENERATOR.standard_normal(80)

    assert fit(features, values).noise_deviation == pytest.approx(0.2, rel=0.4)


def test_value_that_is_known_to_be_noisy_counts_less() -> None:
    features = np.array([[0.1], [0.5], [0.5001], [0.9]])
    values = np.array([0.0, 1.0, -1.0, 0.0])

    mean, _ = fit(features, values, np.array([1.0, 4.0, 0.25, 1.0])).predict(np.array([[0.5]]))

    assert mean[0] < 0


def test_gradient_is_that_of_the_loss() -> None:
    features, values = GENERATOR.random((12, 3)), GENERATOR.standard_normal(12)
    squares = (features.T[:, :, None] - features.T[:, None, :]) ** 2
    noise_of, means, spreads = GENERATOR.random(12), np.zeros(5), np.full(5, 2.0)
    arguments = (squares, values, noise_of, means, spreads)
    at = GENERATOR.standard_normal(5) * 0.3 - np.array([0, 0, 0, 0, 2.0])

    error = check_grad(lambda x: gaussian._loss(x, *arguments)[0], lambda x: gaussian._loss(x, *arguments)[1], at)

    assert error < 1e-4


def test_left_out_error_is_that_of_a_process_without_the_point() -> None:
    features = GENERATOR.random((15, 2))
    values = smooth(features) + 0.1 * GENERATOR.standard_normal(15)
    whole = fit(features, values)
    others = np.arange(15) != 4

    without = gaussian._conditioned(
        features[others], whole.scaled[others], whole.relative_noise[others], whole.fitted
    ).predict(features[4:5])[0]

    assert whole.left_out_errors()[4] == pytest.approx(values[4] - without[0], abs=1e-6)


def test_believing_in_a_pending_point_keeps_the_mean_and_narrows_the_deviation_there() -> None:
    features = GENERATOR.random((10, 2))
    process = fit(features, smooth(features))
    pending = np.array([[0.33, 0.44]])

    before, after = process.predict(pending), process.believing(pending).predict(pending)

    assert after[0] == pytest.approx(before[0], abs=1e-3)
    assert after[1] < before[1]


def test_values_that_are_all_the_same_can_be_fitted() -> None:
    mean, deviation = fit(GENERATOR.random((5, 2)), np.full(5, 7.0)).predict(GENERATOR.random((3, 2)))

    assert mean == pytest.approx([7.0] * 3)
    assert np.isfinite(deviation).all()


def test_long_history_is_fitted_on_a_part_and_predicted_from_all() -> None:
    features = GENERATOR.random((MOST_TO_FIT + 60, 2))

    process = fit(features, smooth(features))

    assert len(process.features) == MOST_TO_FIT + 60
    assert process.predict(features)[0] == pytest.approx(smooth(features), abs=0.05)
