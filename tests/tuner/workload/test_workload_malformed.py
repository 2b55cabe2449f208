"""Sources of a workload that something else has changed: a workload comes out, or a sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.errors import TunerError
from tuner.workload.build import BuiltWorkload

FILES = {
    "long_documents_text": ("docs/a.txt", "docs/b.jsonl"),
    "sharegpt": ("chats.json",),
    "jsonl": ("prompts.jsonl",),
    "mooncake": ("mooncake.jsonl",),
    "azure": ("azure.csv",),
}
JUNK = (
    b"", b"\x00", b"\xff\xfe\x00", b"[" * 5000, b'{"a":' * 5000, b"null\n", b"[]\n", b"{}\n", b"1e999", b"-1", b"NaN",
    b'"\\ud800"', b"\r", b"\t", b",,,,\n", "²".encode(), b"9" * 5000,
)  # fmt: skip


def assert_workload_or_sentence(make: Callable[..., BuiltWorkload], section: dict[str, Any]) -> None:
    with contextlib.suppress(TunerError):
        assert make(section).workload.requests


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.sampled_from(sorted(FILES)), st.data())
def test_changed_source_is_a_workload_or_a_sentence(
    tmp_path: Path,
    make: Callable[..., BuiltWorkload],
    sections: dict[str, dict[str, Any]],
    kind: str,
    data: st.DataObject,
) -> None:
    path = tmp_path / data.draw(st.sampled_from(FILES[kind]))
    good = path.read_bytes()
    raw = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(len(raw) - 1, 0)))
        raw[at : at + data.draw(st.integers(0, 12))] = data.draw(st.binary(max_size=4) | st.sampled_from(JUNK))
    path.write_bytes(bytes(raw))

    assert_workload_or_sentence(make, sections[kind])
    path.write_bytes(good)


@pytest.mark.parametrize("kind", sorted(FILES))
@pytest.mark.parametrize("whole", JUNK, ids=lambda junk: repr(junk[:8]))
def test_source_of_nothing_but_junk_is_a_sentence(
    tmp_path: Path, make: Callable[..., BuiltWorkload], sections: dict[str, dict[str, Any]], kind: str, whole: bytes
) -> None:
    for name in FILES[kind]:
        (tmp_path / name).write_bytes(whole)

    assert_workload_or_sentence(make, sections[kind])
