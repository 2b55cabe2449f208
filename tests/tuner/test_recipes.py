from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tuner.recipes import RECIPES, Skipped, applicable
from tuner.space import argument_problem, engine_argument_names


def changes(name: str, **study: Any) -> Mapping[str, Any] | Skipped:
    return applicable(name, **{"fixed": {}, "longest_tokens": 1000, "num_gpus": 1, **study})


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_sets_arguments_of_the_installed_vllm_and_says_what_it_is_for(name: str) -> None:
    recipe = RECIPES[name]

    assert not [p for argument in recipe.args if (p := argument_problem(argument, engine_argument_names()))]
    assert recipe.purpose
    assert recipe.source


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_applies_to_a_short_workload_on_four_gpus(name: str) -> None:
    assert changes(name, num_gpus=4) == RECIPES[name].args


def test_what_the_study_fixes_stays_fixed() -> None:
    applied = changes("low-latency", fixed={"max_model_len": 8192, "max_num_seqs": 7})

    assert applied == {"gpu_memory_utilization": 0.85, "max_num_batched_tokens": 4096}


def test_recipe_too_short_for_the_workload_is_skipped_with_both_lengths() -> None:
    assert changes("low-latency", longest_tokens=2049) == Skipped(
        "low-latency", "its max_model_len 2048 cannot hold the longest request of 2049 tokens"
    )
    assert not isinstance(changes("low-latency", longest_tokens=2048), Skipped)


def test_length_that_the_study_fixes_is_the_one_that_counts() -> None:
    assert not isinstance(changes("low-latency", longest_tokens=4000, fixed={"max_model_len": 4096}), Skipped)


def test_recipe_for_more_gpus_than_the_study_has_is_skipped() -> None:
    skipped = changes("long-document-a6000", num_gpus=2)

    assert skipped == Skipped("long-document-a6000", "it needs 4 GPUs (tensor_parallel_size), the study has 2")


def test_recipe_of_which_everything_is_fixed_is_skipped() -> None:
    skipped = changes("low-latency", fixed=dict(RECIPES["low-latency"].args))

    assert skipped == Skipped("low-latency", "everything that it sets is fixed by the study")


def test_study_on_the_cpu_counts_as_one_device() -> None:
    assert not isinstance(changes("low-latency", num_gpus=0), Skipped)
