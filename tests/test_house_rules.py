"""Rules of the house that a reader cannot see at a glance: who may import what, who prints, how large a file is."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_LINES = 450
LONGER = {
    "tuner/engine/twin/vllm_scheduler.py": 500,
}
"""Files that were longer when this rule was made: they may shrink, not grow."""

IMPORTERS = {
    "vllm": {
        "tuner/engine/vllm.py",  # runs it
        "tuner/engine/config_check.py",  # asks it, in a process of its own
        "tuner/engine/twin/vllm_scheduler.py",  # borrows its scheduler
        "tuner/export/defaults.py",  # reads its defaults
    },
    "ray": {
        "tuner/engine/cluster.py",  # its nodes and the room on them
        "tuner/engine/ray_engine.py",  # its actors
        "tuner/engine/ray_pool.py",  # its end
        "tuner/jobs.py",  # its jobs
    },
    "mlflow": {"tuner/tracking/store.py"},
    "optuna": {"tuner/proposer.py"},
    "pynvml": {"tuner/engine/nvml.py"},
    "torch": {"tuner/engine/twin/vllm_scheduler.py"},
    "transformers": {"tuner/workload/tokenizer.py"},
    "huggingface_hub": {"tuner/model_files.py"},
    "plotly": {"tuner/report/interactive.py"},
    "matplotlib": {"tuner/report/still.py"},
    "sklearn": {"tuner/report/importance.py"},
    "moocore": {"objectives/pareto.py"},
    "pyarrow": {"tuner/artifacts.py", "tuner/series.py", "tuner/tracking/evidence.py"},
    "aiohttp": {"tuner/engine/http.py", "tuner/engine/serve.py"},
    "prometheus_client": {"tuner/prometheus.py"},
    "pandas": set(),
}
"""Third-party system -> the modules that know it. A new importer is a decision: make it here."""

HEAVY = {"vllm", "ray", "mlflow", "optuna", "torch", "transformers", "huggingface_hub", "plotly", "matplotlib",
         "sklearn", "pandas", "pyarrow"}  # fmt: skip
"""Only imported inside the functions that use them, so that `tuner --help` and `tuner check` answer in a second."""

STARTS_ENGINES = (
    "tuner.engine.ray_engine", "tuner.engine.host", "tuner.engine.serve", "tuner.engine.vllm",
    "tuner.engine.twin.engine",
)  # fmt: skip


@dataclass(frozen=True)
class Import:
    """One name that a module imports: where, and whether when it is loaded itself."""

    module: str
    line: int
    when_loaded: bool
    for_types: bool


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


ALL = sources("objectives", "tuner")
Broken = dict[str, list[str]]
"""Module -> what breaks a rule in it; a rule that holds leaves this empty."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> tuple[Import, ...]:
    return tuple(_imports(tree_of(path), when_loaded=True, for_types=False))


def _imports(node: ast.AST, *, when_loaded: bool, for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, when_loaded, for_types) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"relative import at line {child.lineno}"
            for alias in child.names:
                yield Import(f"{child.module}.{alias.name}", child.lineno, when_loaded, for_types)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _imports(child, when_loaded=False, for_types=True)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, when_loaded=when_loaded and not is_function, for_types=for_types)


def imported(path: Path, *packages: str) -> list[str]:
    """`line: module` of everything that `path` imports from these packages, for whatever purpose."""
    return [
        f"{i.line}: {i.module}"
        for i in imports(path)
        if any(i.module == package or i.module.startswith(f"{package}.") for package in packages)
    ]


def importers(paths: list[Path], *packages: str) -> Broken:
    return {name_of(path): found for path in paths if (found := imported(path, *packages))}


def test_objectives_know_nothing_of_the_tuner() -> None:
    assert importers(sources("objectives"), "tuner") == {}


def test_engines_and_workloads_know_neither_optuna_nor_mlflow_nor_the_loop() -> None:
    paths = sources("tuner/engine", "tuner/workload")

    assert importers(paths, "optuna", "mlflow", "tuner.proposer", "tuner.tracking", "tuner.study") == {}


def test_readers_of_a_study_never_start_an_engine() -> None:
    assert importers(sources("tuner/tracking", "tuner/report", "tuner/export"), *STARTS_ENGINES) == {}


def test_only_who_opens_the_loop_knows_it() -> None:
    assert importers(ALL, "tuner.study").keys() <= {
        "tuner/opening.py",
        "tuner/commands.py",
        "tuner/handover.py",
        "tuner/cli.py",
        "tuner/watching.py",
        "tuner/quiet.py",
    }


@pytest.mark.parametrize("system", IMPORTERS)
def test_each_third_party_system_is_known_to_the_modules_that_are_named_here(system: str) -> None:
    assert importers(ALL, system).keys() == IMPORTERS[system]


def test_heavy_libraries_are_imported_where_they_are_used() -> None:
    early = {
        name_of(path): [f"{i.line}: {i.module}" for i in imports(path) if i.when_loaded and _is_heavy(i.module)]
        for path in ALL
    }

    assert {name: found for name, found in early.items() if found} == {}


def _is_heavy(module: str) -> bool:
    return module.split(".")[0] in HEAVY


@pytest.mark.parametrize("module", ["tuner.cli", "tuner.study_file", "tuner.opening", "tuner.commands"])
def test_loading_the_command_line_loads_nothing_heavy_and_is_quick(module: str) -> None:
    program = (
        f"import time, sys; t = time.process_time(); import {module}; print(time.process_time() - t, *sys.modules)"
    )

    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()

    assert {name for name in answer[1:] if name in HEAVY | {"scipy"}} == set()
    assert float(answer[0]) < 1.5


def test_only_the_command_line_prints() -> None:
    excused = {"tuner/cli.py", "tuner/engine/host.py"}  # what the host prints goes into its engine's log

    assert {name_of(path) for path in ALL if _prints(path)} <= excused


def _prints(path: Path) -> bool:
    calls = [node.func for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    return any(isinstance(called, ast.Name) and called.id == "print" for called in calls)


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in ALL}

    assert {name: n for name, n in lengths.items() if n > LONGER.get(name, MOST_LINES)} == {}


def test_every_module_and_everything_public_has_a_docstring() -> None:
    bare = {name_of(path): list(_undocumented(tree_of(path))) for path in ALL if tree_of(path).body}

    assert {name: found for name, found in bare.items() if found} == {}


def _undocumented(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    if ast.get_docstring(node) is None:
        yield f"{getattr(node, 'lineno', 1)}: {getattr(node, 'name', 'the module')}"
    for child in node.body:
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or child.name.startswith("_"):
            continue
        if isinstance(child, ast.ClassDef):
            yield from _undocumented(child)
        elif ast.get_docstring(child) is None:
            yield f"{child.lineno}: {child.name}"
