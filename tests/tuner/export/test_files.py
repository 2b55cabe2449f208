from __future__ import annotations

from pathlib import Path

import pytest

from tuner.errors import StoreError, UsageError
from tuner.export.files import write

FILES = {"a.yaml": "one\n", "b.sh": "#!/bin/sh\n"}


def test_files_are_written_and_scripts_can_be_run(tmp_path: Path) -> None:
    paths = write(FILES, tmp_path / "new" / "folder")

    assert [p.read_text() for p in paths] == list(FILES.values())
    assert [p.stat().st_mode & 0o777 for p in paths] == [0o644, 0o755]


def test_nothing_is_written_when_one_file_is_there(tmp_path: Path) -> None:
    (tmp_path / "b.sh").write_text("mine")

    with pytest.raises(UsageError, match=r"b\.sh: already there; give --force"):
        write(FILES, tmp_path)

    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"b.sh": "mine"}


def test_force_overwrites(tmp_path: Path) -> None:
    (tmp_path / "b.sh").write_text("mine")

    write(FILES, tmp_path, force=True)

    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == FILES


def test_a_file_that_comes_up_meanwhile_is_kept_and_the_others_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b.sh").write_text("mine")
    monkeypatch.setattr(Path, "exists", lambda self: False)

    with pytest.raises(UsageError, match="already there"):
        write(FILES, tmp_path)

    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"b.sh": "mine"}


def test_a_dangling_link_counts_as_a_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").symlink_to(tmp_path / "nowhere")

    with pytest.raises(UsageError, match="already there"):
        write(FILES, tmp_path)


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(StoreError, match="the export cannot be written"):
        write(FILES, tmp_path / "file" / "folder")
