"""Where Optuna keeps a study: SQLite in the study's folder, or a PostgreSQL that others share.

In a shared database a study has a name of its own for each time that it was begun, so that `--fresh` starts over there
too and two folders never write into one study. The folder remembers it.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from urllib.parse import urlsplit

from tuner.artifacts import write_json
from tuner.errors import StoreError, StudyFileError
from tuner.study_file import StudyFile
from tuner.study_folder import StudyFolder

VARIABLE = "TUNER_STORAGE"
"""Environment variable that names the database where the study file does not."""
DRIVER = "postgresql+psycopg"


@dataclass(frozen=True, slots=True)
class Storage:
    """Optuna's storage and the name of the study in it."""

    url: str
    study: str

    @property
    def is_local(self) -> bool:
        """Whether it is a file of this study alone."""
        return self.url.startswith("sqlite:")


def storage_of(file: StudyFile, folder: StudyFolder) -> Storage:
    """Return a study's storage; the folder remembers a shared one from its first use on.

    Raises
    ------
    StudyFileError
        When the address cannot be used, or is not the one that the study began with.
    StoreError
        When it was SQLite in the study's folder and is gone.
    """
    remembered = folder.path / "storage.json"
    address = file.spec.storage or os.environ.get(VARIABLE)
    began = json.loads(remembered.read_text()) if remembered.exists() else None
    if address is None:
        if began is not None:
            raise _another(file, began["url"], "SQLite in its folder")
        _see_that_it_is_there(folder)
        return Storage(folder.storage_url, file.spec.study)
    url = _checked(file, address)
    if began is None:
        if (folder.path / "optuna.db").exists():
            raise _another(file, "SQLite in its folder", url)
        began = {"url": url, "study": f"{file.spec.study}-{secrets.token_hex(4)}"}
        write_json(remembered, began)
    elif began["url"] != url:
        raise _another(file, began["url"], url)
    return Storage(url, began["study"])


def _see_that_it_is_there(folder: StudyFolder) -> None:
    """Refuse to begin the storage of a study anew whose trials the ledger has: their numbers would be given twice."""
    path = folder.path / "optuna.db"
    if not path.exists() and folder.ledger.history().trials:
        raise StoreError(f"{path}: is gone, and the study cannot go on without; restore it, or `tuner run --fresh`")


def _checked(file: StudyFile, address: str) -> str:
    """Return the address with the driver that is installed with the `postgres` extra."""
    where = "storage" if file.spec.storage else f"storage ({VARIABLE})"
    parts = urlsplit(address)
    if parts.scheme not in ("postgresql", "postgres", DRIVER):
        text = "write it as postgresql://USER@HOST:PORT/DATABASE; without it Optuna's SQLite lies in the study's folder"
        raise StudyFileError(str(file.path), [(where, text)])
    if parts.password is not None:
        text = "holds a password, which would be stored and shown; put it into PGPASSWORD or ~/.pgpass"
        raise StudyFileError(str(file.path), [(where, text)])
    return parts._replace(scheme=DRIVER).geturl()


def _another(file: StudyFile, was: str, now: str) -> StudyFileError:
    text = f"was {was} when the study began and is {now}; change it back, or start over with `tuner run --fresh`"
    return StudyFileError(str(file.path), [("storage", text)])


def place(file: StudyFile, folder: StudyFolder) -> str:
    """Say where a study's storage is, for people."""
    return file.spec.storage or os.environ.get(VARIABLE) or folder.storage_url
