"""How an engine argument is said to `vllm serve`: on the command line, and in the YAML file of `--config`.

Names are vLLM's own with dashes. What is said is what `EngineArgs` was given in process: a mapping as JSON, a list as
several words, a boolean as the option or its `--no-` form. Arguments on the command line are joined to their value
with `=`: as two words a value that starts with a dash would be taken for an option.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tuner.errors import PickError

SWITCHES = frozenset({"aggregate_engine_logging", "data_parallel_multi_port_external_lb", "disable_log_stats"})
"""Booleans that vLLM's command line can only switch on (vLLM 0.32; a test compares them with its parser)."""


def option(name: str) -> str:
    """Option of an argument: `max_num_seqs` is `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def command_line(args: Mapping[str, Any]) -> list[str]:
    """Words for the command line, one argument after the other in the order of `args`.

    Raises
    ------
    PickError
        For a value that the command line cannot say.
    """
    words: list[str] = []
    for name, value in args.items():
        _require_sayable(name, value)
        if isinstance(value, bool):
            words += _switch(name, value)
        elif isinstance(value, list | tuple):
            words += [option(name), *map(_word, value)]
        else:
            words.append(f"{option(name)}={_word(value)}")
    return words


def config_file(args: Mapping[str, Any]) -> dict[str, Any]:
    """Build the mapping for the YAML file of `vllm serve --config`.

    A false boolean is said as `no-NAME: true`: `NAME: false` is dropped without a word by the `vllm` command, whose
    outer parser reads the file and does not know the options of `serve` (vLLM 0.32). vLLM writes the items of a list
    with `str`, so that mappings in it must already be JSON, and passes each value as a word of its own.

    Raises
    ------
    PickError
        For a value that the file cannot say.
    """
    entries: dict[str, Any] = {}
    for name, value in args.items():
        _require_sayable(name, value)
        if isinstance(value, str | float) and _word(value).startswith("-"):
            raise PickError(
                f"engine argument {name}: `vllm serve --config` would take the value {value!r} for an option; "
                "export another format, or change the value"
            )
        if isinstance(value, bool):
            entries |= {word[2:]: True for word in _switch(name, value)}
        else:
            entries[option(name)[2:]] = [_item(v) for v in value] if isinstance(value, list | tuple) else value
    return entries


def _switch(name: str, value: bool) -> list[str]:
    if value:
        return [option(name)]
    return [] if name in SWITCHES else [f"--no-{option(name)[2:]}"]


def _item(value: Any) -> Any:
    """Item of a list in the file: vLLM applies `str` to it, which is right for text and numbers only."""
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return value if plain else _word(value)


def _word(value: Any) -> str:
    """One word of the command line."""
    if isinstance(value, str):
        return value
    return str(value) if value is None else json.dumps(value)


def _require_sayable(name: str, value: Any) -> None:
    """Refuse what vLLM's command line has no words for."""
    if isinstance(value, list | tuple):
        if not value:
            raise PickError(f"engine argument {name}: `vllm serve` cannot be given an empty list; leave it out")
        dashed = [v for v in value if isinstance(v, str | float) and _word(v).startswith("-")]
        if dashed:
            raise PickError(
                f"engine argument {name}: `vllm serve` would take the item {dashed[0]!r} for an option; change it"
            )
    if isinstance(value, str) and "\0" in value:
        raise PickError(f"engine argument {name}: its value holds a NUL character, which no command line can carry")
