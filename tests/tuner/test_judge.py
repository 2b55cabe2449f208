from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from toy_study import PROBE, SPEC, WORKLOAD, measured

from objectives.validity import Reference
from tuner.config import EngineConfig
from tuner.errors import StudyFileError
from tuner.judge import judge, objectives_of, user_metrics
from tuner.study_file import StudyFile, parse
from tuner.view import Objective

CONFIG = EngineConfig()
OWN = {"metric": "own:cost", "direction": "minimize"}


def study(folder: Path, **changes: Any) -> StudyFile:
    path = folder / "study.yaml"
    return StudyFile(path, parse({**SPEC, **changes}, path))


def test_objectives_are_those_of_the_file_with_unit_and_direction(tmp_path: Path) -> None:
    file = study(tmp_path, objectives=["output_tokens_per_s", {"metric": "own:cost", "direction": "maximize"}])

    assert objectives_of(file) == (
        Objective("output_tokens_per_s", "tokens/s", "maximize"),
        Objective("own:cost", "", "maximize"),
    )


def test_direction_of_the_file_goes_before_that_of_the_metric(tmp_path: Path) -> None:
    file = study(tmp_path, objectives=[{"metric": "kv_use_mean", "direction": "maximize"}])

    assert objectives_of(file)[0].direction == "maximize"


def test_correction_for_drift_replaces_what_follows_the_speed_of_the_machine(tmp_path: Path) -> None:
    file = study(tmp_path, measure={"drift": "correct"}, objectives=["ttft_p95_s@2048", "kv_use_mean", OWN])

    assert [o.name for o in objectives_of(file)] == ["ttft_p95_s@2048_corrected", "kv_use_mean", "own:cost"]


def test_own_metric_is_loaded_from_the_folder_of_the_study_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from helper import FACTOR\n\ndef cost(m):\n    return FACTOR * len(m.requests)\n")
    (tmp_path / "helper.py").write_text("FACTOR = 2\n")
    file = study(tmp_path, objectives=[OWN], constraints=["own:cost <= 39"])

    metrics = user_metrics(file)
    score = judge(file, measured(CONFIG), WORKLOAD, None, metrics)

    assert list(metrics) == ["own:cost"]
    assert score.values["own:cost"] == 40
    assert score.violations["own:cost <= 39"] == pytest.approx(1 / 39)


def test_own_metric_may_lie_in_a_folder_below_and_hold_dataclasses(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass Cost:\n    euro: float\n\ndef cost(m):\n    return Cost(3.0).euro\n"
    )
    file = study(tmp_path, objectives=[{"metric": "mine.own:cost", "direction": "minimize"}])

    assert user_metrics(file)["mine.own:cost"](measured(CONFIG)) == 3.0


@pytest.mark.parametrize("name", ["json", "objectives", "tuner", "os"])
def test_module_that_is_installed_never_stands_in_for_one_of_the_study(tmp_path: Path, name: str) -> None:
    file = study(tmp_path, objectives=[{"metric": f"{name}:cost", "direction": "minimize"}])
    with pytest.raises(StudyFileError, match=rf"objectives\.0: {name}:cost: there is no .*{name}\.py; put it beside"):
        user_metrics(file)

    (tmp_path / f"{name}.py").write_text("def cost(m):\n    return 7\n")

    assert user_metrics(file)[f"{name}:cost"](measured(CONFIG)) == 7


def test_two_studies_with_modules_of_the_same_name_keep_their_own(tmp_path: Path) -> None:
    for value in (1, 2):
        folder = tmp_path / str(value)
        folder.mkdir()
        (folder / "own.py").write_text(f"def cost(m):\n    return {value}\n")

    values = [user_metrics(study(tmp_path / str(v), objectives=[OWN]))["own:cost"](measured(CONFIG)) for v in (1, 2)]

    assert values == [1, 2]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, r"there is no .*own\.py; put it beside the study file"),
        ("def other(m): ...\n", r"own\.py has no function cost; correct it"),
        ("cost = 3\n", r"own\.py has no function cost"),
        ("def cost(m:\n", r"own\.py cannot be imported \(SyntaxError"),
        ("import nothing_of_this_name\n", r"cannot be imported \(ModuleNotFoundError: No module named"),
        ("1 / 0\n", r"cannot be imported \(ZeroDivisionError: division by zero\); mend it"),
    ],
)
def test_own_metric_that_cannot_be_had_is_a_sentence(tmp_path: Path, content: str | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / "own.py").write_text(content)

    with pytest.raises(StudyFileError, match=sentence):
        user_metrics(study(tmp_path, constraints=["own:cost <= 1"]))


def test_limits_of_the_file_decide_what_is_void(tmp_path: Path) -> None:
    late = measured(CONFIG, notes={"client_lateness_p99_s": 0.2})
    strict = study(tmp_path, measure={"max_send_lateness_s": 0.1})
    lenient = study(tmp_path, measure={"max_send_lateness_s": 0.3})
    many = study(tmp_path, measure={"min_requests": 21, "max_send_lateness_s": 0.3})

    assert [r.code for r in judge(strict, late, WORKLOAD, None, {}).void] == ["client_late"]
    assert judge(lenient, late, WORKLOAD, None, {}).void == ()
    assert [r.code for r in judge(many, late, WORKLOAD, None, {}).void] == ["too_few_requests"]


def test_goodput_is_counted_against_the_limits_of_the_file(tmp_path: Path) -> None:
    file = study(tmp_path, objectives=["goodput_requests_per_s"], slo={"ttft_s": 0.001})

    assert judge(file, measured(CONFIG), WORKLOAD, None, {}).values["goodput_requests_per_s"] == 0


def test_lost_requests_are_counted_against_the_workload(tmp_path: Path) -> None:
    whole = measured(CONFIG)

    score = judge(study(tmp_path), dataclasses.replace(whole, requests=whole.requests[1:]), WORKLOAD, None, {})

    assert [r.code for r in score.void] == ["lost_requests"]


def test_corrected_times_are_those_of_the_reference_machine(tmp_path: Path) -> None:
    file = study(tmp_path, measure={"drift": "correct"})
    slow = dataclasses.replace(PROBE, prefill_s=4 * PROBE.prefill_s)
    reference = Reference.of(measured(CONFIG))

    first = judge(file, measured(CONFIG), WORKLOAD, None, {}).values
    later = judge(file, measured(CONFIG, speed_before=slow, speed_after=slow), WORKLOAD, reference, {}).values

    assert first["ttft_p95_s_corrected"] == first["ttft_p95_s"]
    assert later["speed_index"] == pytest.approx(2.0)
    assert later["ttft_p95_s_corrected"] == pytest.approx(later["ttft_p95_s"] / 2)


def test_without_correction_the_speed_is_recorded_and_changes_nothing(tmp_path: Path) -> None:
    reference = Reference.of(measured(CONFIG))

    values = judge(study(tmp_path), measured(CONFIG), WORKLOAD, reference, {}).values

    assert values["speed_index"] == pytest.approx(1.0)
    assert not any(name.endswith("_corrected") for name in values)
