from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from study_samples import sample_history, sample_measurement

from objectives.measurement import DeviceSample, EngineFacts, Measurement, RequestRecord, SpeedProbe, StepRecord
from tuner import artifacts
from tuner.errors import StoreError

FACTS = EngineFacts("vllm", "0.32.0", "cpu", 1, "m", 3.0)
SAMPLE = sample_measurement(sample_history(1, running=False).trials[0])

NUMBERS: dict[str, st.SearchStrategy[Any]] = {
    "str": st.text(max_size=10),
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False),
    "tuple[float, ...]": st.lists(st.floats(allow_nan=False), max_size=3).map(tuple),
}


def rows(kind: type[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Any rows of one table, `None` wherever the type allows it."""
    columns = {}
    for field in dataclasses.fields(kind):
        plain = str(field.type).removesuffix(" | None")
        columns[field.name] = NUMBERS[plain] if plain == field.type else st.none() | NUMBERS[plain]
    return st.lists(st.builds(kind, **columns), max_size=3).map(tuple)


FINITE = st.floats(allow_nan=False, allow_infinity=False)
PROBES = st.none() | st.builds(SpeedProbe, FINITE, FINITE)
MEASUREMENTS = st.builds(
    Measurement,
    engine=st.just(FACTS),
    workload_fingerprint=st.text(max_size=16),
    requests=rows(RequestRecord),
    steps=rows(StepRecord),
    device=rows(DeviceSample),
    duration_s=st.lists(FINITE, max_size=3).map(tuple),
    speed_before=PROBES,
    speed_after=PROBES,
    predicted=st.booleans(),
    notes=st.dictionaries(st.text(max_size=8), FINITE, max_size=3),
)


@settings(max_examples=40, deadline=None)
@given(MEASUREMENTS)
def test_any_measurement_is_read_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, measurement: Measurement
) -> None:
    folder = tmp_path_factory.mktemp("trial")

    artifacts.save(measurement, folder)

    assert artifacts.load(folder) == measurement


def test_measurement_of_a_whole_trial_is_read_back_the_same(tmp_path: Path) -> None:
    artifacts.save(SAMPLE, tmp_path / "trials" / "0")

    assert artifacts.load(tmp_path / "trials" / "0") == SAMPLE


def test_column_of_nothing_but_none_keeps_its_type(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    row = RequestRecord("r", 1, 0, 0.0, 0.0, error="the engine died")
    artifacts.save(dataclasses.replace(SAMPLE, requests=(row,)), tmp_path)

    schema = pq.read_schema(tmp_path / "requests.parquet")
    assert str(schema.field("first_token_s").type) == "double"
    assert str(schema.field("cached_tokens").type) == "int64"
    assert artifacts.load(tmp_path).requests == (row,)


def test_second_attempt_replaces_the_first(tmp_path: Path) -> None:
    artifacts.save(SAMPLE, tmp_path)
    second = dataclasses.replace(SAMPLE, steps=(), predicted=True)
    artifacts.save(second, tmp_path)

    assert artifacts.load(tmp_path) == second


@pytest.mark.parametrize("name", ["facts.json", "requests.parquet", "steps.parquet", "device.parquet"])
@pytest.mark.parametrize("content", [None, b"", b"PAR1 no more", b"{}"], ids=str)
def test_file_that_is_missing_or_broken_is_a_sentence(tmp_path: Path, name: str, content: bytes | None) -> None:
    artifacts.save(SAMPLE, tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)

    with pytest.raises(StoreError, match="the trial's tables cannot be read"):
        artifacts.load(tmp_path)


def test_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "trials").write_text("a file where a folder should be")

    with pytest.raises(StoreError, match=r"the trial's tables cannot be written \(.*\); free or mend it"):
        artifacts.save(SAMPLE, tmp_path / "trials")


def test_json_document_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "document.json"

    artifacts.write_json(path, {"a": 1})
    artifacts.write_json(path, {"a": [2, None]})

    assert path.read_text() == '{\n "a": [\n  2,\n  null\n ]\n}'
    assert [p.name for p in path.parent.iterdir()] == ["document.json"]
