from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from tuner.design import design_points, value_at
from tuner.proposer import _distribution
from tuner.search.encoding import decode, encode
from tuner.space import (
    Parameter,
    argument_problem,
    describe,
    engine_argument_names,
    in_order,
    is_active,
    with_sound_conditions,
)

NUMBERS = st.integers(-1000, 1000) | st.floats(-1000, 1000, allow_nan=False)
CHOICES = st.lists(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5), st.lists(st.integers(), max_size=2)),
    min_size=1,
    max_size=6,
)


@st.composite
def parameters(draw: st.DrawFn) -> Parameter:
    """Any parameter that a study file may hold."""
    kind = draw(st.sampled_from(["choices", "int", "float", "step", "log"]))
    if kind == "choices":
        return Parameter.model_validate(draw(CHOICES.filter(_distinct)))
    if kind == "int":
        low = draw(st.integers(-1000, 1000))
        return Parameter(type="int", low=low, high=low + draw(st.integers(0, 1000)))
    if kind == "log":
        low = draw(st.integers(1, 1000))
        return Parameter(low=low, high=low + draw(st.integers(0, 100_000)), log=True)
    low = draw(st.integers(-100, 100)) / 100
    if kind == "float":
        return Parameter(type="float", low=low, high=low + draw(st.floats(0.01, 10)))
    step = draw(st.integers(1, 50)) / 100
    return Parameter(type="float", low=low, high=low + draw(st.integers(1, 500)) / 100, step=step)


def _distinct(choices: list[Any]) -> bool:
    try:
        Parameter.model_validate(choices)
    except ValidationError:
        return False
    return True


@given(parameters(), st.floats(0, 1, exclude_max=True))
def test_every_position_is_a_value_of_the_parameter_that_survives_optuna(parameter: Parameter, position: float) -> None:
    value = value_at(parameter, position)
    encoded = encode(parameter, value)

    assert parameter.contains(value)
    assert _distribution(parameter)._contains(_distribution(parameter).to_internal_repr(encoded))
    assert parameter.contains(decode(parameter, encoded))


@given(parameters())
def test_every_value_of_a_finite_parameter_is_met(parameter: Parameter) -> None:
    assume(parameter.cardinality <= 200 and not parameter.log)
    count = int(parameter.cardinality)

    values = [value_at(parameter, (k + 0.5) / count) for k in range(count)]

    assert len({repr(v) for v in values}) == count


def test_steps_that_binary_fractions_miss_belong_to_the_range_up_to_its_end() -> None:
    utilisation = Parameter(low=0.5, high=0.95, step=0.05)

    assert utilisation.cardinality == 10
    assert all(utilisation.contains(round(0.5 + 0.05 * k, 2)) for k in range(10))
    assert not utilisation.contains(0.52)
    assert not utilisation.contains(1.0)


def test_range_that_its_step_does_not_divide_ends_at_the_last_step() -> None:
    parameter = Parameter(low=64, high=100, step=16)

    assert parameter.cardinality == 3
    assert [decode(parameter, k) for k in range(3)] == [64, 80, 96]
    assert not parameter.contains(100)


@pytest.mark.parametrize(
    ("choices", "value", "belongs"),
    [
        ((0, 4, 8), 0.0, True),
        ((1, 2, 4), True, False),
        ((True, False), 1, False),
        ((True, False), True, True),
        (("auto", "fp8"), "fp8", True),
        ((None, {"level": 3}), {"level": 3}, True),
        ((None, "x"), None, True),
        ((1, 2, 4), None, False),
    ],
    ids=str,
)
def test_a_choice_is_known_by_what_it_means(choices: tuple[Any, ...], value: Any, belongs: bool) -> None:
    assert Parameter(choices=choices).contains(value) is belongs


@pytest.mark.parametrize("value", [True, "4", None, math.nan, math.inf, 4.5, 0, 9], ids=str)
def test_an_integer_range_holds_its_whole_numbers_only(value: Any) -> None:
    parameter = Parameter(low=1, high=8)

    assert parameter.is_int
    assert parameter.contains(4)
    assert not parameter.contains(value)


def test_numbers_are_ordered_and_two_choices_or_words_are_not() -> None:
    assert Parameter(choices=(8, 1, 2.5)).ordered_choices == (1, 2.5, 8)


def test_zero_that_means_no_limit_is_next_to_the_largest_value() -> None:
    choices = Parameter(choices=(0, 2048, 1024))

    space = in_order({"long_prefill_token_threshold": choices, "max_logprobs": choices})

    assert space["long_prefill_token_threshold"].ordered_choices == (1024, 2048, 0)
    assert space["max_logprobs"].ordered_choices == (0, 1024, 2048)
    assert not Parameter(choices=(1, 2)).is_ordered
    assert not Parameter(choices=("a", "b", "c")).is_ordered
    assert not Parameter(choices=(1, True, 2)).is_ordered


def test_arguments_are_those_of_the_vllm_that_is_installed() -> None:
    names = engine_argument_names()

    assert {"model", "max_num_seqs", "gpu_memory_utilization", "disable_log_stats"} <= names
    assert not any(name.startswith("_") for name in names)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("max_num_seqs", None),
        ("env.OMP_NUM_THREADS", None),
        ("env.9X", "'9X' is no name of an environment variable"),
        ("--max-num-seqs", "write it as in Python: max_num_seqs"),
        ("max_num_sequences", "vLLM has no engine argument max_num_sequences; did you mean max_num_seqs?"),
        ("swap_space", "vLLM has removed the argument swap_space; the nearest is cpu_offload_gb"),
        ("preemption_mode", "vLLM has removed the argument preemption_mode"),
        ("zzzz", "vLLM has no engine argument zzzz"),
        ("model", "set the key `model` of the study instead"),
    ],
)
def test_an_argument_that_cannot_be_set_says_which_can(name: str, problem: str | None) -> None:
    known = {"max_num_seqs", "max_num_batched_tokens", "cpu_offload_gb", "model"}

    assert argument_problem(name, known) == problem


