from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.errors import WorkloadError
from tuner.workload import documents, trace
from tuner.workload.build import BuiltWorkload
from tuner.workload.source import Passage, Source, token_count

POISSON = {"kind": "poisson", "rate_per_s": 2.0}
Make = Callable[..., BuiltWorkload]
Lines = Callable[..., Path]


def jsonl(**changes: Any) -> dict[str, Any]:
    return {"kind": "jsonl", "path": "p.jsonl", "arrivals": POISSON, "shuffle": False, **changes}


def sharegpt(**changes: Any) -> dict[str, Any]:
    return {"kind": "sharegpt", "path": "s.json", "arrivals": POISSON, "shuffle": False, **changes}


def chat(prompt: Any, *answers: Any) -> dict[str, Any]:
    return {"conversations": [{"value": text} for text in (prompt, *answers)]}


# Lines --------------------------------------------------------------------------------------------------------------


def test_bad_lines_of_jsonl_are_counted_and_named_and_the_good_ones_are_used(make: Make, lines: Lines) -> None:
    path = lines(
        "p.jsonl",
        "\ufeff" + json.dumps({"prompt": "first of all", "output_tokens": 3}),
        "{broken",
        "",
        [1, 2],
        {"prompt": "", "output_tokens": 3},
        {"prompt": "no number"},
        {"prompt": "zero", "output_tokens": 0},
        {"prompt": "true", "output_tokens": True},
        b'{"prompt": "\xff", "output_tokens": 3}',
        {"prompt": "last\u2028of all", "output_tokens": "4"},
    )

    built = make(jsonl())

    assert [r.output_tokens for r in built.workload.requests] == [3, 4]
    assert [line.line for line in built.skipped] == [2, 4, 5, 6, 7, 8, 9]
    assert {line.path for line in built.skipped} == {str(path)}
    assert "not UTF-8" in str(built.skipped[-1])
    assert str(built.skipped[0]).startswith(f"{path}, line 2: not JSON")


@pytest.mark.parametrize(
    ("name", "content", "section"),
    [
        ("p.jsonl", b"{broken\n[]\n", jsonl()),
        ("p.jsonl", b"", jsonl()),
        ("p.jsonl", b'{"prompt": "a b c", "output_tokens": 9}', jsonl(max_total_tokens=8)),
        ("s.json", b"[]", sharegpt()),
        ("s.json", b'[{"conversations": [{"value": "only one turn"}]}]', sharegpt()),
        ("s.json", b"[1, 2", sharegpt()),
        ("s.json", b'{"a": 1}', sharegpt()),
        ("s.json", b"", sharegpt()),
        ("s.json", b"\xff\xfe", sharegpt()),
        ("t.jsonl", b'{"timestamp": 0}\n', {"kind": "trace", "path": "t.jsonl"}),
        ("t.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\n", {"kind": "trace", "path": "t.csv"}),
        ("t.csv", b"when,how,what\n1,2,3\n", {"kind": "trace", "path": "t.csv"}),
        ("t.log", b"x\n", {"kind": "trace", "path": "t.log"}),
    ],
)
def test_a_file_with_nothing_usable_is_an_error_that_names_it(
    make: Make, tmp_path: Path, name: str, content: bytes, section: dict[str, Any]
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(WorkloadError, match=name):
        make(section)


@pytest.mark.parametrize("section", [jsonl(), sharegpt(), {"kind": "trace", "path": "t.csv"}])
def test_a_missing_file_is_an_error_that_names_it(make: Make, section: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match="cannot be read"):
        make(section)


@given(st.one_of(st.integers(), st.floats(), st.text(), st.booleans(), st.none(), st.lists(st.integers())))
def test_a_number_of_tokens_is_whole_positive_and_within_reason(value: Any) -> None:
    number = token_count(value)

    if number is not None:
        assert 1 <= number <= 10_000_000
        assert float(value) == number
        assert not isinstance(value, bool)


KEYS = [
    "prompt",
    "output_tokens",
    "text",
    "conversations",
    "value",
    "timestamp",
    "input_length",
    "output_length",
    "hash_ids",
]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.sampled_from([1, 40, 10**400, "a b", "\ud800"])
)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(KEYS), v, max_size=6), max_leaves=8
)
ROWS = st.dictionaries(st.sampled_from(KEYS), SCALARS, min_size=4) | st.builds(chat, SCALARS, SCALARS) | VALUES
LINES = ROWS.map(json.dumps).map(str.encode) | st.binary(max_size=40) | st.just(b'2023-11-16 18:15:46,5,"6')
FUZZED: dict[str, Any] = {
    "p.jsonl": jsonl(requests=2),
    "s.json": sharegpt(min_tokens=1),
    "docs/d.jsonl": {
        "kind": "long_documents",
        "requests": 3,
        "prompt_tokens": 20,
        "output_tokens": 1,
        "documents": "docs",
        "arrivals": POISSON,
    },
    "t.jsonl": {"kind": "trace", "path": "t.jsonl", "max_total_tokens": 5000},
    "t.csv": {"kind": "trace", "path": "t.csv"},
}


