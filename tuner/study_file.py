"""Reading a study file: YAML in, a checked `StudySpec` out, and one sentence for each thing that is wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from objectives import metrics
from objectives.constraints import Constraint
from objectives.early_end import can_bound
from objectives.throughput import SLO_KEYS
from tuner.errors import StudyFileError
from tuner.probe import PROBE_PROMPT_TOKENS, is_felt, is_felt_in
from tuner.recipes import RECIPES
from tuner.space import argument_problem, engine_argument_names
from tuner.spec import StudySpec, is_local_model, resolve_model
from tuner.study_sentences import Problem, nearest, sentences, shown

MAX_FILE_BYTES = 1_000_000
MAX_DEPTH = 30
"""More nesting than any study needs, less than would exhaust the parser's stack."""
_OWN_METRIC = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""Module and function, as Python spells them: what is imported never leaves the study file's folder."""


@dataclass(frozen=True, slots=True)
class StudyFile:
    """A study file that was read and found right."""

    path: Path
    spec: StudySpec

    @property
    def folder(self) -> Path:
        """Where relative paths of the file start."""
        return self.path.parent

    @property
    def model(self) -> str:
        """What vLLM is given as `model`."""
        return resolve_model(self.spec, self.folder)


def read(path: Path) -> StudyFile:
    """Read and check a study file: everything that can be known without loading the model or an engine.

    Raises
    ------
    StudyFileError
        With a sentence a problem.
    """
    spec = parse(_load_yaml(path), path)
    file = StudyFile(path.resolve(), spec)
    if problems := [*_argument_problems(spec), *_name_problems(spec), *_model_problems(file), *_value_problems(spec)]:
        raise StudyFileError(str(path), problems)
    return file


def parse(document: Any, path: Path) -> StudySpec:
    """Validate a parsed document against the shape of a study file.

    Raises
    ------
    StudyFileError
        With a sentence a problem.
    """
    if not isinstance(document, dict):
        raise StudyFileError(str(path), [("", "is no mapping of keys; `tuner init` writes a study file to start from")])
    try:
        return StudySpec.model_validate(document)
    except ValidationError as error:
        raise StudyFileError(str(path), sentences(error.errors())) from error


def _load_yaml(path: Path) -> Any:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise StudyFileError(str(path), [("", f"cannot be read ({error.strerror}); correct the path")]) from error
    if len(raw) > MAX_FILE_BYTES:
        raise StudyFileError(str(path), [("", f"is larger than {MAX_FILE_BYTES:,} bytes; that is no study file")])
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise StudyFileError(str(path), [("", "is not UTF-8 text; save it as UTF-8")]) from error
    try:
        _check_depth(text)
        return yaml.load(text, Loader=_StrictLoader)  # a SafeLoader that refuses doubled keys
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise StudyFileError(str(path), [("", _yaml_sentence(error, text))]) from error


def _yaml_sentence(error: Exception, text: str) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"is not valid YAML at line {line}: the character #x{error.character:04x} may not stand in a text file"
    mark = getattr(error, "problem_mark", None)
    where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    hint = "; indent with spaces" if r"'\t'" in problem else ""
    return f"is not valid YAML{where}: {problem}{hint}"


