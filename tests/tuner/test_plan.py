from __future__ import annotations

import json
from pathlib import Path

import pytest

from tuner.design import design_points
from tuner.errors import StudyFileError
from tuner.ledger import History
from tuner.model_files import config_json
from tuner.opening import planned_machine
from tuner.plan import Plan, plan
from tuner.space import Parameter
from tuner.spec import StudySpec
from tuner.study_file import parse, read
from tuner.study_hours import Assumed, TrialTime, hours, measured_time, spread, start_time

SMOLLM2 = Path(__file__).parents[1] / "data" / "models" / "smollm2-135m"

EXAMPLES = Path(__file__).parents[2] / "examples"

STUDY = """
study: tiny
model: {model}
engine:
  backend: twin
  device: cpu
  args: {{max_model_len: 1024, block_size: 32}}
workload:
  kind: long_documents
  requests: 12
  prompt_tokens: [128, 512]
  output_tokens: 16
  arrivals: {{kind: poisson, rate_per_s: 4}}
space:
  max_num_seqs: [1, 4, 16]
  max_num_batched_tokens: {{low: 64, high: 1024, log: true}}
  # 1024 tokens of this model need 22.5 MiB: a third of these cannot start.
  kv_cache_memory_bytes: [8388608, 67108864, 268435456]
  async_scheduling: [true, false]
recipes: [low-latency, long-document-a6000]
budget: {{hours: 1}}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("plan")
    file = folder / "tiny.yaml"
    file.write_text(STUDY.format(model=SMOLLM2))
    return plan(str(file), lambda _: None, limit_s=1.5, store=folder / "mlruns")


def test_a_third_of_the_space_is_refused_without_an_engine(tiny: Plan) -> None:
    assert tiny.space.reasons == {"oom_kv_cache": pytest.approx(tiny.space.samples / 3, abs=2)}
    assert tiny.space.admitted == pytest.approx(2 / 3, abs=0.01)


def test_every_trial_of_a_plan_is_predicted_and_marked_so(tiny: Plan) -> None:
    document = tiny.document()

    assert document["predicted"] is True
    assert document["front"]["reference"]["predicted"] is True
    assert document["front"]["trials"]
    assert all(trial["predicted"] for trial in document["front"]["trials"])
    assert json.dumps(document, allow_nan=False)


def test_a_plan_begins_with_the_reference_and_the_recipes_that_apply(tiny: Plan) -> None:
    sources = [trial.source for trial in tiny.study.trials]

    assert sources[:2] == ["reference", "recipe:low-latency"]
    assert set(sources[2:]) == {"design"}
    assert "it needs 4 GPUs" in tiny.skipped["long-document-a6000"]


def test_what_matters_is_ranked_and_what_the_twin_does_not_know_is_named(tiny: Plan) -> None:
    by_target = {item.target: item.shares for item in tiny.importance}

    assert max(by_target["TTFT p95"], key=lambda name: by_target["TTFT p95"][name]) == "max_num_seqs"
    assert tiny.not_modelled == ["async_scheduling"]


def test_figures_are_written_as_png_and_html_beside_the_store(tiny: Plan) -> None:
    names = {path.name for path in tiny.figures}

    assert {"front.png", "front.html", "importance.png", "importance.html"} <= names
    assert all(path.is_file() and path.parent.parent.name == "plans" for path in tiny.figures)


def test_every_table_on_screen_says_that_it_is_predicted(tiny: Plan) -> None:
    titles = [str(getattr(item, "title", None) or item) for item in tiny.renderables()]

    assert all("predicted" in title for title in titles)


def test_a_gpu_study_is_planned_for_the_device_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "gpu.yaml"
    text = STUDY.format(model=SMOLLM2).replace("  backend: twin\n  device: cpu\n", "")
    file.write_text(text + "resources: {gpus_per_engine: 4, accelerator_type: Vaxputer}\n")

    with pytest.raises(StudyFileError, match=r"resources\.accelerator_type: .*Vaxputer.*A6000"):
        plan(str(file), lambda _: None, store=tmp_path / "mlruns")


def _spec(budget: str, noise: str = "{aa_runs: 1, sentinel_every: 10}", engines: int = 1) -> StudySpec:
    import yaml

    document = yaml.safe_load(STUDY.format(model=SMOLLM2).replace("budget: {hours: 1}", ""))
    parts = {"budget": yaml.safe_load(budget), "noise": yaml.safe_load(noise), "resources": {"engines": engines}}
    return parse(document | parts, Path("x.yaml"))


def _trial(seconds: float) -> TrialTime:
    nothing = Assumed(0, 0, 0)
    return TrialTime(nothing, 0.0, Assumed(seconds, seconds / 2, seconds * 2), 0.0, nothing, "made up")


def test_repeats_of_the_reference_take_time_beside_the_trials_of_the_budget() -> None:
    found = hours(_spec("{trials: 21}"), _trial(600))

    assert (found.candidates, found.repeats, found.ended_by) == (21, 3, "trials")
    assert found.hours == pytest.approx(24 * 600 / 3600)
    assert found.hours_interval == pytest.approx((2.0, 8.0))


def test_hours_end_a_study_before_its_trials_do() -> None:
    found = hours(_spec("{trials: 500, hours: 9}"), _trial(600))

    assert found.ended_by == "hours"
    assert found.candidates + found.repeats <= 54
    assert 8.5 < found.hours <= 9
    assert found.hours_interval[1] <= 9


def test_engines_beside_each_other_shorten_a_study() -> None:
    one, four = (hours(_spec("{trials: 20}", engines=n), _trial(600)) for n in (1, 4))

    assert (one.candidates, four.candidates) == (20, 20)
    assert four.hours == pytest.approx(6 * 600 / 3600)
    assert one.hours == pytest.approx(22 * 600 / 3600)


def test_a_start_reads_the_weights_and_compiles_unless_it_is_eager() -> None:
    compiled = start_time(weights_gib=60, on_cpu=False, eager=False)
    eager = start_time(weights_gib=60, on_cpu=False, eager=True)

    assert compiled.low < eager.value < compiled.value < compiled.high
    assert compiled.value - start_time(weights_gib=0, on_cpu=False, eager=False).value == pytest.approx(50)


def test_times_of_the_space_are_told_with_their_quartiles() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == Assumed(3.0, 2.0, 4.0)
    assert spread([]) == Assumed(0.0, 0.0, 0.0)


def test_the_example_of_a_night_on_a6000_can_be_planned_where_neither_model_nor_gpu_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = read(EXAMPLES / "a6000-qwen32b-longdoc.yaml")

    machine, device = planned_machine(file)

    assert (machine.device, machine.total_gib, device.name) == ("cuda", 47.5, "A6000")
    assert (config_json(file) or {})["num_hidden_layers"] == 64


def test_nothing_is_measured_before_the_first_trial() -> None:
    assert measured_time(History(None, (), (), ())) is None


def test_more_points_of_a_design_begin_with_the_same_ones() -> None:
    space = {"a": Parameter(low=0.5, high=0.95, step=0.05), "b": Parameter(choices=(1, 2, 3))}

    few, many = design_points(space, 3, 7), design_points(space, 64, 7)

    assert many[:3] == few
    assert all(len(str(point["a"])) <= 4 for point in many)
