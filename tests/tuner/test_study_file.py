"""Study files as cases: see tests/data/study_files/README.md."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.errors import StudyFileError
from tuner.spec import StudySpec
from tuner.study_file import MAX_FILE_BYTES, read

CASES = Path(__file__).parents[1] / "data" / "study_files"
GOOD = sorted((CASES / "good").glob("*.yaml"))
BAD = sorted((CASES / "bad").glob("*.yaml"))
SMALLEST = CASES / "good" / "smallest.yaml"


def problems_of(path: Path) -> list[tuple[str, str]]:
    with pytest.raises(StudyFileError) as refused:
        read(path)
    assert refused.value.exit_status == 2
    return refused.value.problems


def said(path: Path) -> list[str]:
    """What the first lines of a bad file say is wrong with it."""
    lines = path.read_bytes().decode(errors="replace").splitlines()
    comments = itertools.takewhile(lambda line: line.startswith("# "), lines)
    return [line.removeprefix("# ").replace("{here}/..", str(path.resolve().parents[1])) for line in comments]


@pytest.mark.parametrize("path", GOOD, ids=lambda p: p.stem)
def test_good_file_is_read_and_means_the_same_after_json(path: Path) -> None:
    spec = read(path).spec

    assert StudySpec.model_validate_json(spec.model_dump_json()).identity() == spec.identity()


@pytest.mark.parametrize("path", BAD, ids=lambda p: p.stem)
def test_bad_file_is_refused_with_the_problems_that_it_says(path: Path) -> None:
    problems = problems_of(path)

    told = [f"{key}: {text}" if key else text for key, text in problems]
    here = str(path.resolve().parent)
    assert [line.replace("{here}", here) for line in said(path)] == told


@pytest.mark.parametrize("path", BAD, ids=lambda p: p.stem)
def test_every_problem_is_one_line_that_names_the_file_and_speaks_no_pydantic(path: Path) -> None:
    problems = problems_of(path)

    lines = str(StudyFileError(str(path), problems)).splitlines()
    assert len(lines) == len(problems)
    assert all(line.startswith(f"{path}: ") for line in lines)
    assert not any(word in line for line in lines for word in ("Input should", "input should", "[type=", "pydantic"))
    assert all(len(line) < len(str(path)) + 400 for line in lines)


def test_every_key_of_a_study_file_stands_in_a_good_one() -> None:
    text = (CASES / "good" / "everything.yaml").read_text()

    assert set(yaml.safe_load(text)) == set(StudySpec.model_fields)


def test_missing_file_and_folder_are_said_to_be_unreadable(tmp_path: Path) -> None:
    assert problems_of(tmp_path / "no.yaml") == [("", "cannot be read (No such file or directory); correct the path")]
    assert problems_of(tmp_path) == [("", "cannot be read (Is a directory); correct the path")]


def test_file_too_large_to_be_a_study_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))

    assert problems_of(path) == [("", "is larger than 1,000,000 bytes; that is no study file")]


def test_model_folder_of_a_name_too_long_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(SMALLEST.read_text().replace("org/model", f"./{'m' * 300}"))

    [(key, text)] = problems_of(path)

    assert key == "model"
    assert "File name too long" in text


def test_relative_model_starts_at_the_file_and_a_hub_name_stays(tmp_path: Path) -> None:
    assert read(CASES / "good" / "everything.yaml").model == str(CASES.parent / "models" / "smollm2-135m")
    assert read(SMALLEST).model == "org/model"


def test_numbers_and_booleans_of_the_environment_become_what_a_shell_holds() -> None:
    env = read(CASES / "good" / "everything.yaml").spec.engine.env

    assert env == {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def spec_with(**changes: Any) -> StudySpec:
    return StudySpec.model_validate({**yaml.safe_load(SMALLEST.read_text()), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": {"hours": 3}},
        {"tracking": {"experiment": "another"}},
        {"recipes": ["chat"]},
        {"noise": {"aa_runs": 3}},
        {"search": {"startup_trials": 9, "seed": 4}},
    ],
    ids=str,
)
def test_what_does_not_touch_comparability_may_change(changes: dict[str, Any]) -> None:
    assert spec_with(**changes).identity() == spec_with().identity()


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "org/other"},
        {"space": {"max_num_seqs": [1, 2]}},
        {"objectives": ["ttft_p95_s"]},
        {"measure": {"repeats": 2}},
        {"search": {"sampler": "tpe"}},
    ],
    ids=str,
)
def test_what_makes_trials_comparable_changes_the_identity(changes: dict[str, Any]) -> None:
    assert spec_with(**changes).identity() != spec_with().identity()


DOCUMENTS = [yaml.safe_load(path.read_text()) for path in GOOD]


def places(node: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a document that has something above it."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*above, key)
        yield from places(value, (*above, key))


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.dates(),
        st.sampled_from(
            [10**400, "1e3", "~/x", "./x", "a/b/c", ":", "a:b", "poisson", "env.A", -0.0, 2**63, "\0", "[", "%s{}"]
        ),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """A good document with one to three values deleted, replaced or inserted."""
    document = copy.deepcopy(draw(st.sampled_from(DOCUMENTS)))
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.sampled_from([*places(document)] or [()]))
        if not where:
            return draw(VALUES)
        holder = document
        for part in where[:-1]:
            holder = holder[part]
        match draw(st.sampled_from(["delete", "replace", "insert"])):
            case "delete":
                del holder[where[-1]]
            case "replace":
                holder[where[-1]] = draw(VALUES)
            case _ if isinstance(holder, list):
                holder.insert(where[-1], draw(VALUES))
            case _:
                holder[draw(st.text(max_size=8) | st.sampled_from(["kind", "choices", "low", "max_model_len"]))] = draw(
                    VALUES
                )
    return document


def assert_study_or_sentence(path: Path) -> None:
    try:
        file = read(path)
    except StudyFileError as error:
        problems, lines = error.problems, str(error).splitlines()
    else:
        problems, lines = [], []
        assert len(file.spec.identity()) == 16
    assert all(text.strip() for _, text in problems)
    assert len(lines) == len(problems)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutated())
def test_any_mutation_of_a_good_file_is_a_study_or_a_sentence(tmp_path: Path, document: Any) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(document, allow_unicode=False))

    assert_study_or_sentence(path)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(GOOD), st.data())
def test_any_change_of_a_good_files_bytes_is_a_study_or_a_sentence(
    tmp_path: Path, good: Path, data: st.DataObject
) -> None:
    raw = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.binary(max_size=3) | st.sampled_from([b"&a ", b"- ", b": "])
        )
    path = tmp_path / "study.yaml"
    path.write_bytes(bytes(raw))

    assert_study_or_sentence(path)
