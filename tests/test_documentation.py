"""What a user can type, write or read stands in the documentation, and what the documentation shows works."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel
from study_samples import sample_history

from objectives.metrics import METRICS
from objectives.summary import STATISTICS
from tuner.cli import parser
from tuner.export import FORMATS
from tuner.ledger import TrialState
from tuner.picks import FORMS
from tuner.recipes import RECIPES
from tuner.space import Parameter, argument_problem, engine_argument_names
from tuner.spec import StudySpec
from tuner.study_file import parse
from tuner.tracking.content import trial_content
from tuner.tracking.summary import summary_points, summary_tags
from tuner.view import Objective, view
from tuner.workload import spec as workload

ROOT = Path(__file__).parents[1]
README, STUDY_FILE, MLFLOW = ROOT / "README.md", ROOT / "docs" / "study-file.md", ROOT / "docs" / "mlflow.md"
HOUSE = ROOT / "docs" / "house.md"
PAGES = [ROOT / "CHANGELOG.md", README, *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*/README.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# Commands -----------------------------------------------------------------------------------------------------------


def commands() -> dict[str, argparse.ArgumentParser]:
    actions = parser()._actions
    (subparsers,) = [a for a in actions if isinstance(a, argparse._SubParsersAction)]
    return dict(subparsers.choices)


def row_of(command: str) -> str:
    """Rows of README's table that are about this command."""
    rows = [line for line in text_of(README).splitlines() if re.match(rf"\| `tuner {command}[ `]", line)]
    return "\n".join(rows)


@pytest.mark.parametrize("command", commands())
def test_every_command_and_option_stands_in_the_table_of_the_readme(command: str) -> None:
    row = row_of(command)
    options = [a.option_strings for a in commands()[command]._actions if a.option_strings and a.dest != "help"]

    assert row.count("\n") == 0
    assert row
    assert [
        names for names in options if not any(re.search(rf"(?<![\w-]){name}(?![\w-])", row) for name in names)
    ] == []


def test_the_readme_shows_no_command_or_option_that_does_not_exist() -> None:
    shown = re.findall(r"\btuner ([a-z]+)\b((?: [^\n`|#]*)?)", "\n".join(code(README)))
    known = {name: {o for a in p._actions for o in a.option_strings} for name, p in commands().items()}

    assert {name for name, _ in shown} == known.keys()
    for name, rest in shown:
        assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", rest)) <= known[name], name


def code(page: Path) -> list[str]:
    """Everything on a page that is set as code."""
    text = text_of(page)
    return [*re.findall(r"```\w*\n(.*?)```", text, re.DOTALL), *re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)]


def test_options_of_the_program_itself_stand_in_the_readme() -> None:
    options = [name for a in parser()._actions for name in a.option_strings if a.dest != "help"]

    assert [name for name in options if name not in text_of(README)] == []


def test_every_form_of_a_pick_stands_in_the_readme() -> None:
    kinds = [form.partition(":")[0] for form in FORMS]

    assert [kind for kind in kinds if f"`{kind}" not in text_of(README)] == []


def test_every_export_format_stands_in_the_readme() -> None:
    named = re.findall(r"[\w-]+", row_of("export"))

    assert set(FORMATS) <= set(named)


# The study file -----------------------------------------------------------------------------------------------------


def generator() -> ModuleType:
    path = ROOT / "scripts" / "document_study_file.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_the_study_file_is_as_the_code_would_write_it(capsys: pytest.CaptureFixture[str]) -> None:
    status = generator().main(["--check"])

    assert (status, capsys.readouterr().out) == (0, "")


def test_a_stale_page_is_told_and_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, page = generator(), tmp_path / "study-file.md"
    monkeypatch.setattr(module, "PAGE", page)
    page.write_text("of yesterday")

    assert module.main(["--check"]) == 1
    assert "make docs" in capsys.readouterr().out
    assert module.main([]) == 0
    assert module.main(["--check"]) == 0


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every model that a type mentions, however deep in unions, lists and mappings."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def keys_of(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted key, its last word, description) of everything that a study file may hold."""
    for name, field in model.model_fields.items():
        yield f"{path}{name}", name, field.description or ""
        for inner in models_in(field.annotation):
            yield from keys_of(inner, f"{path}{name}.")


def test_every_key_of_the_study_file_is_documented_with_its_description() -> None:
    page = text_of(STUDY_FILE)
    forms = {"uniform", "lognormal", "choices"}  # shown as forms of a length

    keys = [(key, name, words) for key, name, words in keys_of(StudySpec) if name != "kind"]
    missing = {
        key
        for key, name, words in keys
        if not re.search(rf"`(?:[\w.\[\]]+\.)?{name}`", page) or words.replace("|", "\\|") not in page
        if not (name in forms and f"{{{name}: " in page)
    }

    assert len(keys) > 80
    assert missing == set()
    assert [key for key, _, words in keys if not words] == []


@pytest.mark.parametrize("union", [workload.WorkloadSpec, workload.ArrivalsSpec], ids=["workload", "arrivals"])
def test_every_kind_has_a_section(union: Any) -> None:
    kinds = [
        k for m in models_in(union) if "kind" in m.model_fields for k in get_args(m.model_fields["kind"].annotation)
    ]

    assert kinds
    assert [kind for kind in kinds if f": {kind}\n" not in text_of(STUDY_FILE)] == []


