"""What makes two trials of one study comparable: written down when a study begins, held against when it goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuner import __version__
from tuner.artifacts import write_json
from tuner.errors import StoreError, StudyFileError
from tuner.ledger import StudyHeader, StudyNote
from tuner.secrets import MASKED, is_secret
from tuner.study_file import StudyFile
from tuner.study_folder import StudyFolder
from tuner.workload.model import Workload

VLLM = "vllm"
"""Key of vLLM's release: the one part whose change an operator may allow, since the file did not ask for it."""


def begin(
    file: StudyFile, folder: StudyFolder, workload: Workload, vllm_version: str, *, allow_different: bool = False
) -> str | None:
    """Write the ledger's header, or see that a study that was begun is still the same.

    Returns a sentence about what is different and was allowed, `None` where nothing is.

    Raises
    ------
    StudyFileError
        When something that makes trials comparable has changed, with what it was and is.
    """
    path = folder.path / "identity.json"
    now = {**file.spec.identity_parts(), "workload.fingerprint": workload.fingerprint(), VLLM: vllm_version}
    header = folder.ledger.history().header
    if header is None:
        write_json(path, now)
        folder.ledger.append(
            StudyHeader(
                study=file.spec.study,
                spec_hash=file.spec.identity(),
                workload_fingerprint=workload.fingerprint(),
                workload_name=workload.name,
                vllm_version=vllm_version,
                tuner_version=__version__,
                created_at=time.time(),
            )
        )
        return None
    changes = {key: (old, new) for key, old, new in _differences(_then(path, now), now)}
    allowed = changes.pop(VLLM, None) if allow_different else None
    if changes:
        raise StudyFileError(str(file.path), _problems(changes))
    if allowed is None:
        return None
    text = f"vLLM was {allowed[0]} and is {allowed[1]}: trials before and after this were measured with different ones"
    folder.ledger.append(StudyNote("vllm", text, time.time()))
    write_json(path, now)
    return text


def _then(path: Path, now: dict[str, Any]) -> Any:
    """What the study was when it began."""
    if not path.exists():
        return now
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        text = f"{path}: what the study was when it began cannot be read ({error}); restore it, or start over with "
        raise StoreError(text + "`tuner run --fresh`") from error


def _problems(changes: dict[str, tuple[str, str]]) -> list[tuple[str, str]]:
    listed = "; ".join(f"{key} was {old} and is {new}" for key, (old, new) in changes.items())
    how = "change it back, give the study another name, or start over with `tuner run --fresh`"
    if VLLM in changes:
        how += "; `tuner run --allow-different` goes on with another vLLM"
    return [("", f"changed since the study began, so that its trials could not be compared: {listed}"), ("", how)]


def _differences(then: Any, now: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """Keys whose values differ, dotted, with both values as JSON; those of secrets masked."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name in sorted(then.keys() | now.keys()):
            yield from _differences(then.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif json.dumps(then, sort_keys=True) != json.dumps(now, sort_keys=True):
        hidden = is_secret(key.rpartition(".")[2])
        yield key, MASKED if hidden else json.dumps(then), MASKED if hidden else json.dumps(now)