def test_a_removed_argument_that_this_vllm_still_has_is_no_problem() -> None:
    assert argument_problem("swap_space", {"swap_space", "cpu_offload_gb"}) is None


def test_description_shows_every_form() -> None:
    space = {
        "a": Parameter(choices=(1, None, "x")),
        "b": Parameter(low=64, high=4096, log=True),
        "c": Parameter(low=0.5, high=0.9, step=0.1),
    }

    assert describe(space) == [("a", '1, null, "x"'), ("b", "64 … 4096, log"), ("c", "0.5 … 0.9, step 0.1")]


def test_description_says_where_a_parameter_is_searched() -> None:
    space = {"a": Parameter(choices=(1, 2, 4)), "b": Parameter(low=1, high=8, when={"a": (2, 4)})}

    assert describe(space)[1] == ("b", "1 … 8; where a is 2 or 4")


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({"a": Parameter(choices=(1, 2), when={"b": (1,)})}, "a.when names b, which is not in the space"),
        (
            {"a": Parameter(choices=(1, 2), when={"b": (3,)}), "b": Parameter(choices=(1, 2))},
            "a.when: b is never 3 in this space",
        ),
        (
            {"a": Parameter(choices=(1, 2), when={"b": ()}), "b": Parameter(choices=(1, 2))},
            "a.when: give at least one value of b",
        ),
        ({"a": Parameter(choices=(1, 2), when={"a": (1,)})}, "in a circle: a → a"),
        (
            {
                "a": Parameter(choices=(1, 2), when={"b": (1,)}),
                "b": Parameter(choices=(1, 2), when={"c": (1,)}),
                "c": Parameter(choices=(1, 2), when={"a": (1,)}),
            },
            "in a circle",
        ),
        (
            {"a": Parameter(choices=(1, 2), when={"b": (0.5,)}), "b": Parameter(low=0.1, high=0.9)},
            "a.when: b is any number, and hardly ever 0.5; give it a step",
        ),
        (
            {
                "a": Parameter(choices=(1, 2), when={"b": (1,), "c": (2,)}),
                "b": Parameter(choices=(1, 2), when={"c": (1,)}),
                "c": Parameter(choices=(1, 2)),
            },
            "a is never searched: its `when` and those of what it hangs on never agree on c",
        ),
    ],
)
def test_conditions_that_cannot_be_met_are_refused_by_name(space: dict[str, Parameter], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        with_sound_conditions(space)


@pytest.mark.parametrize(
    ("other", "written", "meant"),
    [
        (Parameter(choices=(1, 2, 8)), (8.0, 1, 8), (1, 8)),
        (Parameter(low=0.5, high=0.95, step=0.05), (0.65000001, 0.5), (0.5, 0.65)),
        (Parameter(low=1, high=16), (16.0, 4), (4, 16)),
    ],
)
def test_conditions_name_the_values_as_the_space_has_them(
    other: Parameter, written: tuple[float, ...], meant: tuple[float, ...]
) -> None:
    sound = with_sound_conditions({"a": Parameter(choices=(1, 2), when={"b": written}), "b": other})

    assert repr(sound["a"].when["b"]) == repr(meant)
    assert all(is_active(sound, "a", {"a": 1, "b": value}) for value in meant)


def test_two_conditions_on_the_same_parameter_hold_where_both_do() -> None:
    space = {
        "a": Parameter(choices=(1, 2), when={"b": (1,), "c": (2, 3)}),
        "b": Parameter(choices=(1, 2), when={"c": (1, 2)}),
        "c": Parameter(choices=(1, 2, 3)),
    }

    sound = with_sound_conditions(space)

    assert [c for c in (1, 2, 3) if is_active(sound, "a", {"a": 1, "b": 1, "c": c})] == [2]


def test_a_mapping_is_the_same_choice_in_whatever_order_its_keys_come_back() -> None:
    parameter = Parameter(choices=({"mode": 0, "cudagraph_mode": "NONE"}, {"mode": 3}, None))

    assert parameter.contains({"cudagraph_mode": "NONE", "mode": 0})
    assert parameter.as_choice({"cudagraph_mode": "NONE", "mode": 0}) == parameter.choices[0]
    with pytest.raises(ValueError, match="twice"):
        Parameter(choices=({"mode": 0, "level": 1}, {"level": 1, "mode": 0}))


def test_points_of_the_design_set_only_what_is_searched_in_them() -> None:
    space = {
        "max_long_partial_prefills": Parameter(low=1, high=4, when={"max_num_partial_prefills": (4,)}),
        "max_num_partial_prefills": Parameter(choices=(1, 2, 4)),
    }

    points = design_points(space, 64, seed=1)

    assert all(("max_long_partial_prefills" in p) == (p["max_num_partial_prefills"] == 4) for p in points)
    assert len({str(p) for p in points}) == 2 + 4


def test_more_design_points_begin_with_the_same_ones() -> None:
    space = {"a": Parameter(low=1, high=8), "b": Parameter(choices=("x", "y"))}

    assert design_points(space, 9, seed=3)[:4] == design_points(space, 4, seed=3)
    assert len({str(p) for p in design_points(space, 8, seed=3)}) > 4
