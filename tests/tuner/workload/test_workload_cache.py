from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tuner.errors import StoreError
from tuner.workload.build import BuiltWorkload
from tuner.workload.cache import cached, content_key
from tuner.workload.source import Passage, SkippedLine, Source

Make = Callable[..., BuiltWorkload]
SOURCE = Source(
    (Passage(np.array([1, 2, 2**32 - 1], dtype=np.uint32), 7), Passage(np.array([], dtype=np.uint32))),
    (SkippedLine("a.txt", 3, "not JSON\nat all"),),
)


def assert_same(a: Source, b: Source) -> None:
    facts = [([(p.ids.tolist(), p.output_tokens) for p in s.passages], s.skipped) for s in (a, b)]
    assert facts[0] == facts[1]


def never() -> Source:
    raise AssertionError("made again")


def test_what_was_kept_is_read_back_without_making_it_again(tmp_path: Path) -> None:
    made = cached(tmp_path / "deep" / "er", "key", lambda: SOURCE)

    assert_same(made, SOURCE)
    assert_same(cached(tmp_path / "deep" / "er", "key", never), SOURCE)
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["key.tokens"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:40],
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: content[:50] + bytes([content[50] ^ 1]) + content[51:],
    ],
)
def test_a_damaged_file_is_made_again_and_repaired(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    cached(tmp_path, "key", lambda: SOURCE)
    file = tmp_path / "key.tokens"
    file.write_bytes(damage(file.read_bytes()))

    assert_same(cached(tmp_path, "key", lambda: SOURCE), SOURCE)
    assert_same(cached(tmp_path, "key", never), SOURCE)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StoreError, match="cannot be written"):
        cached(tmp_path / "file", "key", lambda: SOURCE)


def test_the_key_hangs_on_names_bytes_and_facts(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("text")
    b.write_text("text")
    arguments: list[tuple[list[Path], int | str]] = [([a], 1), ([b], 1), ([a, b], 1), ([a], 2), ([a], "1")]
    keys = {content_key(files, fact) for files, fact in arguments}

    a.write_text("text!")

    assert len({*keys, content_key([a], 1)}) == 6


@pytest.mark.parametrize("kind", ["long_documents_text", "sharegpt", "jsonl"])
def test_a_cached_build_is_the_same_workload_without_tokenising(
    make: Make, sections: dict[str, Any], tmp_path: Path, tokenizer: Any, kind: str
) -> None:
    first = make(sections[kind], cache_folder=tmp_path / "cache")
    tokenizer.encoded = 0

    second = make(sections[kind], cache_folder=tmp_path / "cache")

    assert tokenizer.encoded == 0
    assert second == first == make(sections[kind])


def test_a_changed_file_is_tokenised_again(make: Make, sections: dict[str, Any], tmp_path: Path) -> None:
    first = make(sections["jsonl"], cache_folder=tmp_path / "cache")
    file = tmp_path / "prompts.jsonl"
    file.write_text(file.read_text().replace("number 3", "figure 3"))

    second = make(sections["jsonl"], cache_folder=tmp_path / "cache")

    assert first.workload.fingerprint() != second.workload.fingerprint()