def _check_depth(text: str) -> None:
    """Refuse aliases and deep nesting before anything is built from them."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("aliases (*name) are not used in study files; write the value out")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} levels of nesting")


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a key that stands twice is an error rather than the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool):
                raise yaml.MarkedYAMLError(problem="a key must be a word or a number", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key} stands twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _argument_problems(spec: StudySpec) -> Iterator[Problem]:
    known = engine_argument_names()
    variables = [f"env.{name}" for name in spec.engine.env]
    named = [(f"engine.args.{n}", n) for n in spec.engine.args] + [(f"space.{n}", n) for n in spec.space]
    for key, name in [*named, *((f"engine.{v}", v) for v in variables)]:
        if text := argument_problem(name, known):
            yield key, text
    for name in sorted(spec.space.keys() & {*spec.engine.args, *variables}):
        yield f"space.{name}", "is also fixed under engine; keep one of the two"


def _name_problems(spec: StudySpec) -> Iterator[Problem]:
    for index, recipe in enumerate(spec.recipes):
        if recipe not in RECIPES:
            near = nearest(recipe, RECIPES)
            hint = f"did you mean {near}?" if near else f"the recipes are {', '.join(RECIPES)}"
            yield f"recipes.{index}", f"'{recipe}' is no recipe; {hint}"
    for key in spec.slo:
        if key not in SLO_KEYS:
            near = nearest(key, SLO_KEYS)
            hint = f"did you mean {near}?" if near else f"they are {', '.join(SLO_KEYS)}"
            yield f"slo.{key}", f"is no latency of one request; {hint}"
    for key, name in _metric_names(spec):
        if text := _metric_problem(name, spec):
            yield key, text
    for index, objective in enumerate(spec.objectives):
        if ":" in objective.metric and objective.direction is None:
            yield f"objectives.{index}.direction", "is needed for a metric of your own: minimize or maximize"
    if spec.search.end_dominated:
        unbounded = [o.metric for o in spec.objectives if not can_bound(o.metric) or o.direction == "maximize"]
        if unbounded or spec.measure.drift == "correct":
            said = f"{unbounded[0]} is none" if unbounded else "measure.drift: correct divides them by the speed"
            yield "search.end_dominated", f"takes percentiles or maxima of TTFT, TPOT or E2EL as objectives; {said}"
    if spec.measure.drift == "correct":
        yield from _correction_problems(spec)
    if len({o.metric for o in spec.objectives}) < len(spec.objectives):
        yield "objectives", "name the same metric twice; keep one of the two"


def _correction_problems(spec: StudySpec) -> Iterator[Problem]:
    searched = [(f"space.{name}", name) for name, parameter in spec.space.items() if is_felt_in(name, parameter)]
    fixed = spec.engine.args
    recipes = [(f"recipes.{i}", RECIPES[r].args) for i, r in enumerate(spec.recipes) if r in RECIPES]
    in_recipes = [(key, n) for key, args in recipes for n, v in args.items() if n not in fixed and is_felt(n, [v])]
    for key, name in [*searched, *in_recipes]:
        yield (
            key,
            f"{name} changes the speed probe itself ({PROBE_PROMPT_TOKENS} tokens alone), which measure.drift: correct "
            "would take for a change of the machine; use drift: record, or fix it under engine.args",
        )


def _metric_names(spec: StudySpec) -> list[tuple[str, str]]:
    """Every metric that the study names, with the key that names it."""
    return [
        *((f"objectives.{i}", o.metric) for i, o in enumerate(spec.objectives)),
        *((f"constraints.{i}", Constraint.parse(c).metric) for i, c in enumerate(spec.constraints)),
    ]


def _metric_problem(name: str, spec: StudySpec) -> str | None:
    """Say why trials of this study would not have a metric, or return `None` when they will."""
    if ":" in name:
        if _OWN_METRIC.fullmatch(name):
            return None
        return f"'{name}' is no metric of your own; write it as module:function, with module.py beside this file"
    try:
        metrics.lookup(name)
    except metrics.UnknownMetricError as error:
        return str(error) if error.suggestion else f"{error}; `tuner check` lists them"
    if name == "goodput_requests_per_s" and not spec.slo:
        return "is counted against limits of one request; give them under slo"
    if name.endswith(metrics.CORRECTED) and spec.measure.drift != "correct":
        return f"{name} takes measure.drift: correct; set it, or drop {metrics.CORRECTED}"
    return None


def _model_problems(file: StudyFile) -> Iterator[Problem]:
    if not is_local_model(file.spec.model):
        if (file.folder / file.spec.model / "config.json").is_file():
            yield "model", f"is a folder beside this file; write ./{file.spec.model}, or it is sought on the hub"
        return
    try:
        folder = Path(file.model)
        is_folder, has_config = folder.is_dir(), (folder / "config.json").is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such home, a loop of links, a null character
        yield "model", f"cannot be a path ({error}); correct it, or give a Hugging Face name like org/name"
        return
    if not is_folder:
        yield "model", f"there is no folder {folder}; correct the path, or give a Hugging Face name like org/name"
    elif not has_config:
        yield "model", f"the folder {folder} holds no config.json, so it is no model that vLLM can load; correct it"


def _value_problems(spec: StudySpec) -> Iterator[Problem]:
    """Find values that JSON cannot hold (dates, NaN, halves of characters, keys of several types).

    They would not survive the ledger, and a configuration that holds one has no key.
    """
    for key, value in (
        *((f"engine.args.{n}", v) for n, v in spec.engine.args.items()),
        *((f"space.{n}", p.choices) for n, p in spec.space.items() if p.choices is not None),
    ):
        try:
            json.dumps(value, allow_nan=False, ensure_ascii=False, sort_keys=True).encode()
        except (TypeError, ValueError):
            allowed = "finite numbers, text (a date in quotes), true/false, null, lists, and mappings of words"
            yield key, f"holds {shown(value)}; use {allowed} only"
