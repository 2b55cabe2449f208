"""What every model of the study file has in common: unknown keys are errors, values do not change, and what YAML reads
as true or false is no number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """A part of the study file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any) -> Any:
        """Write truth values out where only numbers belong: pydantic takes `trials: yes` for one trial, not a word."""
        if not isinstance(value, dict):
            return value
        numeric = {name for name, field in cls.model_fields.items() if _is_numeric(field.annotation)}
        return {key: _spelt(each) if key in numeric else each for key, each in value.items()}


def _is_numeric(annotation: Any) -> bool:
    kinds = set(_kinds(annotation))
    return bool(kinds & {int, float}) and not kinds & {bool, Any}


def _kinds(annotation: Any) -> Iterator[Any]:
    """Every type that an annotation is made of."""
    arguments = get_args(annotation)
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from _kinds(argument)


def _spelt(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _spelt(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_spelt(each) for each in value]
    return str(value).lower() if isinstance(value, bool) else value
