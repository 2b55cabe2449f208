from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tuner.engine.processes import ProcessIdentity
from tuner.errors import StoreError, StudyBusyError, StudyFileError
from tuner.ledger import StudyNote
from tuner.study_folder import StudyFolder, find

HOLD = """
import sys
from pathlib import Path
from tuner.study_folder import StudyFolder
with StudyFolder(Path(sys.argv[1])).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> StudyFolder:
    made = StudyFolder.of("s", tmp_path)
    made.prepare()
    return made


@contextmanager
def held_by_another_process(folder: StudyFolder) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        yield child
        child.kill()


def test_nothing_is_created_until_something_is_written(tmp_path: Path) -> None:
    folder = StudyFolder.of("s", tmp_path)

    assert folder.ledger.history().trials == ()
    assert not folder.is_running()
    assert folder.set_aside() is None
    assert list(tmp_path.iterdir()) == []


def test_only_the_owner_may_look_into_a_study(folder: StudyFolder) -> None:
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert list(folder.path.iterdir()) == []


def test_store_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "studies").write_text("a file where a folder should be")

    with pytest.raises(StoreError, match=r"the store cannot be written \(.*\); free or mend it"):
        StudyFolder.of("s", tmp_path).prepare()


def test_second_process_is_told_who_runs_the_study_and_may_run_it_afterwards(folder: StudyFolder) -> None:
    with held_by_another_process(folder) as child:
        assert folder.is_running()
        expected = rf"^s: another `tuner run` \(process {child.pid}\) works on this study; wait for it"
        with pytest.raises(StudyBusyError, match=expected), folder.locked():
            pass

    assert not folder.is_running()
    with folder.locked():
        assert folder.is_running()


def test_lock_ends_with_a_killed_process(folder: StudyFolder) -> None:
    with held_by_another_process(folder) as child:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()

        with folder.locked():
            assert (folder.path / "lock").read_text() == str(os.getpid())


def test_lock_is_not_inherited_by_what_the_study_starts(folder: StudyFolder) -> None:
    with folder.locked():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with folder.locked():
            pass
    finally:
        child.kill()
        child.wait()


def test_earlier_studies_are_moved_beside_and_kept(folder: StudyFolder) -> None:
    for index in (1, 2):
        folder.prepare()
        folder.ledger.append(StudyNote("n", f"study {index}", 1.0))
        assert folder.set_aside() == folder.path.with_name(f"s.{index}")

    assert not folder.path.exists()
    kept = StudyFolder(folder.path.with_name("s.2"))
    assert kept.ledger.history().notes[0].text == "study 2"


def test_left_process_is_ended_with_what_it_started(folder: StudyFolder) -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess,time; subprocess.Popen(['sleep','60']); print('up',flush=True); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        parent.stdout.readline()
    identity = ProcessIdentity.of(parent.pid)
    folder.note_processes([identity])

    ended = StudyFolder(folder.path).end_left_processes()

    assert ended == 1
    assert parent.wait(5) != 0
    assert StudyFolder(folder.path).end_left_processes() == 0


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_process_that_only_has_the_same_number_is_left_alone(
    folder: StudyFolder, stranger: subprocess.Popen[bytes]
) -> None:
    identity = ProcessIdentity.of(stranger.pid)
    folder.note_processes([ProcessIdentity(identity.pid, identity.create_time - 5.0)])

    assert folder.end_left_processes() == 0
    assert stranger.poll() is None


def test_process_noted_before_the_machine_started_is_left_alone(
    folder: StudyFolder, stranger: subprocess.Popen[bytes]
) -> None:
    folder.note_processes([ProcessIdentity.of(stranger.pid)])
    path = folder.path / "processes.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": "another"}))

    assert folder.end_left_processes() == 0
    assert stranger.poll() is None


@pytest.mark.parametrize("content", [None, "", "[", "[]", "7", '{"boot": 1}'], ids=str)
def test_note_of_processes_that_is_missing_or_broken_ends_nothing(folder: StudyFolder, content: str | None) -> None:
    if content is not None:
        (folder.path / "processes.json").write_text(content)

    assert folder.end_left_processes() == 0


def test_study_is_found_by_path_and_by_the_name_of_what_was_run(tmp_path: Path, folder: StudyFolder) -> None:
    file = tmp_path / "night.yaml"
    file.write_text("study: s\n")
    folder.remember_origin(file)

    assert find(str(file), tmp_path) == file
    assert find("s", tmp_path) == file


def test_study_that_is_nowhere_is_told_with_those_that_are_here(tmp_path: Path, folder: StudyFolder) -> None:
    with pytest.raises(StudyFileError, match="t: is neither a file nor the name of a study; no study was run in this"):
        find("t", tmp_path)
    folder.remember_origin(tmp_path / "night.yaml")

    with pytest.raises(StudyFileError, match="t: is neither a file nor the name of a study; studies here: s"):
        find("t", tmp_path)
    with pytest.raises(StudyFileError, match=r"night\.yaml: the file of study s is gone; give its new path"):
        find("s", tmp_path)


@pytest.mark.parametrize("study", ["no.yaml", "folder/no", "no.yml", "x" * 5000 + ".yaml"], ids=lambda s: s[:12])
def test_path_that_is_nowhere_is_said_to_be_a_missing_file(tmp_path: Path, study: str) -> None:
    with pytest.raises(StudyFileError, match="there is no such file"):
        find(study, tmp_path)


def test_end_of_a_left_process_does_not_take_long(folder: StudyFolder, stranger: subprocess.Popen[bytes]) -> None:
    folder.note_processes([ProcessIdentity.of(stranger.pid)])
    began_s = time.monotonic()

    assert folder.end_left_processes() == 1
    assert time.monotonic() - began_s < 3.0
    assert stranger.wait(1) == -signal.SIGTERM
