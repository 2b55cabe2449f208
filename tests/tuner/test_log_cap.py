from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectives.measurement import Failure, FailureKind, Stage
from tuner import log_cap
from tuner.log_cap import MOST_BYTES, cap_logs

EVIDENCE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
FAILURE = Failure(FailureKind.OOM_RUNTIME, Stage.RUN, EVIDENCE)


def long_log(folder: Path, mib: int, evidence_at: float | None = None) -> Path:
    path = folder / "engine.log"
    filler = b"INFO nothing to see here, move along now please thanks\n" * 1000
    total, written = mib * 2**20, 0
    with path.open("wb") as log:
        log.write(b"FIRST LINE\n")
        while written < total:
            if evidence_at is not None and written >= evidence_at * total:
                log.write(b"before the evidence\n" + EVIDENCE.encode() + b"\nafter the evidence\n")
                evidence_at = None
            written += log.write(filler)
        log.write(b"LAST LINE\n")
    return path


def test_short_log_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text("a\nb\n")

    cap_logs(tmp_path, FAILURE)

    assert path.read_text() == "a\nb\n"


@pytest.mark.parametrize("where", [0.0, 0.3, 0.5, 0.99])
def test_long_log_keeps_its_head_its_tail_and_the_evidence(tmp_path: Path, where: float) -> None:
    path = long_log(tmp_path, 12, where)

    cap_logs(tmp_path, FAILURE)

    kept = path.read_text()
    assert len(kept) < MOST_BYTES + 2**20
    assert kept.startswith("FIRST LINE")
    assert kept.endswith("LAST LINE\n")
    assert f"before the evidence\n{EVIDENCE}\nafter the evidence" in kept
    assert "bytes left out …]" in kept
    assert [p.name for p in tmp_path.iterdir()] == ["engine.log"]


def test_earlier_attempt_s_log_is_cut_too_and_only_the_owner_may_read_it(tmp_path: Path) -> None:
    path = long_log(tmp_path, 6).rename(tmp_path / "engine.previous.log")

    cap_logs(tmp_path, None)

    assert path.stat().st_size < MOST_BYTES + 100
    assert path.stat().st_mode & 0o777 == 0o600


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 4000), st.integers(1, 40), st.integers(2, 64))
def test_evidence_is_found_wherever_it_stands(at: int, length: int, chunk: int) -> None:
    import io

    needle = b"N" * length
    text = b"." * at + needle + b"." * 100
    kept = log_cap.CHUNK_BYTES
    log_cap.CHUNK_BYTES = chunk
    try:
        assert log_cap._places(io.BytesIO(text), needle)[0] == at
    finally:
        log_cap.CHUNK_BYTES = kept


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 20)), min_size=1, max_size=6))
def test_spans_are_joined_without_overlap_or_loss(parts: list[tuple[int, int]]) -> None:
    spans = [(low, low + length) for low, length in parts]

    joined = list(log_cap._joined(spans))

    assert {i for low, high in joined for i in range(low, high)} == {i for low, high in spans for i in range(low, high)}
    assert all(a[1] < b[0] for a, b in itertools.pairwise(joined))
