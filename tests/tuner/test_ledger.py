from __future__ import annotations

import dataclasses
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from study_samples import sample_history, sample_verification, write_study

from objectives.measurement import Failure, FailureKind, Stage
from tuner.config import EngineConfig
from tuner.errors import StoreError
from tuner.ledger import Ledger, StudyHeader, StudyNote, TrialLine, TrialRecord, TrialState

HEADER = StudyHeader("s", "0" * 16, "1" * 16, "long documents", "0.32.0", "0.1.0", 1.0)
RUNNING = TrialRecord(0, TrialState.RUNNING, "reference", {"max_num_seqs": 4}, EngineConfig({"model": "m"}), 1.0)
COMPLETE = dataclasses.replace(RUNNING, state=TrialState.COMPLETE, finished_at=2.0)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "studies" / "s" / "ledger.jsonl")


def note(text: str) -> StudyNote:
    return StudyNote("test", text, 1.0)


def test_ledger_that_was_never_written_is_empty(ledger: Ledger) -> None:
    history = ledger.history()

    assert history.header is None
    assert history.trials == ()
    assert history.reference is None
    assert not ledger.path.parent.exists()


def test_what_was_written_is_read_back_the_same(tmp_path: Path) -> None:
    history = sample_history(running=True)
    ledger = write_study(tmp_path, history, tables=False)

    read = ledger.history()

    assert read.header == history.header
    assert read.trials == history.trials
    assert [t.number for t in read.finished] == list(range(29))


def test_verifications_and_notes_are_read_in_order(ledger: Ledger) -> None:
    for line in (HEADER, note("first"), sample_verification(3), note("second")):
        ledger.append(line)

    history = ledger.history()

    assert [n.text for n in history.notes] == ["first", "second"]
    assert history.verifications == (sample_verification(3),)


def test_last_line_of_a_number_holds_and_trials_come_in_order_of_number(ledger: Ledger) -> None:
    later = dataclasses.replace(COMPLETE, number=1)
    for record in (later, RUNNING, COMPLETE):
        ledger.append(TrialLine(record))

    assert ledger.history().trials == (COMPLETE, later)


def test_reference_is_the_first_finished_record_of_that_source(ledger: Ledger) -> None:
    ledger.append(TrialLine(RUNNING))
    assert ledger.history().reference is None

    ledger.append(TrialLine(COMPLETE))
    assert ledger.history().reference == COMPLETE


def test_only_the_owner_may_read_the_ledger(ledger: Ledger) -> None:
    ledger.append(HEADER)

    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600


def test_last_line_without_its_end_is_left_out_and_cut_before_the_next(ledger: Ledger) -> None:
    ledger.append(HEADER)
    ledger.append(note("whole"))
    with ledger.path.open("ab") as file:
        file.write(b'{"code":"torn","te')

    assert [n.text for n in ledger.history().notes] == ["whole"]
    ledger.append(note("next"))

    assert [n.text for n in ledger.history().notes] == ["whole", "next"]
    assert ledger.path.read_bytes().count(b"\n") == 3


def test_last_line_whose_middle_never_reached_the_disk_is_cut_before_the_next(ledger: Ledger) -> None:
    ledger.append(HEADER)
    with ledger.path.open("ab") as file:
        file.write(b"\0" * 4096 + b'tail"}\n')

    assert ledger.history().header == HEADER
    ledger.append(note("next"))

    assert [n.text for n in ledger.history().notes] == ["next"]


def test_ledger_of_nothing_but_a_torn_line_starts_over(ledger: Ledger) -> None:
    ledger.path.parent.mkdir(parents=True)
    ledger.path.write_bytes(b'{"study":"s"')

    assert ledger.history().header is None
    ledger.append(HEADER)

    assert ledger.history().header == HEADER


@given(st.data())
def test_a_ledger_cut_anywhere_keeps_every_whole_line_and_can_be_written_on(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    ledger = Ledger(tmp_path_factory.mktemp("cut") / "ledger.jsonl")
    for line in (HEADER, note("a"), note("b")):
        ledger.append(line)
    whole = ledger.path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))

    ledger.path.write_bytes(whole[:cut])
    before = list(ledger.lines())
    ledger.append(note("c"))

    assert before == [HEADER, note("a"), note("b")][: whole[:cut].count(b"\n")]
    assert list(ledger.lines()) == [*before, note("c")]


def test_line_that_was_changed_in_the_middle_is_named(ledger: Ledger) -> None:
    for line in (HEADER, note("a"), note("b")):
        ledger.append(line)
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(lines[0] + b"{}\n" + lines[2])

    with pytest.raises(StoreError, match=r"ledger\.jsonl: line 2 is not a record of this tuner; restore the file or"):
        ledger.history()


def test_append_returns_when_the_line_and_the_name_of_a_new_file_are_on_disk(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    ledger.append(HEADER)
    ledger.append(note("a"))

    assert synced == [str(ledger.path), str(ledger.path.parent), str(ledger.path)]


def test_file_system_that_takes_a_part_is_given_the_rest(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))

    ledger.append(HEADER)

    assert ledger.history().header == HEADER


def test_full_disk_is_a_sentence_and_leaves_what_was_there(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.append(HEADER)
    real, calls = os.write, []

    def full(descriptor: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[:5])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreError, match=r"the ledger cannot be written \(No space left on device\); free or mend it"):
        ledger.append(note("lost"))
    monkeypatch.undo()
    ledger.append(note("next"))

    assert list(ledger.lines()) == [HEADER, note("next")]


def test_infinity_survives(ledger: Ledger) -> None:
    ledger.append(StudyNote("drift", "endless", 1.0, {"ttft_p95_s": math.inf}))

    assert ledger.history().notes[0].values == {"ttft_p95_s": math.inf}


def test_path_that_is_no_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").mkdir()

    with pytest.raises(StoreError, match="the ledger cannot be read"):
        Ledger(tmp_path / "ledger.jsonl").history()
    with pytest.raises(StoreError, match="the ledger cannot be written"):
        Ledger(tmp_path / "ledger.jsonl").append(HEADER)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@given(
    st.dictionaries(st.text(max_size=8), VALUES, max_size=3),
    st.text(),
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_configuration_and_evidence_survive(
    tmp_path_factory: pytest.TempPathFactory, args: dict[str, Any], message: str, needed_gib: float | None
) -> None:
    ledger = Ledger(tmp_path_factory.mktemp("any") / "ledger.jsonl")
    failure = Failure(FailureKind.OOM_PROFILE, Stage.PROFILE, message, needed_gib)
    record = dataclasses.replace(COMPLETE, params=args, config=EngineConfig(args), failure=failure)

    ledger.append(TrialLine(record))

    [read] = ledger.history().trials
    assert read == record
    assert read.config.key() == record.config.key()


def test_one_line_more_is_what_reading_the_file_again_would_give(tmp_path: Path) -> None:
    history = sample_history()
    ledger = write_study(tmp_path, history, tables=False)
    running = dataclasses.replace(history.trials[0], state=TrialState.RUNNING, number=99)
    for line in (note("drift"), TrialLine(running), TrialLine(dataclasses.replace(running, engine_s=3.0))):
        before = ledger.history()
        ledger.append(line)

        assert before.after(line) == ledger.history()
