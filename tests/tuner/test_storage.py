from __future__ import annotations

from pathlib import Path

import pytest
from toy_study import SPEC

from tuner.errors import StudyFileError
from tuner.storage import VARIABLE, Storage, place, storage_of
from tuner.study_file import StudyFile, parse
from tuner.study_folder import StudyFolder

ADDRESS = "postgresql://tuner@db.example:5432/optuna"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudyFolder:
    monkeypatch.delenv(VARIABLE, raising=False)
    made = StudyFolder(tmp_path / "toy")
    made.prepare()
    return made


def study(address: str | None = None) -> StudyFile:
    path = Path("study.yaml").absolute()
    return StudyFile(path, parse({**SPEC, **({"storage": address} if address else {})}, path))


def test_storage_is_sqlite_in_the_study_folder_unless_said_otherwise(folder: StudyFolder) -> None:
    storage = storage_of(study(), folder)

    assert storage == Storage(folder.storage_url, "toy")
    assert storage.is_local
    assert place(study(), folder) == folder.storage_url


def test_shared_database_is_reached_by_the_driver_that_is_installed_and_remembered(folder: StudyFolder) -> None:
    first = storage_of(study(ADDRESS), folder)

    assert first.url == "postgresql+psycopg://tuner@db.example:5432/optuna"
    assert first.study.startswith("toy-")
    assert storage_of(study(ADDRESS), folder) == first


def test_fresh_study_has_another_name_in_the_shared_database(folder: StudyFolder) -> None:
    first = storage_of(study(ADDRESS), folder)
    folder.set_aside()
    folder.prepare()

    assert storage_of(study(ADDRESS), folder).study != first.study


def test_environment_names_the_database_where_the_file_does_not(
    folder: StudyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, ADDRESS)

    assert storage_of(study(), folder).url.startswith("postgresql+psycopg://")


@pytest.mark.parametrize("now", [None, "postgresql://tuner@another.example/optuna"])
def test_study_does_not_change_its_database(folder: StudyFolder, now: str | None) -> None:
    storage_of(study(ADDRESS), folder)

    with pytest.raises(StudyFileError, match=r"storage: was postgresql.* when the study began"):
        storage_of(study(now), folder)


def test_study_that_began_with_sqlite_stays_there(folder: StudyFolder) -> None:
    (folder.path / "optuna.db").touch()

    with pytest.raises(StudyFileError, match="was SQLite in its folder"):
        storage_of(study(ADDRESS), folder)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("postgresql://tuner:hunter2@db/optuna", "holds a password"),
        ("mysql://tuner@db/optuna", "write it as postgresql://"),
        ("optuna.db", "write it as postgresql://"),
    ],
)
def test_address_that_cannot_be_used_is_refused_without_showing_a_password(
    folder: StudyFolder, address: str, said: str
) -> None:
    with pytest.raises(StudyFileError, match=said) as error:
        storage_of(study(address), folder)
    assert "hunter2" not in str(error.value)
