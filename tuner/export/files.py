"""Writing an export: new files only, all of them or none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tuner.errors import StoreError, UsageError


def write(files: Mapping[str, str], folder: Path, *, force: bool = False) -> list[Path]:
    """Write name -> text into `folder` and return the paths in order.

    The texts are written beside their places first and take them only when all are on disk. Scripts (`.sh`) may be
    executed.

    Raises
    ------
    UsageError
        When a file is there already and `force` is not set; nothing is written then.
    StoreError
        When the file system refuses; files that were there are as they were.
    """
    paths = [folder / name for name in files]
    there = [str(path) for path in paths if path.exists() or path.is_symlink()]
    if there and not force:
        raise UsageError(f"{', '.join(there)}: already there; give --force to overwrite, or another folder with -o")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as staging:
            _stage(files, Path(staging))
            _place(Path(staging), paths, force=force)
    except FileExistsError as error:
        raise UsageError(f"{error.filename2 or error.filename}: already there; give --force to overwrite") from error
    except OSError as error:
        raise StoreError(f"{folder}: the export cannot be written ({error.strerror}); free or mend it") from error
    return paths


def _stage(files: Mapping[str, str], staging: Path) -> None:
    for name, text in files.items():
        path = staging / name
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        path.chmod(0o755 if path.suffix == ".sh" else 0o644)


def _place(staging: Path, paths: list[Path], *, force: bool) -> None:
    """Give each file its name. A hard link never replaces, so a file that came up meanwhile is not lost."""
    placed: list[Path] = []
    try:
        for path in paths:
            if force:
                (staging / path.name).replace(path)
            else:
                path.hardlink_to(staging / path.name)
                placed.append(path)
    except OSError:
        for path in placed:
            path.unlink()
        raise
