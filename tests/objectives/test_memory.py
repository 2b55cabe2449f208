import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measurement_samples import ENGINE, device_sample, measurement

from objectives.measurement import EngineFacts, Failure, FailureKind, Stage
from objectives.memory import HIGHEST, LOWEST, SMALLEST_SHORTAGE, UNKNOWN_SHORTAGE, memory_violation

OOM = [k for k in FailureKind if k.is_oom]
MACHINE = [k for k in FailureKind if not k.is_configuration_fault]
sizes = st.none() | st.floats(min_value=-1e3, max_value=1e6, allow_nan=False)


def engine(kv_tokens: int | None, needed: int | None) -> EngineFacts:
    return dataclasses.replace(ENGINE, kv_tokens=kv_tokens, kv_tokens_needed=needed)


def test_a_measurement_has_the_tighter_of_kv_pool_and_device() -> None:
    assert memory_violation(measurement()) == pytest.approx(-0.1)
    assert memory_violation(measurement(device=())) == pytest.approx(-0.6)
    tight = measurement(engine=engine(10_000, 9_900))
    assert memory_violation(tight) == pytest.approx(-0.01)


def test_the_host_is_not_device_memory() -> None:
    host = device_sample(device="host", memory_used_gib=99.0, memory_total_gib=100.0)
    assert memory_violation(measurement(device=(host,))) == pytest.approx(-0.6)


def test_a_run_that_shows_no_memory_is_feasible_by_an_unknown_margin() -> None:
    assert memory_violation(measurement(engine=engine(None, None), device=())) == 0.0


def test_a_failure_with_figures_is_their_relative_shortage() -> None:
    failure = Failure(FailureKind.OOM_KV_CACHE, Stage.KV_CACHE, "text", needed_gib=3.0, available_gib=2.0)
    assert memory_violation(failure) == 0.5


def test_nothing_available_at_all_is_the_largest_shortage() -> None:
    failure = Failure(FailureKind.OOM_KV_CACHE, Stage.KV_CACHE, "text", needed_gib=1.0, available_gib=-3.1)
    assert memory_violation(failure) == HIGHEST


@pytest.mark.parametrize("kind", [*OOM, FailureKind.INVALID_CONFIG])
def test_a_failure_without_figures_has_a_finite_positive_violation(kind: FailureKind) -> None:
    assert memory_violation(Failure(kind, Stage.PROFILE, "text")) == UNKNOWN_SHORTAGE


@given(st.sampled_from([*OOM, FailureKind.INVALID_CONFIG]), sizes, sizes)
def test_no_failure_of_a_configuration_ever_counts_as_feasible(
    kind: FailureKind, needed: float | None, available: float | None
) -> None:
    violation = memory_violation(Failure(kind, Stage.RUN, "text", needed_gib=needed, available_gib=available))
    assert SMALLEST_SHORTAGE <= violation <= HIGHEST


@given(st.none() | st.integers(0, 10**7), st.none() | st.integers(0, 10**7))
def test_a_measured_violation_is_always_a_number_in_range(kv_tokens: int | None, needed: int | None) -> None:
    assert LOWEST <= memory_violation(measurement(engine=engine(kv_tokens, needed))) <= HIGHEST


@pytest.mark.parametrize("kind", MACHINE)
def test_a_fault_of_the_machine_is_never_held_against_the_configuration(kind: FailureKind) -> None:
    with pytest.raises(ValueError, match="fault of the machine"):
        memory_violation(Failure(kind, Stage.RUN, "text"))
