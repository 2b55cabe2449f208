from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from study_samples import DEFAULTS, sample_history, sample_verification, write_study

from objectives.metrics import names as metric_names
from tuner.ledger import History, StudyNote, TrialState
from tuner.report import interactive, still
from tuner.report.chart import STYLES, Chart
from tuner.report.charts import (
    front_chart,
    hypervolume_chart,
    importance_chart,
    prompt_length_chart,
)
from tuner.report.charts_of_tables import distribution_chart, night_chart
from tuner.report.figures import study_charts
from tuner.report.html import report_page, write_report
from tuner.report.importance import importances
from tuner.report.parallel import parameters_chart
from tuner.report.table import front_rows, trial_row
from tuner.report.verdict import failures_by_kind, verdict
from tuner.report.words import digits, interval, label, param_text, percent, quantity
from tuner.view import Objective, StudyView, view

OBJECTIVES = (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s"))
STUDY = view(sample_history(), OBJECTIVES)
EMPTY = view(History(None, (), (), ()), OBJECTIVES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study")
    write_study(path, sample_history())
    return path


@pytest.fixture(scope="module")
def charts(folder: Path) -> list[Chart]:
    return study_charts(STUDY, folder)


@pytest.fixture(scope="module")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(STUDY, folder, tmp_path_factory.mktemp("report"))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.7449, "s", "1.74 s"),
        (0.0881, "s", "88.1 ms"),
        (0.934, "share", "93.4%"),
        (18434.2, "tokens/s", "18,434 tokens/s"),
        (0.0, "GiB", "0 GiB"),
        (0.00012, "", "0.000120"),
    ],
)
def test_quantities_have_three_digits_and_a_fitting_unit(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_changes_and_intervals_read_well() -> None:
    assert [percent(x) for x in (-0.312, 0.04, 0.004, 0.0, 2.97)] == ["−31%", "+4%", "+0.4%", "0.0%", "+297%"]
    assert interval(0.9, 1.2, "s") == "0.900–1.20 s"
    assert digits(1234567.0) == "1,234,567"


def test_every_metric_has_a_label_without_underscores() -> None:
    assert not [name for name in metric_names() if "_" in label(name)]
    assert label("ttft_p95_s@2048_corrected") == "TTFT p95, prompts of 2048 tokens, corrected for machine speed"


def test_a_parameter_that_is_a_secret_is_masked() -> None:
    assert param_text("api_key", "abc") == "api_key=***"
    assert param_text("enable_prefix_caching", True) == "enable_prefix_caching=true"


def test_the_table_begins_with_the_reference_and_has_the_whole_front() -> None:
    rows = front_rows(STUDY)
    assert rows[0].reference
    assert [row.number for row in rows[1:]] == list(STUDY.front)
    assert rows[0].changed == {}
    assert rows[0].measurements == 2


def test_changes_are_relative_to_the_reference() -> None:
    row = trial_row(STUDY, STUDY.knee or 0)
    assert row is not None
    reference = STUDY.results[0].values
    for cell in row.cells:
        assert cell.change == pytest.approx(cell.value / reference[cell.objective.name] - 1.0)
    assert row.changed == {
        name: value for name, value in STUDY.trial(row.number).params.items() if DEFAULTS[name] != value
    }


def test_a_change_within_the_noise_is_neither_better_nor_worse() -> None:
    row = trial_row(STUDY, 20)
    assert row is not None
    assert [cell.better for cell in row.cells] == [None, None]


def test_a_trial_without_measurement_has_no_row() -> None:
    assert trial_row(STUDY, 6) is None


def test_the_verdict_names_the_gain_without_loss_and_the_trade() -> None:
    said = verdict(STUDY)
    assert said.headline == (
        "Better than the defaults at no cost beyond noise: trial 11 has 23% less TPOT p95. "
        "A trade: the knee (trial 13) has 55% less TPOT p95, for 53% more TTFT p95."
    )
    assert [t.pick for t in said.trade_offs] == ["knee", "trial:27", "trial:2"]
    assert said.deploy[-1].startswith("tuner export longdoc")


def test_the_verdict_says_what_the_verification_found() -> None:
    said = verdict(replace(STUDY, verifications=(sample_verification(13),)))
    assert said.verification == (
        "Trial 13 measured again against the defaults in 3 rounds over HTTP: TTFT p95 −31% (−36% to −25%): better; "
        "TPOT p95 +1% (−3% to +5%): no difference."
    )


def test_the_verdict_is_honest_about_nothing() -> None:
    assert verdict(EMPTY).headline == "No configuration has been measured yet."
    failed = tuple(t for t in sample_history().trials if t.state is TrialState.INFEASIBLE and t.failure)
    assert verdict(view(History(None, failed, (), ()), OBJECTIVES)).headline == (
        "None of 3 trials is complete; most frequent: oom_kv_cache at gate (2 times)."
    )
    alone = view(sample_history(1, running=False), OBJECTIVES)
    assert "Nothing was found" in verdict(alone).headline


def test_the_verdict_works_without_a_measured_reference() -> None:
    history = sample_history()
    study = view(replace(history, trials=history.trials[1:20]), OBJECTIVES)
    assert "the defaults have no measurement" in verdict(study).headline
    assert study.hypervolume is None


def test_a_predicted_study_says_so_everywhere(folder: Path) -> None:
    study = view(sample_history(predicted=True), OBJECTIVES)
    said = verdict(study)
    assert said.headline.startswith("Predicted, not measured")
    assert said.deploy == ()
    assert all("predicted" in chart.title for chart in study_charts(study, folder) if chart.name != "night")
    assert "Predicted by the twin" in report_page(study, [])


def test_notes_of_the_study_are_told() -> None:
    study = replace(STUDY, notes=(StudyNote("drift", "The machine drifted by 12% from trial 14 on.", 0.0),))
    assert "The machine drifted by 12% from trial 14 on." in verdict(study).trust


def test_failures_are_counted_by_kind_and_stage() -> None:
    counts = [(kind, stage, number) for kind, stage, number, _ in failures_by_kind(STUDY)]
    assert counts == [("oom_kv_cache", "gate", 2), ("hung", "graph_capture", 2), ("oom_kv_cache", "kv_cache", 1)]


def test_the_front_shows_what_may_not_be_compared_apart(charts: list[Chart]) -> None:
    (panel,) = next(chart for chart in charts if chart.name == "front").panels
    names = [series.name for series in panel.series]
    assert {"complete", "beyond a constraint", "void", "front", "knee (trial 13)", "defaults (trial 0)"} <= set(names)
    front = next(series for series in panel.series if series.role == "front")
    assert front.y_interval
    assert all("max_num_seqs=" in text for text in front.hover)
    assert (panel.x.title, panel.y.title) == ("TTFT p95 (s)", "TPOT p95 (ms)")


def test_every_axis_says_its_unit_or_what_it_counts(charts: list[Chart]) -> None:
    for chart in charts:
        for panel in chart.panels:
            assert all(axis.ticks or re.search(r"\(.+\)|share|place", axis.title) for axis in (panel.x, panel.y))


def test_no_role_is_told_by_colour_alone() -> None:
    roles = ("complete", "infeasible", "void", "knee", "reference")
    assert len({STYLES[role].symbol for role in roles}) == len(roles)
    assert STYLES["front"].size > STYLES["complete"].size
    assert STYLES["knee line"].line != STYLES["reference line"].line


def test_all_figures_are_there_for_a_whole_study(charts: list[Chart]) -> None:
    assert [chart.name for chart in charts] == [
        "front",
        "parameters",
        "importance",
        "hypervolume",
        "ttft_by_prompt_length",
        "latency_distribution",
        "night",
    ]


def test_figures_that_lack_their_tables_are_left_out(tmp_path: Path) -> None:
    assert distribution_chart(STUDY, tmp_path) is None
    bare = replace(STUDY, trials=tuple(replace(t, speed_before=None, speed_after=None) for t in STUDY.trials))
    assert night_chart(bare, tmp_path) is None
    assert study_charts(EMPTY, tmp_path) == []


def with_objectives(*objectives: Objective) -> StudyView:
    return view(sample_history(), objectives)


@pytest.mark.parametrize(
    ("objectives", "panels"),
    [
        ((OBJECTIVES[0],), 1),
        ((*OBJECTIVES, Objective("requests_per_s", "1/s", "maximize")), 2),
        ((Objective("requests_per_s", "1/s", "maximize"), OBJECTIVES[1]), 1),
    ],
)
def test_one_two_and_three_objectives_can_be_drawn(
    objectives: tuple[Objective, ...], panels: int, tmp_path: Path
) -> None:
    study = with_objectives(*objectives)
    chart = front_chart(study)
    assert len(chart.panels) == panels
    assert len(interactive.figure(chart).data) == sum(len(p.series) for p in chart.panels)
    assert report_page(study, []).count("<tr") > 3


def test_values_that_span_decades_get_a_logarithmic_axis() -> None:
    history = sample_history(3, running=False)
    last = history.trials[2]
    assert last.score is not None
    score = replace(last.score, values={**last.score.values, "ttft_p95_s": 100.0})
    study = view(replace(history, trials=(*history.trials[:2], replace(last, score=score))), OBJECTIVES)
    assert front_chart(study).panels[0].x.log
    assert still.png(front_chart(study)).startswith(b"\x89PNG")


def test_importance_finds_what_the_response_was_made_of() -> None:
    found = {item.target: item for item in importances(view(sample_history(120), OBJECTIVES))}
    ttft, tpot = found["TTFT p95"], found["TPOT p95"]
    assert ttft.explained > 0.7
    assert max(tpot.shares, key=lambda name: tpot.shares[name]) in ("max_num_batched_tokens", "max_num_seqs")
    assert ttft.shares["gpu_memory_utilization"] < 0.1 * max(ttft.shares.values())


def test_importance_keeps_silent_on_too_few_trials() -> None:
    assert importances(view(sample_history(6), OBJECTIVES)) == []
    assert importance_chart(view(sample_history(6), OBJECTIVES)).panels == ()


def test_importance_takes_categories_and_parameters_that_some_trials_lack() -> None:
    history = sample_history(60)
    trials = tuple(
        replace(
            t, params={**t.params, "kv_cache_dtype": "fp8" if t.number % 2 else "auto"} if t.number % 3 else t.params
        )
        for t in history.trials
    )
    study = view(replace(history, trials=trials), OBJECTIVES)
    assert "kv_cache_dtype" in importances(study)[0].shares
    titles = parameters_chart(study).panels[0].x.ticks.values()
    assert any("kv_cache_dtype<br>auto … fp8" in title for title in titles)


def test_hypervolume_is_drawn_over_trials_and_over_hours() -> None:
    by_trial, by_hour = hypervolume_chart(STUDY).panels
    assert by_trial.series[0].y == by_hour.series[0].y
    assert by_hour.series[0].x[-1] == pytest.approx(29 * 300 / 3600, abs=0.1)


def test_prompt_lengths_need_metrics_by_prompt_length() -> None:
    chart = prompt_length_chart(STUDY)
    assert chart is not None
    assert chart.panels[0].series[0].x == (512.0, 1024.0, 2048.0, 3072.0)
    bare = tuple(
        replace(t, score=replace(t.score, values={n: v for n, v in t.score.values.items() if "@" not in n}))
        if t.score
        else t
        for t in sample_history().trials
    )
    assert prompt_length_chart(view(replace(sample_history(), trials=bare), OBJECTIVES)) is None


class Links(HTMLParser):
    """Collects what a page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [v for n, v in attrs if n in ("src", "href") and v and not v.startswith(("data:", "#"))]


def test_the_report_loads_nothing_from_elsewhere(written: Path) -> None:
    links = Links()
    links.feed(written.read_text(encoding="utf-8"))
    assert links.found == []


def test_the_report_carries_plotly_once_and_reads_from_verdict_to_method(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    assert text.count("plotly.js v") == 1
    places = [text.index(f"<h2>{title}</h2>") for title in ("The front", "What matters", "Failures by kind", "Method")]
    assert text.index("<h1>") < places[0]
    assert places == sorted(places)
    assert '<meta name="viewport"' in text
    assert "@media print" in text


def test_every_figure_has_a_page_and_a_still(written: Path, charts: list[Chart]) -> None:
    files = {path.name for path in (written.parent / "figures").iterdir()}
    assert files == {f"{chart.name}.{ending}" for chart in charts for ending in ("html", "png")}
    page = (written.parent / "figures" / "front.html").read_text(encoding="utf-8")
    assert "cdn" not in page.split("<body>")[0]
    assert "plotly.js v" in page


def test_text_from_outside_is_escaped_and_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "s3cr3t-value")
    failure = STUDY.trial(6).failure
    assert failure is not None
    trials = tuple(
        replace(t, failure=replace(failure, message="<script>alert(1)</script> s3cr3t-value")) if t.number == 6 else t
        for t in STUDY.trials
    )
    page = report_page(replace(STUDY, trials=trials), [])
    assert "<script>alert(1)" not in page
    assert "s3cr3t-value" not in page


def test_a_click_on_a_point_shows_where_the_trial_is() -> None:
    page = interactive.page(front_chart(STUDY), {13: "run abc"})
    assert "plotly_click" in page
    assert '"13": "run abc"' in page