@pytest.mark.parametrize("name", FUZZED)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(LINES, max_size=6))
def test_whatever_a_file_holds_it_is_used_skipped_or_refused(
    make: Make, tmp_path: Path, name: str, rows: list[bytes]
) -> None:
    content = b"[" + b",".join(rows) + b"]" if name == "s.json" else b"\n".join(rows)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes((b"TIMESTAMP,ContextTokens,GeneratedTokens\n" if name == "t.csv" else b"") + content)

    with contextlib.suppress(WorkloadError):
        built = make(FUZZED[name])
        assert built.workload.requests
        assert built.workload.fingerprint()


# JSONL and ShareGPT -------------------------------------------------------------------------------------------------


def test_jsonl_prompts_are_wrapped_in_the_chat_template_unless_told_otherwise(make: Make, lines: Lines) -> None:
    lines("p.jsonl", {"prompt": "hello world", "output_tokens": 3}, {"prompt": "other words", "output_tokens": 3})

    wrapped = make(jsonl()).workload
    bare = make(jsonl(chat_template=False)).workload

    assert [r.prompt_tokens for r in wrapped.requests] == [25, 25]
    assert [r.shared_tokens for r in wrapped.requests] == [22, 22]
    assert [r.prompt_tokens for r in bare.requests] == [3, 3]
    assert bare.requests[0].prompt_token_ids[0] == 1


def test_output_tokens_of_the_study_file_replace_those_of_the_prompts(make: Make, lines: Lines) -> None:
    lines("p.jsonl", {"prompt": "a b c"}, {"prompt": "d e f", "output_tokens": 9})

    built = make(jsonl(output_tokens=5))

    assert [r.output_tokens for r in built.workload.requests] == [5, 5]
    assert not built.skipped


def test_more_requests_than_prompts_copies_them_without_shared_blocks(make: Make, lines: Lines) -> None:
    lines("p.jsonl", *({"prompt": " ".join(f"w{i}x{j}" for j in range(40)), "output_tokens": i + 1} for i in range(3)))

    workload = make(jsonl(requests=8, chat_template=False)).workload

    assert [r.output_tokens for r in workload.requests] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert len({r.prompt_token_ids[:16] for r in workload.requests}) == 8
    assert workload.requests[0].prompt_token_ids[17:] == workload.requests[3].prompt_token_ids[17:]
    assert not workload.shares_prefixes


def test_shuffling_takes_another_order_of_the_same_prompts(make: Make, lines: Lines) -> None:
    lines("p.jsonl", *({"prompt": f"w{i} v{i}", "output_tokens": i + 1} for i in range(30)))

    ordered, shuffled = (make(jsonl(shuffle=shuffle)).workload.requests for shuffle in (False, True))

    assert [r.output_tokens for r in ordered] == list(range(1, 31))
    assert [r.output_tokens for r in shuffled] != list(range(1, 31))
    assert {r.prompt_token_ids for r in ordered} == {r.prompt_token_ids for r in shuffled}


