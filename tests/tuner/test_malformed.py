"""Files of a study that something else has changed: every command ends with a result or a sentence."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_study import SPEC, ToyEngine, ToyStudy

from tuner import doctor
from tuner.commands import load, status, trials_csv
from tuner.doctor import examine
from tuner.errors import TunerError
from tuner.study_file import read
from tuner.view import front_document

FILES = ("ledger.jsonl", "optuna.db", "identity.json", "origin.json", "processes.json", "run.json", "lock",
         "trials/0/facts.json", "trials/0/requests.parquet", "trials/0/steps.parquet")  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished study, as `tuner run` leaves it."""
    place = tmp_path_factory.mktemp("finished")
    (place / "study.yaml").write_text(yaml.safe_dump(SPEC))
    study = ToyStudy.at(place / "mlruns" / "studies")
    study.run(ToyEngine(), trials=4)
    study.folder.remember_origin(place / "study.yaml")
    for name in ("identity.json", "run.json"):
        (study.folder.path / name).write_text('{"trials": 4, "rounds": 0, "ends_by": null, "vllm": "0.32.0"}')
    (study.folder.path / "processes.json").write_text('{"boot": "x", "processes": [[1, 2.0]], "shared_memory": []}')
    return place


def mutations() -> st.SearchStrategy[Callable[[bytes], bytes]]:
    """What disks, editors and crashes make of a file."""
    junk = st.sampled_from(
        [b"", b"\x00" * 40, b"\xff\xfe", b"{}", b"null", b"[]", b'{"kind":"trial"}', b"1e999", b"NaN"]
    )
    cut = st.floats(0, 1).map(lambda share: lambda raw: raw[: int(share * len(raw))])
    drop = st.tuples(st.floats(0, 1), st.integers(1, 60)).map(
        lambda how: lambda raw: raw[: int(how[0] * len(raw))] + raw[int(how[0] * len(raw)) + how[1] :]
    )
    write = st.tuples(st.floats(0, 1), junk | st.binary(max_size=8)).map(
        lambda how: lambda raw: raw[: int(how[0] * len(raw))] + how[1] + raw[int(how[0] * len(raw)) :]
    )
    lines = st.permutations(range(6)).map(
        lambda order: (
            lambda raw: b"".join([raw.splitlines(keepends=True)[i] for i in order if i < len(raw.splitlines())])
        )
    )
    return st.one_of(junk.map(lambda whole: lambda _: whole), cut, drop, write, lines)


def says_or_tells(command: Callable[[], object]) -> None:
    """A command ends with a result, or with a sentence for the operator."""
    with contextlib.suppress(TunerError):
        command()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(FILES), mutations())
def test_study_with_a_changed_file_is_shown_or_refused_in_a_sentence(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    mutate: Callable[[bytes], bytes],
) -> None:
    place = tmp_path / "changed"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(finished, place)
    path = place / "mlruns" / "studies" / "toy" / name
    path.write_bytes(mutate(path.read_bytes() if path.exists() else b""))
    monkeypatch.chdir(place)
    monkeypatch.setattr(doctor, "CHECKS", {n: c for n, c in doctor.CHECKS.items() if n != "mlflow"})

    says_or_tells(lambda: status("toy").document())
    says_or_tells(lambda: front_document(load("toy")[1]))
    says_or_tells(lambda: trials_csv(load("study.yaml")[1]))
    says_or_tells(lambda: examine(read(Path("study.yaml"))).lines())
    says_or_tells(lambda: status("toy").lines())
