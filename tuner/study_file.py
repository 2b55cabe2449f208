"""Reading a study file: YAML in, a checked `StudySpec` out, and one sentence for each thing that is wrong with it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from objectives import metrics
from objectives.constraints import Constraint
from tuner.errors import StudyFileError
from tuner.recipes import RECIPES
from tuner.space import argument_problem, engine_argument_names
from tuner.spec import StudySpec, is_local_model, resolve_model

MAX_FILE_BYTES = 1_000_000
MAX_DEPTH = 30
"""More nesting than any study needs, less than would exhaust the parser's stack."""


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
        raise StudyFileError(str(path), [("", "is no mapping of keys; `tuner init` writes one to start from")])
    try:
        return StudySpec.model_validate(document)
    except ValidationError as error:
        raise StudyFileError(str(path), [_sentence(e, document) for e in error.errors()]) from error


def _load_yaml(path: Path) -> Any:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise StudyFileError(str(path), [("", f"cannot be read ({error.strerror})")]) from error
    if len(raw) > MAX_FILE_BYTES:
        raise StudyFileError(str(path), [("", f"is larger than {MAX_FILE_BYTES:,} bytes; that is no study file")])
    try:
        text = raw.decode()
        _check_depth(text)
        document = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader that refuses doubled keys
    except UnicodeDecodeError as error:
        raise StudyFileError(str(path), [("", "is not UTF-8 text")]) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise StudyFileError(str(path), [("", _yaml_sentence(error))]) from error
    return document


def _yaml_sentence(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return f"is not valid YAML{where}: {getattr(error, 'problem', None) or ' '.join(str(error).split())}"


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


def _sentence(error: Mapping[str, Any], document: Mapping[str, Any]) -> tuple[str, str]:
    """(dotted key, sentence) for one of pydantic's errors."""
    location = [str(part) for part in error["loc"] if not _is_branch(part, document)]
    key = ".".join(location)
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        known = _known_keys(error["loc"][:-1])
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        return key, "is no key of a study file" + (
            f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}" if known else ""
        )
    if kind == "missing":
        return key, "is missing"
    if kind == "value_error":
        return key, str(context["error"])
    if kind == "union_tag_not_found":
        return key, f"needs a kind: {context.get('discriminator', 'kind')} is one of {_tags(error['loc'])}".rstrip()
    if kind == "union_tag_invalid":
        near = difflib.get_close_matches(str(context["tag"]), re_tags(context["expected_tags"]), n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{key}.kind", f"'{context['tag']}' is none of {context['expected_tags']}{hint}"
    given = f" (it is {json.dumps(error['input'], default=str)[:60]})"
    return key, str(error["msg"])[0].lower() + str(error["msg"])[1:] + given


def re_tags(expected: str) -> list[str]:
    """Split pydantic's list of tags into words."""
    return [tag.strip(" '") for tag in expected.split(",")]


def _tags(_: tuple[Any, ...]) -> str:
    return "those in docs/study-file.md"


_BRANCHES = {
    "long_documents", "shared_prefix", "sharegpt", "jsonl", "trace", "poisson", "gamma", "constant", "ramp",
    "closed_loop", "fixed", "list", "shares", "uniform", "lognormal", "choices",
}  # fmt: skip


def _is_branch(part: Any, document: Mapping[str, Any]) -> bool:
    """Whether a part of pydantic's location is the name of a union's branch rather than a key of the file."""
    return isinstance(part, str) and part in _BRANCHES and part not in str(document.get("space", "")).split("'")


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    """Keys of the section at a location, followed through the models' fields."""
    model: Any = StudySpec
    for part in location:
        if isinstance(model, type) and issubclass(model, BaseModel) and part in model.model_fields:
            model = model.model_fields[part].annotation
        else:
            model = _branch(model, str(part)) or model
    if isinstance(model, type) and issubclass(model, BaseModel):
        return list(model.model_fields)
    return []


def _branch(union: Any, tag: str) -> type[BaseModel] | None:
    """Find the member of a union whose `kind` is `tag`, or the model that a mapping or tuple holds."""
    for member in getattr(union, "__args__", ()):
        if isinstance(member, type) and issubclass(member, BaseModel):
            kind = member.model_fields.get("kind")
            if kind is None or tag in getattr(kind.annotation, "__args__", ()):
                return member
    return None


def _argument_problems(spec: StudySpec) -> list[tuple[str, str]]:
    known = engine_argument_names()
    named = [(f"engine.args.{n}", n) for n in spec.engine.args] + [(f"space.{n}", n) for n in spec.space]
    problems = [(key, text) for key, name in named if (text := argument_problem(name, known))]
    both = spec.space.keys() & {*spec.engine.args, *(f"env.{n}" for n in spec.engine.env)}
    return problems + [(f"space.{n}", "is also fixed under engine; keep one of the two") for n in sorted(both)]


def _name_problems(spec: StudySpec) -> list[tuple[str, str]]:
    problems = []
    for index, recipe in enumerate(spec.recipes):
        if recipe not in RECIPES:
            near = difflib.get_close_matches(recipe, RECIPES, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(RECIPES)}"
            problems.append((f"recipes.{index}", f"'{recipe}' is no recipe; {hint}"))
    names = [(f"objectives.{i}", o.metric) for i, o in enumerate(spec.objectives)]
    names += [(f"constraints.{i}", Constraint.parse(c).metric) for i, c in enumerate(spec.constraints)]
    for key, name in names:
        if ":" not in name:
            try:
                metrics.lookup(name)
            except metrics.UnknownMetricError as error:
                problems.append((key, str(error)))
    for index, objective in enumerate(spec.objectives):
        if ":" in objective.metric and objective.direction is None:
            problems.append(
                (f"objectives.{index}.direction", "is needed for a metric of your own: minimize or maximize")
            )
    if len({o.metric for o in spec.objectives}) < len(spec.objectives):
        problems.append(("objectives", "name the same metric twice"))
    return problems


def _model_problems(file: StudyFile) -> list[tuple[str, str]]:
    if not is_local_model(file.spec.model):
        return []
    folder = Path(file.model)
    if not folder.is_dir():
        return [("model", f"there is no folder {folder}; correct the path, or give a Hugging Face name like org/name")]
    if not (folder / "config.json").is_file():
        return [("model", f"the folder {folder} holds no config.json, so it is no model that vLLM can load")]
    return []


def _value_problems(spec: StudySpec) -> list[tuple[str, str]]:
    """Values that JSON cannot hold (dates, sets, NaN) would not survive the ledger."""
    problems = []
    adapter = TypeAdapter(Any)
    for key, value in (
        *((f"engine.args.{n}", v) for n, v in spec.engine.args.items()),
        *((f"space.{n}", p.choices) for n, p in spec.space.items() if p.choices is not None),
    ):
        try:
            json.dumps(adapter.dump_python(value), allow_nan=False)
        except (TypeError, ValueError):
            problems.append((key, "holds a value that is neither number, text, true/false, null, list nor mapping"))
    return problems