def test_sharegpt_takes_the_first_two_turns_and_names_what_it_passes_over(make: Make, tmp_path: Path) -> None:
    entries = [
        chat("one two three four", "a b c d e", "later turn"),
        chat("only a prompt here"),
        {"conversations": "text"},
        chat("too short", "a b c d e"),
        chat("one two three four", "a"),
        chat("x " * 1100, "a b c d e"),
        chat("x " * 1000, "a " * 1100),
        chat(7, "a b c d e"),
        "text",
        chat("five six seven eight nine", "a b c d"),
    ]
    (tmp_path / "s.json").write_text("[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n")

    built = make(sharegpt())

    assert [(r.prompt_tokens, r.output_tokens) for r in built.workload.requests] == [(5, 6), (6, 5)]
    assert sorted(line.line for line in built.skipped) == [3, 4, 5, 6, 7, 8, 9, 10]


def test_a_sharegpt_file_that_was_cut_off_is_used_up_to_there(make: Make, tmp_path: Path) -> None:
    whole = json.dumps([chat("one two three four", "a b c d e"), chat("never read", "a b c d e")], indent=2)
    (tmp_path / "s.json").write_text(whole[:-40])

    built = make(sharegpt())

    assert len(built.workload.requests) == 1
    assert "not JSON from here on" in built.skipped[0].reason
    assert built.skipped[0].line == 12


def test_sharegpt_with_a_fixed_output_length_ignores_the_answers(make: Make, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps([chat("one two three four", ""), chat("x " * 1000, "a")]))

    built = make(sharegpt(output_tokens=1500))

    assert [r.output_tokens for r in built.workload.requests] == [1500]
    assert "max_total_tokens" in built.skipped[0].reason


def test_no_more_is_tokenised_than_is_needed(make: Make, lines: Lines, tokenizer: Any) -> None:
    lines("p.jsonl", *({"prompt": f"w{i}", "output_tokens": 1} for i in range(500)))

    make(jsonl(requests=5, chat_template=False))

    assert tokenizer.encoded == 5


# Documents ----------------------------------------------------------------------------------------------------------


def folder(**changes: Any) -> dict[str, Any]:
    section = {"kind": "long_documents", "requests": 4, "prompt_tokens": 50, "output_tokens": 1, "documents": "docs"}
    return {**section, "arrivals": POISSON, **changes}


def test_documents_of_every_kind_are_cut_to_exact_lengths(make: Make, lines: Lines) -> None:
    lines("docs/a.txt", "a b c d e f g")
    lines("docs/deep/er/b.MD", "h i j k l m n o p")
    lines("docs/c.jsonl", {"text": "q r s t u v"}, {"text": 5}, {"body": "w"}, "{", {"text": "x y z"})
    lines("docs/d.txt", b"fine\nbroken \xff")
    lines("docs/e.txt", "  ")
    lines("docs/f.pdf", "not read")

    built = make(folder(prompt_tokens={7: 1, 50: 1}))

    assert sorted(r.prompt_tokens for r in built.workload.requests) == [7, 7, 50, 50]
    assert sorted((Path(s.path).name, s.line) for s in built.skipped) == [
        ("c.jsonl", 2),
        ("c.jsonl", 3),
        ("c.jsonl", 4),
        ("d.txt", 2),
        ("e.txt", 1),
    ]


def test_documents_that_all_begin_alike_share_no_first_block(make: Make, lines: Lines) -> None:
    for i in range(20):
        lines(f"docs/{i}.txt", "the same cover page " * 12 + f"\n{i}")

    workload = make(folder(requests=40, prompt_tokens=49)).workload

    assert len({r.prompt_token_ids[:16] for r in workload.requests}) == 40
    assert all(r.prompt_tokens == 49 and r.shared_tokens == 0 for r in workload.requests)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=30), min_size=1, max_size=5), st.data())
def test_pieces_follow_one_another_through_the_text_and_begin_again(texts: list[list[int]], data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=6))
    source = Source(tuple(Passage(np.array(text, dtype=np.uint32)) for text in texts))

    pieces = documents.cut(source, lengths)

    corpus = [token for text in texts for token in text]
    flat = [int(token) for piece in pieces for token in piece]
    assert [len(piece) for piece in pieces] == lengths
    assert flat == [corpus[i % len(corpus)] for i in range(len(flat))]


