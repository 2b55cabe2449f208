from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tuner.errors import WorkloadError
from tuner.workload.build import BuiltWorkload, build
from tuner.workload.prompts import common_prefix, shared_tokens, with_distinct_heads
from tuner.workload.spec import WorkloadSpec

Make = Callable[..., BuiltWorkload]

FINGERPRINTS = {
    "long_documents": "56114066bda0ace4",
    "long_documents_text": "bb0f11a77c2f1803",
    "shared_prefix": "5b18455f4312d885",
    "sharegpt": "fdf55c07380d2d7a",
    "jsonl": "cd63cf5b42044521",
    "mooncake": "7cc00b75944828e7",
    "azure": "b02f4e8085f78452",
}
"""Pinned: a change means that every study's workload changes. The same on every machine, Python and NumPy."""


@pytest.mark.parametrize("kind", FINGERPRINTS)
def test_the_fingerprint_of_every_kind_is_the_same_everywhere(make: Make, sections: dict[str, Any], kind: str) -> None:
    assert make(sections[kind]).workload.fingerprint() == FINGERPRINTS[kind]


def test_every_kind_is_pinned(sections: dict[str, Any]) -> None:
    assert FINGERPRINTS.keys() == sections.keys()


@pytest.mark.parametrize("kind", ["long_documents", "sharegpt", "mooncake"])
def test_changing_anything_changes_the_fingerprint(make: Make, sections: dict[str, Any], kind: str) -> None:
    workload = make(sections[kind]).workload
    first, *rest = workload.requests
    ids = first.prompt_token_ids
    changed_requests = [
        replace(first, prompt_token_ids=(*ids[:-1], ids[-1] + 1)),
        replace(first, prompt_token_ids=ids[:-1]),
        replace(first, arrival_s=first.arrival_s + 1e-6),
        replace(first, output_tokens=first.output_tokens + 1),
        replace(first, shared_tokens=first.shared_tokens + 1),
        replace(first, user=0),
        replace(first, think_s=0.25),
    ]
    changed = [replace(workload, requests=(request, *rest)) for request in changed_requests]
    changed += [
        replace(workload, max_concurrency=99),
        replace(workload, vocabulary=(0, 9)),
        replace(workload, keeps_text=not workload.keeps_text),
        replace(workload, requests=tuple(rest)),
        workload,
    ]

    assert len({w.fingerprint() for w in changed}) == len(changed)


@pytest.mark.parametrize("kind", FINGERPRINTS)
def test_another_seed_gives_another_workload(make: Make, sections: dict[str, Any], kind: str) -> None:
    one, other = (make({**sections[kind], "seed": seed}).workload for seed in (1, 2))

    assert one.fingerprint() != other.fingerprint()


def test_the_seed_of_the_ids_is_not_the_seed_of_the_clock(make: Make, sections: dict[str, Any]) -> None:
    section = sections["long_documents"]
    faster = {**section, "arrivals": {"kind": "poisson", "rate_per_s": 50}}

    slow, fast = make(section).workload, make(faster).workload

    assert [r.prompt_token_ids for r in slow.requests] == [r.prompt_token_ids for r in fast.requests]


LENGTHS = st.one_of(
    st.integers(1, 300),
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.dictionaries(st.integers(1, 300), st.integers(1, 9), min_size=1, max_size=4),
)


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 40), st.integers(0, 2**63 - 1))
def test_long_documents_have_exact_counts_and_lengths_and_share_nothing(lengths: Any, count: int, seed: int) -> None:
    section = {
        "kind": "long_documents",
        "requests": count,
        "prompt_tokens": lengths,
        "output_tokens": {"uniform": {"low": 2, "high": 5}},
        "arrivals": {"kind": "poisson", "rate_per_s": 1},
        "seed": seed,
    }
    spec = TypeAdapter(WorkloadSpec).validate_python(section)

    built = build(spec, tokenizer=None, vocabulary=(10, 50_000), base_folder=Path())

    requests = built.workload.requests
    allowed = {lengths} if isinstance(lengths, int) else set(lengths)
    assert len(requests) == count
    assert {r.prompt_tokens for r in requests} <= allowed
    assert all(10 <= token < 50_000 for r in requests for token in r.prompt_token_ids)
    assert all(2 <= r.output_tokens <= 5 for r in requests)
    assert not built.workload.shares_prefixes
    assert not any(shared_tokens([np.array(r.prompt_token_ids, dtype=np.uint32) for r in requests]))


