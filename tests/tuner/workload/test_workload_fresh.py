from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.workload.build import BuiltWorkload
from tuner.workload.fresh import fresh
from tuner.workload.model import Request, Workload
from tuner.workload.prompts import common_prefix

Make = Callable[..., BuiltWorkload]
KINDS = ["long_documents", "long_documents_text", "shared_prefix", "sharegpt", "jsonl", "mooncake", "azure"]


def shape(workload: Workload) -> list[Request]:
    return [replace(r, prompt_token_ids=(0,) * r.prompt_tokens) for r in workload.requests]


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return common_prefix(np.array(a, dtype=np.uint32), np.array(b, dtype=np.uint32))


def sharing(workload: Workload) -> list[int]:
    return [common(a.prompt_token_ids, b.prompt_token_ids) for a, b in combinations(workload.requests, 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_ids_change(make: Make, sections: dict[str, Any], kind: str) -> None:
    workload = make(sections[kind]).workload

    again = fresh(workload, salt=3, repeat=1)

    assert shape(again) == shape(workload)
    assert sharing(again) == sharing(workload)
    assert again.fingerprint() != workload.fingerprint()
    assert again == fresh(workload, salt=3, repeat=1)


@pytest.mark.parametrize("kind", KINDS)
def test_no_two_salts_or_repeats_share_a_block_with_each_other_or_the_original(
    make: Make, sections: dict[str, Any], kind: str
) -> None:
    workload = make(sections[kind]).workload
    runs = [workload, *(fresh(workload, salt, repeat) for salt in (0, 1, 12) for repeat in (0, 1, 2))]

    heads = [{r.prompt_token_ids[:4] for r in run.requests} for run in runs]

    assert all(not (a & b) for a, b in combinations(heads, 2))


def test_random_ids_are_all_replaced(make: Make, sections: dict[str, Any]) -> None:
    workload = make(sections["long_documents"]).workload

    again = fresh(workload, 0, 0)

    pairs = zip(workload.requests, again.requests, strict=True)
    equal = sum(a == b for x, y in pairs for a, b in zip(x.prompt_token_ids, y.prompt_token_ids, strict=True))
    assert equal < 5
    assert all(100 <= token < 32_000 for r in again.requests for token in r.prompt_token_ids)


def test_text_is_kept_after_the_first_block_and_so_are_the_markers_of_a_template(
    make: Make, sections: dict[str, Any]
) -> None:
    workload = make(sections["jsonl"]).workload

    again = fresh(workload, 0, 0)

    for old, new in zip(workload.requests, again.requests, strict=True):
        assert new.prompt_token_ids[0] == old.prompt_token_ids[0] == 2
        assert new.prompt_token_ids[1:17] != old.prompt_token_ids[1:17]
        assert new.prompt_token_ids[17:] == old.prompt_token_ids[17:]


@given(
    st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=20), min_size=2, max_size=6),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_prompts_share_exactly_what_they_shared_before(prompts: list[list[int]], text: bool, salt: int) -> None:
    requests = tuple(Request(0.0, tuple(ids), 1) for ids in prompts)
    workload = Workload("any", requests, vocabulary=(3, 11), seed=1, keeps_text=text)

    assert sharing(fresh(workload, salt, 0)) == sharing(workload)


def test_even_a_prompt_of_one_repeated_token_gets_ids_that_are_unlike_its_others() -> None:
    workload = Workload("flat", (Request(0.0, (500,) * 64, 1),), vocabulary=(100, 32_000), seed=1)

    runs = [fresh(workload, 0, repeat).requests[0].prompt_token_ids for repeat in range(20)]

    assert all(common(a, b) == 0 or common(a, b) < 4 for a, b in combinations(runs, 2))
    assert len(set(runs[0])) > 50
