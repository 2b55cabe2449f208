from __future__ import annotations

from pathlib import Path

import pytest

from tuner.engine.accelerators import Gpus
from tuner.errors import StudyFileError, UsageError
from tuner.init import PLACEHOLDER, write_study_file
from tuner.study_file import StudyFile, read

MODELS = Path(__file__).parents[1] / "data" / "models"
FOUR_A6000 = Gpus(4, "NVIDIA RTX A6000", 47.5)
TWO_UNKNOWN = Gpus(2, "NVIDIA Vaxputer 3", 30.0)


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tuner.init.gpus_here", lambda: None)


def write_and_read(model: str | None, name: str = "study.yaml") -> StudyFile:
    return read(write_study_file(model, Path(name)).path)


def test_a_local_model_on_the_cpu_is_searched_with_kv_caches_that_hold_one_request_and_more() -> None:
    file = write_and_read(str(MODELS / "smollm2-135m"))

    pools = file.spec.space["kv_cache_memory_bytes"].choices
    assert pools is not None
    one_request = 23_040 * file.spec.engine.args["max_model_len"]
    assert one_request < pools[0] < 2 * one_request
    assert file.spec.space.keys() >= {"max_num_seqs", "max_num_batched_tokens", "block_size"}
    assert file.spec.resources.gpus_per_engine == 0


def test_the_path_of_a_local_model_is_written_relative_to_the_study_file(tmp_path: Path) -> None:
    model = tmp_path / "models" / "mine"
    model.mkdir(parents=True)
    (model / "config.json").write_text((MODELS / "smollm2-135m" / "config.json").read_text())
    (tmp_path / "studies").mkdir()

    file = write_and_read("models/mine", "studies/first.yaml")

    assert file.spec.model == "../models/mine"
    assert Path(file.model) == model
    assert file.spec.study == "first"


def test_gpus_of_the_machine_share_the_model_and_are_named_as_ray_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.init.gpus_here", lambda: FOUR_A6000)

    written = write_study_file(str(MODELS / "deepseek-r1-distill-qwen-32b"), Path("study.yaml"))
    spec = read(written.path).spec

    assert (spec.resources.gpus_per_engine, spec.resources.accelerator_type) == (4, "RTX-A6000")
    assert spec.engine.args["tensor_parallel_size"] == 4
    assert "gpu_memory_utilization" in spec.space
    assert "long-document-a6000" in spec.recipes
    assert "4 × NVIDIA RTX A6000" in written.summary
    assert "predicted to fit" in written.summary


def test_gpus_that_cannot_share_the_heads_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.init.gpus_here", lambda: FOUR_A6000)

    file = write_and_read(str(MODELS / "smollm2-135m"))

    assert file.spec.engine.args["tensor_parallel_size"] == 1, "9 heads"
    assert file.spec.resources.gpus_per_engine == 1


@pytest.mark.parametrize("gpus", [None, FOUR_A6000, TWO_UNKNOWN])
def test_a_model_that_is_not_here_can_be_named_as_on_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: Gpus | None
) -> None:
    monkeypatch.setattr("tuner.init.gpus_here", lambda: gpus)

    written = write_study_file("some-org/Some-Model-7B", Path("study.yaml"))

    assert read(written.path).spec.study == "some-model-7b"
    assert "not on this machine yet" in written.path.read_text()
    assert "not known" in written.summary


def test_without_a_model_the_quickstart_model_is_taken_where_it_is(tmp_path: Path) -> None:
    model = tmp_path / "models" / "smollm2-135m-instruct"
    model.mkdir(parents=True)
    (model / "config.json").write_text((MODELS / "smollm2-135m" / "config.json").read_text())

    assert write_and_read(None).spec.model == "./models/smollm2-135m-instruct"


def test_without_any_model_a_placeholder_is_written_that_reading_explains() -> None:
    written = write_study_file(None, Path("study.yaml"))

    assert PLACEHOLDER in written.path.read_text()
    with pytest.raises(StudyFileError, match=r"model: there is no folder .*put-your-model-here; correct the path, or"):
        read(written.path)


def test_the_workload_fits_a_short_context(tmp_path: Path) -> None:
    config = (MODELS / "smollm2-135m" / "config.json").read_text()
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "config.json").write_text(
        config.replace('"max_position_embeddings": 8192', '"max_position_embeddings": 512')
    )

    spec = write_and_read("./short").spec

    assert spec.engine.args["max_model_len"] <= 512


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text("mine")

    with pytest.raises(UsageError, match=r"study\.yaml: is there already; name another file with -o"):
        write_study_file(None, Path("study.yaml"))
    assert (tmp_path / "study.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("./nowhere", "no such folder"),
        ("not a name!", "no such folder"),
        ("empty", "holds no config.json"),
    ],
)
def test_what_is_no_model_is_refused_by_name(tmp_path: Path, model: str, problem: str) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(UsageError, match=problem):
        write_study_file(model, Path("study.yaml"))
    assert not (tmp_path / "study.yaml").exists()


def test_a_folder_that_cannot_be_written_is_said_in_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"missing/study\.yaml: cannot be written \(No such file or directory\)"):
        write_study_file(None, Path("missing/study.yaml"))
