"""The spelling of arguments, tried on vLLM's own parser."""

from __future__ import annotations

import argparse
import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

import export_samples
import pytest

from tuner.errors import PickError
from tuner.export.arguments import SWITCHES, command_line, config_file
from tuner.export.defaults import engine_defaults
from tuner.export.text import yaml_text

VALUES: dict[str, Any] = {
    "additional_config": {"nested": {"flag": True, "list": [1, 2.5, None]}, export_samples.HOSTILE: "x"},
    "cudagraph_capture_sizes": [1, 2, 4],
    "disable_log_stats": True,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": False,
    "enforce_eager": False,
    "gpu_memory_utilization": 0.85,
    "hf_overrides": {"rope_scaling": {"factor": 2.0}},
    "kv_cache_dtype": "fp8",
    "limit_mm_per_prompt": {"image": 2},
    "max_model_len": 32768,
    "max_num_seqs": 7,
    "served_model_name": ["one", export_samples.HOSTILE],
    "tokenizer": export_samples.HOSTILE,
}


@pytest.fixture(scope="module")
def command() -> Any:
    """The parser of the `vllm` command with `serve` in it: it reads the config file, and knows only its own options."""
    kind, options = _vllm_parsers()
    command = kind(prog="vllm")
    options(command.add_subparsers().add_parser("serve"))
    return command


@pytest.fixture(scope="module")
def parser() -> Any:
    """The parser of `vllm serve`."""
    kind, options = _vllm_parsers()
    return options(kind(prog="vllm serve"))


def _vllm_parsers() -> tuple[Any, Any]:
    """The class of vLLM's parsers and what gives one the options of `serve`, at the places of this version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from vllm.entrypoints.launchers.cli_args import make_arg_parser
        except ImportError:
            from vllm.entrypoints.openai.cli_args import make_arg_parser
        try:
            from vllm.utils.argparse_utils import FlexibleArgumentParser
        except ImportError:
            from vllm.utils import FlexibleArgumentParser
    return FlexibleArgumentParser, make_arg_parser


def read(parser: Any, words: list[str], names: Any) -> dict[str, Any]:
    """What the parser makes of the words, for these arguments, as `EngineArgs` would be given it."""
    parsed = parser.parse_args(words)
    return {name: getattr(parsed, name) for name in names}


def test_vllm_reads_the_command_line_back_as_it_was_given(parser: Any) -> None:
    words = [export_samples.HOSTILE, *command_line(VALUES)]

    assert read(parser, words, VALUES) == VALUES
    assert parser.parse_args(words).model_tag == export_samples.HOSTILE


def test_the_vllm_command_reads_the_config_file_back_as_it_was_given(command: Any, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(yaml_text(config_file({"model": export_samples.HOSTILE, **VALUES})))

    parsed = command.parse_args(["serve", "--config", str(file)])

    assert {name: getattr(parsed, name) for name in VALUES} == VALUES
    assert parsed.model == export_samples.HOSTILE


@pytest.mark.parametrize("value", [-1, -0.5, "-x", "--max-num-seqs", "a.b", "None x", ""])
def test_a_value_that_looks_like_an_option_stays_a_value(parser: Any, value: Any) -> None:
    name = "tokenizer" if isinstance(value, str) else "seed" if isinstance(value, int) else "cpu_offload_gb"

    parsed = read(parser, ["model", *command_line({name: value, "max_num_seqs": 3})], (name, "max_num_seqs"))

    assert parsed == {name: value, "max_num_seqs": 3}


def test_every_boolean_can_be_switched_off_or_is_known_as_a_switch(parser: Any) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    one_way = {a.dest for a in parser._actions if isinstance(a, argparse._StoreTrueAction)} & names

    assert one_way == SWITCHES


def test_a_switch_that_is_off_is_not_said() -> None:
    assert command_line({"disable_log_stats": False}) == []
    assert config_file({"disable_log_stats": False}) == {}


@pytest.mark.parametrize("value", [[], ["--max-num-seqs"], "a\0b"])
def test_what_the_command_line_cannot_say_is_refused_by_name(value: Any) -> None:
    with pytest.raises(PickError, match="engine argument served_model_name"):
        command_line({"served_model_name": value})


@pytest.mark.parametrize("value", ["-x", -0.5])
def test_the_config_file_refuses_what_would_be_an_option(value: Any) -> None:
    with pytest.raises(PickError, match=rf"engine argument tokenizer.*{value}"):
        config_file({"tokenizer": value})


def test_the_config_file_says_a_negative_integer(parser: Any, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(yaml_text(config_file({"seed": -1})))

    assert parser.parse_args(["--config", str(file)]).seed == -1


def test_the_defaults_are_those_of_the_installed_vllm(parser: Any) -> None:
    defaults = engine_defaults()

    assert defaults["enforce_eager"] is False
    assert defaults["max_num_seqs"] is None
    assert defaults["gpu_memory_utilization"] == parser.get_default("gpu_memory_utilization")


def test_reading_the_defaults_leaves_no_level_of_logging_to_engines_that_start_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)

    engine_defaults()

    assert "VLLM_LOGGING_LEVEL" not in os.environ