@pytest.mark.parametrize("prepare", [lambda p: None, lambda p: p.mkdir(), lambda p: (p.mkdir(), (p / "e.txt").touch())])
def test_a_folder_without_documents_is_an_error(make: Make, tmp_path: Path, prepare: Callable[[Path], None]) -> None:
    prepare(tmp_path / "docs")

    with pytest.raises(WorkloadError, match="docs"):
        make(folder())


# Traces -------------------------------------------------------------------------------------------------------------


def test_equal_hash_ids_of_a_mooncake_trace_are_equal_tokens(make: Make, lines: Lines) -> None:
    lines(
        "t.jsonl",
        {"timestamp": 1000, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 3500, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 3]},
        {"timestamp": 3000, "input_length": 700, "output_length": 1, "hash_ids": [0, 4]},
        {"timestamp": 4000, "input_length": 600, "output_length": 1, "hash_ids": [8]},
        {"timestamp": 4000, "input_length": 40, "output_length": 1},
    )

    requests = make({"kind": "trace", "path": "t.jsonl", "time_scale": 2}).workload.requests

    assert [r.arrival_s for r in requests] == [0.0, 4.0, 5.0, 6.0, 6.0]
    assert [r.prompt_tokens for r in requests] == [1500, 700, 1100, 600, 40]
    assert [r.shared_tokens for r in requests] == [1024, 512, 1024, 0, 0]
    assert requests[0].prompt_token_ids[:1024] == requests[2].prompt_token_ids[:1024]


def test_bad_lines_of_a_mooncake_trace_are_named(make: Make, lines: Lines) -> None:
    good = {"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [0]}
    lines(
        "t.jsonl",
        good,
        {**good, "timestamp": "soon"},
        {**good, "input_length": 0},
        {**good, "input_length": 10**12},
        {**good, "output_length": None},
        {**good, "hash_ids": ["a"]},
        {**good, "hash_ids": 4},
        {**good, "input_length": 900},
        good,
    )

    built = make({"kind": "trace", "path": "t.jsonl", "max_total_tokens": 100})

    assert len(built.workload.requests) == 2
    assert [line.line for line in built.skipped] == [2, 3, 4, 5, 6, 7, 8]


def test_an_azure_trace_keeps_its_times_and_names_its_bad_lines(make: Make, lines: Lines) -> None:
    lines(
        "t.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\r",
        "2023-11-16 18:15:46.6805900,374,44\r",
        "2023-11-16 18:15:50.9951690,396,109",
        "yesterday,1,1",
        "2023-11-16 18:15:51,0,1",
        "2023-11-16 18:15:52,1",
        "2023-11-16 18:15:47.680590+00:00,20,3",
    )

    built = make({"kind": "trace", "path": "t.csv"})

    assert [r.arrival_s for r in built.workload.requests] == [0.0, 1.0, 4.314579]
    assert [(r.prompt_tokens, r.output_tokens) for r in built.workload.requests] == [(374, 44), (20, 3), (396, 109)]
    assert [line.line for line in built.skipped] == [4, 5, 6]


def test_a_limit_takes_the_first_usable_lines_only(make: Make, lines: Lines) -> None:
    row = {"input_length": 10, "output_length": 5}
    lines("t.jsonl", "{", *({**row, "timestamp": i} for i in range(9)), "{")

    built = make({"kind": "trace", "path": "t.jsonl", "limit": 3})

    assert len(built.workload.requests) == 3
    assert [line.line for line in built.skipped] == [1]


def test_a_format_that_is_named_beats_the_ending(make: Make, lines: Lines) -> None:
    lines("t.log", {"timestamp": 0, "input_length": 10, "output_length": 5})

    assert len(make({"kind": "trace", "path": "t.log", "format": "mooncake"}).workload.requests) == 1


def test_a_prompt_longer_than_its_hash_ids_ends_in_tokens_of_its_own() -> None:
    lines_ = [trace.TraceLine(i, 0.0, 700, 1, hash_ids=(5,)) for i in (1, 2)]

    a, b = trace.prompts(lines_, 0, (0, 50_000))

    assert len(a) == len(b) == 700
    assert np.array_equal(a[:512], b[:512])
    assert not np.array_equal(a[512:528], b[512:528])
