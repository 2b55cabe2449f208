"""What follows a study, on a made-up study in a folder of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from study_samples import STUDY, sample_history, sample_verification, write_study

from tuner import handover
from tuner.engine.accelerators import Gpus
from tuner.errors import PickError
from tuner.handover import Verified, export
from tuner.ledger import Agreement, History, VerifiedRun

HISTORY = sample_history(8, running=False)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The study's name, in the folder where it was run, with the vLLM and the GPUs that it was measured on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tuner.export.defaults.engine_defaults", dict)
    monkeypatch.setattr("tuner.engine.vllm.vllm_version", lambda: "0.32.0")
    monkeypatch.setattr("tuner.engine.accelerators.gpus_here", lambda: Gpus(4, "NVIDIA RTX A6000", 47.5))
    write(tmp_path, HISTORY)
    return STUDY


def write(root: Path, history: History) -> None:
    folder = root / "mlruns" / "studies" / STUDY
    write_study(folder, history, tables=False)
    document = {
        "study": STUDY,
        "model": "Qwen/Qwen3-32B",
        "workload": {"kind": "long_documents", "prompt_tokens": {"512": 24}, "output_tokens": 16,
                     "arrivals": {"kind": "poisson", "rate_per_s": 1}},
        "space": {"max_num_seqs": [4, 8]},
        "budget": {"trials": 8},
    }  # fmt: skip
    (root / "longdoc.yaml").write_text(yaml.safe_dump(document))
    (folder / "origin.json").write_text(json.dumps({"study_file": str(root / "longdoc.yaml")}))


def run(study: str, format_name: str = "json", pick: str = "trial:1", **options: bool) -> list[str]:
    rules = {"force": False, "verified": False, "allow_different": False, **options}
    return export(study, format_name=format_name, pick_text=pick, into=Path("deploy"), **rules)


def test_an_export_says_which_files_it_wrote(study: str) -> None:
    assert run(study) == ["deploy/longdoc-trial-1.json"]
    assert json.loads(Path("deploy/longdoc-trial-1.json").read_text())["trial"] == 1


def test_a_format_that_does_not_exist_is_answered_with_those_that_do(study: str) -> None:
    with pytest.raises(PickError, match=r"there is no such format; there are vllm, compose, .*, json, mlflow"):
        run(study, "helm")


@pytest.mark.parametrize(
    ("pick", "sentence"),
    [
        ("trial:3", "infeasible"),
        ("trial:6", "out of memory|infeasible"),
        ("slo:ttft_p95_s<=0.001", "keeps every limit"),
    ],
)
@pytest.mark.parametrize("format_name", ["vllm", "mlflow"])
def test_what_may_not_be_deployed_is_refused_in_every_format(
    study: str, format_name: str, pick: str, sentence: str
) -> None:
    with pytest.raises(PickError, match=sentence):
        run(study, format_name, pick)


@pytest.mark.parametrize("format_name", ["vllm", "mlflow"])
def test_an_unverified_trial_is_refused_where_that_is_asked(study: str, format_name: str) -> None:
    with pytest.raises(PickError, match="trial 1 is not verified; run `tuner verify`"):
        run(study, format_name, verified=True)


def test_another_gpu_or_vllm_here_is_refused_unless_allowed(study: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.engine.accelerators.gpus_here", lambda: Gpus(4, "NVIDIA H100 80GB HBM3", 79.6))
    with pytest.raises(PickError, match="measured with device NVIDIA RTX A6000, and here it is NVIDIA H100"):
        run(study)

    assert run(study, allow_different=True)


def test_a_machine_without_gpus_may_write_the_deployment(study: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.engine.accelerators.gpus_here", lambda: None)

    assert run(study)


def test_a_verification_is_told_in_lines_and_as_json() -> None:
    compared = Agreement("ttft_p95_s", 1.0, 1.3, 0.3, 0.1, 1.2, 0.083)
    runs = (VerifiedRun(0, "default", {"ttft_p95_s": 2.0}), VerifiedRun(0, "pick", {"ttft_p95_s": 1.3}))
    verified = Verified(replace(sample_verification(1), runs=runs, agreement=(compared,)))

    lines, document = verified.lines(), json.loads(json.dumps(verified.document()))

    assert lines[0] == "trial 1 against vLLM's defaults, 3 rounds, over HTTP:"
    assert lines[1] == "  ttft_p95_s: better, -31.0% (-36.0% … -25.0%)"
    assert "1.3 served, 1 in process (+30.0%)" in lines[-1]
    assert document["agreement"]["ttft_p95_s"]["within_noise"] is False
    assert [r["side"] for r in document["runs"]] == ["default", "pick"]


def test_a_verification_says_where_noise_could_hide_what_matters() -> None:
    wide = replace(sample_verification(1), interval={"ttft_p95_s": (-0.5, -0.1), "tpot_p95_s": (-0.2, 0.3)})

    narrow, hidden = Verified(sample_verification(1)).lines()[2], Verified(wide).lines()[2]

    assert narrow == "  tpot_p95_s: no difference, +1.0% (-3.0% … +5.0%)"
    assert hidden.endswith("(-20.0% … +30.0%); the noise could hide 15%: more --rounds narrow it")


def test_the_file_that_verify_serves_is_the_one_that_export_writes(study: str) -> None:
    _, shown, _ = handover.load(study)
    run(study, "vllm")

    assert handover._config_text(shown, shown.trial(1)) == Path("deploy/longdoc-trial-1.yaml").read_text()