def test_counts_of_a_mapping_are_kept_exactly(make: Make, sections: dict[str, Any]) -> None:
    workload = make(sections["long_documents"]).workload

    assert Counter(r.prompt_tokens for r in workload.requests) == {512: 2, 64: 6}
    assert workload.max_concurrency == 4
    assert workload.longest_tokens == 520


def test_the_longest_document_on_offer_is_exact(make: Make, sections: dict[str, Any]) -> None:
    workload = make({**sections["long_documents"], "prompt_tokens": {131_072: 2}}).workload

    assert [r.prompt_tokens for r in workload.requests] == [131_072, 131_072]


@pytest.mark.parametrize("documents", [None, "docs"])
def test_shared_prefixes_are_shared_equally_and_questions_are_not(
    make: Make, sections: dict[str, Any], documents: str | None
) -> None:
    workload = make({**sections["shared_prefix"], "documents": documents}).workload

    groups: dict[tuple[int, ...], int] = Counter(r.prompt_token_ids[: r.shared_tokens] for r in workload.requests)
    assert sorted(groups.values()) == [4, 5]
    assert {len(prefix) for prefix in groups} == {64, 128}
    assert all(r.prompt_tokens == r.shared_tokens + 32 for r in workload.requests)
    for a, b in combinations(workload.requests, 2):
        ids = [np.array(r.prompt_token_ids, dtype=np.uint32) for r in (a, b)]
        same_group = a.shared_tokens == b.shared_tokens
        assert common_prefix(*ids) < (a.shared_tokens if same_group else 0) + 16


def test_two_orders_of_one_prefix_are_not_grouped_in_time(make: Make, sections: dict[str, Any]) -> None:
    workload = make({**sections["shared_prefix"], "requests": 40}).workload

    order = [r.shared_tokens for r in workload.requests]
    assert order not in (sorted(order), sorted(order, reverse=True), [order[0], order[1]] * 20)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=2, max_size=12))
def test_shared_tokens_are_the_longest_prefix_in_common_with_any_other(prompts: list[list[int]]) -> None:
    arrays = [np.array(ids, dtype=np.uint32) for ids in prompts]

    expected = [max(common_prefix(a, b) for b in arrays if b is not a) for a in arrays]

    assert shared_tokens(arrays) == [length if length >= 16 else 0 for length in expected]


@given(st.lists(st.lists(st.integers(0, 3), min_size=14, max_size=40), min_size=2, max_size=12))
def test_distinct_heads_change_as_little_as_they_must(prompts: list[list[int]]) -> None:
    arrays = [np.array(ids, dtype=np.uint32) for ids in prompts]

    told_apart = with_distinct_heads(arrays, seed=1, vocabulary=(0, 1000))

    heads = [ids[:16].tobytes() for ids in told_apart if len(ids) >= 16]
    assert len(set(heads)) == len(heads)
    assert np.array_equal(told_apart[0], arrays[0])
    assert all(np.array_equal(new[16:], old[16:]) for new, old in zip(told_apart, arrays, strict=True))


def test_prompts_that_cannot_be_told_apart_are_an_error() -> None:
    markers = [np.array([1] * 20, dtype=np.uint32)] * 2

    with pytest.raises(WorkloadError, match="prompt 2"):
        with_distinct_heads(markers, seed=1, vocabulary=(100, 1000))


@pytest.mark.parametrize("vocabulary", [(5, 5), (5, 6), (-1, 100)])
def test_a_vocabulary_without_ids_is_an_error(sections: dict[str, Any], vocabulary: tuple[int, int]) -> None:
    spec = TypeAdapter(WorkloadSpec).validate_python(sections["long_documents"])

    with pytest.raises(WorkloadError, match="vocabulary"):
        build(spec, tokenizer=None, vocabulary=vocabulary, base_folder=Path())


def test_text_without_a_tokenizer_is_an_error(sections: dict[str, Any], tmp_path: Path) -> None:
    spec = TypeAdapter(WorkloadSpec).validate_python(sections["jsonl"])

    with pytest.raises(WorkloadError, match="tokenizer"):
        build(spec, tokenizer=None, vocabulary=(0, 100), base_folder=tmp_path)
