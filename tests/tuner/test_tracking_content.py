from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from study_samples import sample_history, sample_measurement, sample_verification

from tuner import artifacts
from tuner.config import EngineConfig
from tuner.ledger import Attempt, TrialRecord
from tuner.series import device_series, step_series, thin
from tuner.tracking.content import LONGEST_VALUE, RunContent, front_tags, metric_key, revision, trial_content
from tuner.tracking.evidence import stage_files, trim_log
from tuner.tracking.series import MOST_POINTS, trial_series
from tuner.tracking.verified import verification_content
from tuner.view import Objective, StudyView, view

OBJECTIVES = (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s"))
STUDY = view(sample_history(), OBJECTIVES)


def content_of(number: int, study: StudyView = STUDY) -> RunContent:
    return trial_content(study, study.trial(number))


def metrics_of(content: RunContent) -> dict[str, float]:
    return {point.key: point.value for point in content.metrics}


def test_a_complete_trial_has_its_objectives_with_both_ends_of_their_intervals() -> None:
    metrics = metrics_of(content_of(1))
    assert metrics["ttft_p95_s.low"] < metrics["ttft_p95_s"] < metrics["ttft_p95_s.high"]
    assert {"violation.memory", "violation.ttft_p99_s.le_20", "start_s", "kv_tokens", "requests_per_s"} <= set(metrics)


def test_metrics_by_prompt_length_stay_in_the_document() -> None:
    content = content_of(1)
    assert not [key for key in metrics_of(content) if "2048" in key]
    assert "ttft_p95_s@2048" in content.documents["score.json"]["values"]


def test_an_objective_by_prompt_length_is_a_metric() -> None:
    study = view(sample_history(), (Objective("ttft_p95_s@2048", "s"), OBJECTIVES[1]))
    assert "ttft_p95_s.at_2048" in metrics_of(content_of(1, study))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_out(bad: float) -> None:
    trial = STUDY.trial(1)
    assert trial.score is not None
    score = replace(trial.score, values={**trial.score.values, "ttft_mean_s": bad})
    metrics = metrics_of(trial_content(STUDY, replace(trial, score=score)))
    assert "ttft_mean_s" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())


def test_params_are_what_is_searched_and_what_differs_from_the_reference() -> None:
    trial = STUDY.trial(1)
    changed = replace(trial, config=trial.config.with_args({"enforce_eager": True, "env.VLLM_LOGGING_LEVEL": "INFO"}))
    params = trial_content(STUDY, changed).params
    assert set(trial.params) <= set(params)
    assert (params["enforce_eager"], params["env.VLLM_LOGGING_LEVEL"]) == ("true", "INFO")
    assert "model" not in params


def test_long_values_are_cut() -> None:
    trial = STUDY.trial(1)
    changed = replace(trial, config=trial.config.with_args({"compilation_config": {"sizes": list(range(1000))}}))
    assert len(trial_content(STUDY, changed).params["compilation_config"]) == LONGEST_VALUE


def test_tags_say_state_and_place_on_the_front() -> None:
    knee, reference = content_of(STUDY.knee or 0).tags, content_of(0).tags
    assert (knee["pareto"], knee["knee"], knee["reference"]) == ("true", "true", "false")
    assert (reference["reference"], reference["engine"], reference["gpu"]) == ("true", "vllm", "4 x NVIDIA RTX A6000")


def test_a_failed_trial_says_why() -> None:
    content = content_of(6)
    assert (content.status, content.tags["state"]) == ("FAILED", "infeasible")
    assert (content.tags["failure.kind"], content.tags["failure.stage"]) == ("oom_kv_cache", "kv_cache")
    note = content.tags["mlflow.note.content"]
    assert "4.00 GiB KV cache is needed" in note
    assert "Needed 4.00 GiB, available 0.41 GiB." in note
    assert metrics_of(content)["violation.memory"] > 0


def test_void_and_beyond_a_constraint_are_explained() -> None:
    assert "void (client_late)" in content_of(10).tags["mlflow.note.content"]
    assert "`ttft_p99_s <= 20` by 0.34" in content_of(8).tags["mlflow.note.content"]


def test_earlier_attempts_are_mentioned() -> None:
    trial = replace(STUDY.trial(1), attempts=(Attempt(STUDY.trial(12).failure, (), 1800.0),))
    content = trial_content(STUDY, trial)
    assert "An earlier attempt took 1800 s (hung: No progress for 1800 s.)" in content.tags["mlflow.note.content"]
    assert metrics_of(content)["failed_attempts"] == 1.0


def test_a_predicted_trial_says_so() -> None:
    content = content_of(1, view(sample_history(predicted=True), OBJECTIVES))
    assert (content.tags["predicted"], content.tags["engine"]) == ("true", "twin")
    assert "Predicted by the twin" in content.tags["mlflow.note.content"]


def test_no_secret_reaches_params_tags_or_documents() -> None:
    trial = STUDY.trial(6)
    assert trial.failure is not None
    secret = "s3cr3t-value"
    config = EngineConfig(
        {**trial.config.args, "api_key": secret, "served_model_name": f"x-{secret}"}, {"A_TOKEN": secret}
    )
    failure = replace(trial.failure, message=f"refused {secret}")
    content = trial_content(STUDY, replace(trial, config=config, failure=failure))
    assert secret not in json.dumps([content.tags, content.params, content.documents], default=dict)
    assert content.params["api_key"] == "***"


