"""What pydantic finds wrong with a study file, in sentences for operators: the key, what is wrong, what to do.

Knows pydantic's errors and the models of the study file; nothing of YAML or of what the values mean.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, Tag

from tuner.spec import StudySpec

Problem = tuple[str, str]
"""(dotted key, sentence)."""

_INPUT_SHOWN = 60
"""Characters of a wrong value that are worth showing."""


def sentences(errors: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """Turn pydantic's errors into one sentence a problem.

    Parameters
    ----------
    errors:
        What `ValidationError.errors()` returns for a `StudySpec`.
    """
    places = [error["loc"] for error in errors]
    # Pydantic also finds a list too short whose only entry it could not read.
    told = [e for e in errors if e["type"] != "too_short" or not any(_is_below(place, e["loc"]) for place in places)]
    meant = {_meant(error["loc"]) for error in errors if error["type"] == "extra_forbidden"}
    return [_sentence(e) for e in told if e["type"] != "missing" or e["loc"] not in meant]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Name among `known` that was probably meant, if any is near."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)


def shown(value: Any) -> str:
    """Write a value as a study file would, cut to a readable length."""
    try:
        text = json.dumps(value, default=str, skipkeys=True)
    except ValueError:  # a number of more digits than Python prints
        return "too long to show"
    return text if len(text) <= _INPUT_SHOWN else text[:_INPUT_SHOWN] + " …"


def _meant(location: tuple[Any, ...]) -> tuple[Any, ...]:
    """Location of the key that an unknown one was probably meant to be: that it is missing need not be said."""
    _, model, _ = _place(location)
    return *location[:-1], nearest(str(location[-1]), model.model_fields)


def _is_below(place: tuple[Any, ...], above: tuple[Any, ...]) -> bool:
    return len(place) > len(above) and place[: len(above)] == above


def _sentence(error: Mapping[str, Any]) -> Problem:
    keys, model, forms = _place(error["loc"])
    others = [form for form in forms if form != error["loc"][-1]]
    context: Mapping[str, Any] = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            text = _unknown_key(keys[-1], model)
        case "missing":
            text = f"is missing; add it ({(model.model_fields[keys[-1]].description or '').rstrip('.')})"
        case "value_error":
            text = str(context["error"])
        case "union_tag_not_found":
            keys, text = [*keys, "kind"], f"is missing; give one of {', '.join(forms)}"
        case "union_tag_invalid":
            keys, text = [*keys, "kind"], f"{shown(context['tag'])} is none of {', '.join(forms)}"
            near = nearest(str(context["tag"]), forms)
            text += f"; did you mean {near}?" if near else ""
        case kind:
            text = f"{_must(kind, context, error)} (it is {shown(error['input'])})"
            text += f", or a mapping with {_either(others)}" if others and isinstance(error["input"], dict) else ""
    return ".".join(keys), text


def _either(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words)


def _unknown_key(name: str, model: type[BaseModel]) -> str:
    near = nearest(name, model.model_fields)
    return "is no key here; " + (f"did you mean {near}?" if near else f"the keys are {', '.join(model.model_fields)}")


_MUST: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "int_type": lambda _: "must be a whole number",
    "int_parsing": lambda _: "must be a whole number",
    "int_parsing_size": lambda _: "must be a smaller whole number",
    "int_from_float": lambda _: "must be a whole number",
    "float_type": lambda _: "must be a number",
    "float_parsing": lambda _: "must be a number",
    "finite_number": lambda _: "must be a finite number",
    "bool_type": lambda _: "must be true or false",
    "bool_parsing": lambda _: "must be true or false",
    "string_type": lambda _: "must be text",
    "string_unicode": lambda _: "must be text of whole characters",
    "path_type": lambda _: "must be a path",
    "dict_type": lambda _: "must be a mapping of keys to values",
    "model_type": lambda _: "must be a mapping of keys",
    "model_attributes_type": lambda _: "must be a mapping of keys",
    "tuple_type": lambda _: "must be a list",
    "invalid_key": lambda _: "is no word; quote it if it is meant as a key",
    "too_short": lambda _: "must not be empty",
    "string_too_short": lambda _: "must not be empty",
    "string_pattern_mismatch": lambda _: "must be letters, digits, dots, dashes and underscores",
    "greater_than": lambda c: f"must be above {c['gt']:g}",
    "greater_than_equal": lambda c: f"must be at least {c['ge']:g}",
    "less_than": lambda c: f"must be below {c['lt']:g}",
    "less_than_equal": lambda c: f"must be at most {c['le']:,}",
    "literal_error": lambda c: f"must be {c['expected']}",
}
"""Pydantic's kinds of errors that a study file can meet, as what the value must be."""


def _must(kind: str, context: Mapping[str, Any], error: Mapping[str, Any]) -> str:
    if kind in _MUST:
        return _MUST[kind](context)
    message = str(error["msg"])
    return message[:1].lower() + message[1:]


def _place(location: Sequence[Any]) -> tuple[list[str], Any, tuple[str, ...]]:
    """Follow one of pydantic's locations through the models of the study file.

    Returns
    -------
    tuple
        The keys, without the names of the branches of unions that pydantic puts between them; the section that holds
        the last key; and the names of the branches where the location ends at a union.
    """
    keys: list[str] = []
    inside: Any = StudySpec
    holder: Any = StudySpec
    forms: tuple[str, ...] = ()
    for part in location:
        branches = _branches(inside)
        forms = tuple(branches)
        if branches:
            inside = branches[part]
            continue
        if part == "[key]":
            continue
        holder = inside
        inside = _inside(inside, part)
        keys.append(str(part))
        forms = tuple(_branches(inside))
    return keys, holder, forms


def _inside(annotation: Any, part: Any) -> Any:
    """Type of what lies under a key of a section, or of the entries of a list or mapping."""
    if _is_section(annotation):
        field = annotation.model_fields.get(part)
        return _plain(field.annotation) if field is not None else None
    entries = [a for a in get_args(annotation) if a is not Ellipsis]
    return _plain(entries[-1]) if entries else None


def _plain(annotation: Any) -> Any:
    """Take the metadata and the `None` off a type that is no discriminated union."""
    if _branches(annotation):
        return annotation
    if hasattr(annotation, "__metadata__"):
        return _plain(annotation.__origin__)
    others = [a for a in get_args(annotation) if a is not NoneType]
    return _plain(others[0]) if len(others) == 1 and NoneType in get_args(annotation) else annotation


def _branches(annotation: Any) -> dict[str, Any]:
    """Branches of a discriminated union by the names that pydantic has for them; empty for anything else."""
    found: dict[str, Any] = {}
    if _is_section(annotation):
        return found
    for member in get_args(annotation):
        tags = [m.tag for m in getattr(member, "__metadata__", ()) if isinstance(m, Tag)]
        if tags:
            found[tags[0]] = _plain(member.__origin__)
        elif _is_section(member) and "kind" in member.model_fields:
            found |= dict.fromkeys(get_args(member.model_fields["kind"].annotation), member)
        elif hasattr(member, "__metadata__") or NoneType in get_args(annotation):
            found |= _branches(member)
    return found


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