def test_every_recipe_and_metric_is_documented() -> None:
    page = text_of(STUDY_FILE)
    families = {re.sub(rf"_({'|'.join(STATISTICS)})_s$", "_*_s", name) for name in METRICS}

    assert [name for name in RECIPES if f"| `{name}` |" not in page] == []
    assert [name for name in families if f"| `{name}` |" not in page] == []


# Examples -----------------------------------------------------------------------------------------------------------


def yaml_blocks(page: Path) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", text_of(page), re.DOTALL)


BLOCKS = [(page, index, block) for page in (README, STUDY_FILE) for index, block in enumerate(yaml_blocks(page))]


@pytest.mark.parametrize(
    ("name", "text"),
    [*((f"{p.stem}-{i}", block) for p, i, block in BLOCKS), *((p.stem, p.read_text()) for p in EXAMPLES)],
)
def test_every_example_is_a_study_file_with_arguments_that_vllm_has(name: str, text: str) -> None:
    spec = parse(yaml.safe_load(text), Path(name))

    names = [*spec.engine.args, *spec.space]
    assert {n: problem for n in names if (problem := argument_problem(n, engine_argument_names()))} == {}
    assert set(spec.recipes) <= RECIPES.keys()


def test_both_pages_show_a_study_and_the_full_one_has_every_part() -> None:
    assert {page for page, _, _ in BLOCKS} == {README, STUDY_FILE}
    full = yaml.safe_load(yaml_blocks(STUDY_FILE)[0])
    assert full.keys() == StudySpec.model_fields.keys()


def test_forms_of_a_parameter_are_what_they_are_said_to_be() -> None:
    section = text_of(STUDY_FILE).partition("\n## space\n")[2].partition("\n## ")[0]
    first_cells = re.findall(r"^\| (`[\[{].*?) \|", section, re.MULTILINE)
    forms = [form for cell in first_cells for form in re.findall(r"`([^`]+)`", cell)]

    assert len(forms) >= 8
    for form in forms:
        assert Parameter.model_validate(yaml.safe_load(form)).cardinality > 1, form


# MLflow -------------------------------------------------------------------------------------------------------------


def test_tags_metrics_and_params_that_the_pages_filter_by_exist() -> None:
    study = view(sample_history(30), (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s")))
    contents = [trial_content(study, trial) for trial in study.trials]
    written = {f"tags.{n}" for c in contents for n in c.tags} | {f"tags.{n}" for n in summary_tags(study)}
    written |= {f"params.{n}" for c in contents for n in c.params}
    written |= {f"metrics.{p.key}" for c in contents for p in c.metrics}
    used = {
        name for page in (README, MLFLOW) for name in re.findall(r"\b(?:tags|params|metrics)\.[\w.]*\w", text_of(page))
    }

    assert len(used) > 10
    assert used - written == set()


def test_every_tag_of_a_trial_and_every_state_is_explained() -> None:
    study = view(sample_history(30), (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s")))
    tags = {name for trial in study.trials for name in trial_content(study, trial).tags} - {"mlflow.note.content"}

    assert [name for name in tags if f"`{name}`" not in text_of(MLFLOW)] == []
    assert [state for state in TrialState if f"`{state.value}`" not in text_of(MLFLOW)] == []


def test_metrics_of_the_summary_are_explained() -> None:
    study = view(sample_history(30, running=False), (Objective("ttft_p95_s", "s"), Objective("tpot_p95_s", "s")))
    names = {re.sub(r"^noise\..*", "noise.NAME", p.key) for p in summary_points(study, -1)} - {"trials.running"}

    assert [name for name in names if f"`{name}`" not in text_of(MLFLOW)] == []


# The house ----------------------------------------------------------------------------------------------------------


def test_every_module_has_its_place_on_the_map() -> None:
    modules = [p.name for folder in ("objectives", "tuner") for p in (ROOT / folder).rglob("*.py")]

    assert [name for name in modules if name != "__init__.py" and not re.search(rf"\b{name}\b", text_of(HOUSE))] == []


def test_the_map_and_the_pages_name_no_file_that_is_gone() -> None:
    there = {p.name for folder in ("objectives", "tuner", "scripts", "tests", "benchmarks") for p in rglob(folder)}
    named = {name for page in PAGES for name in re.findall(r"\b\w+\.(?:py|css)\b", text_of(page))}

    assert named - there - {"module.py"} == set()


def rglob(folder: str) -> Iterator[Path]:
    return (path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".css"))


def test_make_targets_are_documented_and_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {name for page in (README, HOUSE) for name in re.findall(r"\bmake ([a-z-]+)`", text_of(page))}

    assert named <= targets
    assert targets - named <= {"install", "clean"}


# Links --------------------------------------------------------------------------------------------------------------


def links(page: Path) -> list[str]:
    without_code = re.sub(r"```.*?```|`[^`\n]*`", "", text_of(page), flags=re.DOTALL)
    return re.findall(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)", without_code)


def anchors(page: Path) -> set[str]:
    """How GitHub names the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)

    assert broken == []