def test_the_revision_changes_with_the_record_only() -> None:
    trial = STUDY.trial(1)
    assert revision(trial) == revision(replace(trial))
    assert revision(trial) != revision(replace(trial, engine_s=1.0))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("ttft_p95_s", "ttft_p95_s"),
        ("ttft_p95_s@1025-2048", "ttft_p95_s.at_1025-2048"),
        ("mine:score", "mine_score"),
        ("tpot_p95_s >= 0.1", "tpot_p95_s.ge_0.1"),
    ],
)
def test_metric_keys_need_no_quotes_in_a_filter(name: str, key: str) -> None:
    assert metric_key(name) == key


def measured(folder: Path, number: int = 1, **changes: Any) -> TrialRecord:
    trial = STUDY.trial(number)
    artifacts.save(replace(sample_measurement(trial), **changes), folder)
    return trial


def test_series_are_thinned_and_grouped_by_device(tmp_path: Path) -> None:
    trial = measured(tmp_path)
    points = trial_series(tmp_path, trial.started_at)
    keys = {point.key for point in points}
    assert {"gpu0/memory_used_gib", "gpu0/sm_clock_mhz", "engine/kv_usage"} <= keys
    assert max(sum(p.key == key for p in points) for key in keys) <= MOST_POINTS
    steps = [p.step for p in points if p.key == "gpu0/power_w"]
    assert steps == sorted(steps)
    assert steps[0] == 0


def test_thinning_keeps_the_worst_reading() -> None:
    at_s, values = np.arange(1000.0), np.sin(np.arange(1000.0))
    assert thin(at_s, values, 50)[1].max() == values.max()
    assert thin(at_s, values, 50, least=True)[1].min() == values.min()
    assert thin(at_s[:7], values[:7], 50)[1].tolist() == values[:7].tolist()
    assert thin(at_s[:0], values[:0], 50)[1].size == 0


def test_a_clock_that_starts_again_with_each_repeat_goes_on(tmp_path: Path) -> None:
    device = sample_measurement(STUDY.trial(1)).device[:4]
    measured(tmp_path, device=device + device)
    since_s, _ = device_series(tmp_path, 100)["gpu0"]["memory_used_gib"]
    assert since_s.tolist() == sorted(since_s.tolist())
    assert since_s.size == 8


def test_a_trial_without_tables_has_no_series(tmp_path: Path) -> None:
    assert (device_series(tmp_path, 10), step_series(tmp_path, 10), trial_series(tmp_path, 0.0)) == ({}, {}, ())


def test_a_table_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    folder, staged = tmp_path / "trial", tmp_path / "staged"
    staged.mkdir()
    trial = measured(folder)
    (folder / "device.parquet").write_bytes((folder / "device.parquet").read_bytes()[:100])
    stage_files(staged, folder, {}, None, ())
    assert {p.name for p in staged.iterdir()} == {"requests.parquet", "steps.parquet"}
    assert {p.key.partition("/")[0] for p in trial_series(folder, trial.started_at)} == {"engine"}


def test_a_log_is_trimmed_to_head_evidence_and_tail() -> None:
    lines = [f"line {i}" for i in range(1000)]
    lines[500] = "the cause is here"
    trimmed = trim_log("\n".join(lines), "the cause is here")
    assert "the cause is here" in trimmed
    assert "lines left out" in trimmed
    assert {"line 0", "line 999", "line 471", "line 529"} <= set(trimmed.splitlines())
    assert len(trimmed.splitlines()) < 200


def test_a_short_log_is_kept_whole() -> None:
    assert trim_log("a\nb\n", "b") == "a\nb\n"
    assert trim_log("", "x") == ""


def test_errors_in_tables_and_logs_are_masked(tmp_path: Path) -> None:
    folder, staged = tmp_path / "trial", tmp_path / "staged"
    staged.mkdir()
    requests = sample_measurement(STUDY.trial(1)).requests
    measured(folder, requests=(replace(requests[0], error="refused for s3cr3t-value"), *requests[1:]))
    (folder / "engine.log").write_text("using s3cr3t-value\n")
    stage_files(staged, folder, {"config.json": {"a": 1}}, STUDY.trial(6).failure, ("s3cr3t-value",))
    assert pq.read_table(staged / "requests.parquet")["error"][0].as_py() == "refused for ***"
    assert (staged / "engine.log").read_text() == "using ***\n"
    assert {p.name for p in staged.iterdir()} == {
        "config.json",
        "requests.parquet",
        "steps.parquet",
        "device.parquet",
        "engine.log",
    }


def test_a_verification_is_metrics_tags_and_a_file_of_its_trial() -> None:
    history = sample_history(4, running=False)
    twice = (sample_verification(1), sample_verification(1))
    study = view(replace(history, verifications=twice), OBJECTIVES)

    content = verification_content(study, 1)

    assert content.tags["verification"] == "ttft_p95_s better, tpot_p95_s no difference (3 rounds over HTTP)"
    changes = {p.step: p.value for p in content.metrics if p.key == "verify.ttft_p95_s.change"}
    assert changes == {0: -0.31, 1: -0.31}
    assert len(json.loads(content.text)) == 2
    assert front_tags(study, 1)["verified"] == "true"
    assert front_tags(study, 2)["verified"] == "false"


def test_another_verification_is_another_revision() -> None:
    history = sample_history(4, running=False)
    once = view(replace(history, verifications=(sample_verification(1),)), OBJECTIVES)
    twice = view(replace(history, verifications=(sample_verification(1),) * 2), OBJECTIVES)

    assert verification_content(once, 1).tags != verification_content(twice, 1).tags
