"""The words of the study file that `tuner init` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

_COMMENTS = {
    "tensor_parallel_size": "GPUs that share one model",
    "max_model_len": "longest request: prompt and answer",
    "enforce_eager": "compiling takes a minute for each configuration on a CPU",
    "gpu_memory_utilization": "on the CPU: share of the RAM, where a trial does not set the KV cache itself",
    "gpus_per_engine": "of one engine",
    "accelerator_type": "as Ray calls them; `tuner plan` predicts for them on any machine",
}
_SPACE_COMMENTS = {
    "gpu_memory_utilization": "share of the GPU that vLLM may take",
    "max_num_seqs": "requests that run at once",
    "max_num_batched_tokens": "tokens of one step: large is good for TTFT, small for TPOT",
    "long_prefill_token_threshold": "longest piece of a prompt in one step; 0: no limit",
    "enable_prefix_caching": "keep the KV cache of prompts for others that begin alike",
    "kv_cache_memory_bytes": "memory for the KV cache",
    "block_size": "tokens of one block of the KV cache",
}
_COLUMN = 58


@dataclass(frozen=True, slots=True)
class StudyText:
    """Everything that a study file says, and two sentences about it.

    Parameters
    ----------
    machine:
        The device in words.
    model_comment:
        What to know about the model; empty for nothing.
    memory:
        Whether vLLM's defaults are predicted to fit, in words.
    """

    machine: str
    model: str
    model_comment: str
    args: Mapping[str, Any]
    env: Mapping[str, Any]
    resources: Mapping[str, Any]
    prompt_tokens: Mapping[int, int]
    output_tokens: int
    rate_per_s: float
    space: Mapping[str, Any]
    recipes: Sequence[str]
    budget: Mapping[str, Any]
    measure: Mapping[str, Any]
    memory: str


def render(name: str, study: StudyText) -> str:
    """Return the text of the file."""
    lines = [
        f"# A study for {study.machine}. Look it over, then: tuner check, tuner plan, tuner run.",
        f"study: {_value(name)}",
        _line(f"model: {_value(study.model)}", study.model_comment),
        "",
        "engine:                             # the same in every trial; all else is as vLLM has it",
        "  args:",
        *_section(study.args, "    ", _COMMENTS),
    ]
    if study.env:
        lines += ["  env:", *_section(study.env, "    ", {})]
    if study.resources:
        lines += ["", "resources:", *_section(study.resources, "  ", _COMMENTS)]
    lines += ["", "workload:                           # every trial runs exactly these requests", *_workload(study)]
    lines += ["", "space:                              # what may be changed, by vLLM's own names"]
    lines += _section(study.space, "  ", _SPACE_COMMENTS)
    lines += [
        "",
        "# Starting points that others use; tried after vLLM's defaults.",
        f"recipes: {_value(study.recipes)}",
    ]
    lines += ["", "# The front is sought between these two; `tuner check` lists all metrics."]
    lines += ["objectives: [ttft_p95_s, tpot_p95_s]"]
    lines += ["# constraints: [ttft_p99_s <= 20]      # memory is one without being named"]
    lines += ["", _line(f"budget: {_value(study.budget)}", "trials, hours, or both: the first to come ends it")]
    if study.measure:
        lines += [_line(f"measure: {_value(study.measure)}", "what takes longer is ended as hung")]
    return "\n".join(lines) + "\n"


def _workload(study: StudyText) -> list[str]:
    arrivals = {"kind": "poisson", "rate_per_s": study.rate_per_s}
    return [
        "  kind: long_documents",
        _line(f"  prompt_tokens: {_value(dict(study.prompt_tokens))}", "length in tokens: number of requests"),
        f"  output_tokens: {study.output_tokens}",
        _line(f"  arrivals: {_value(arrivals)}", "requests a second: put yours here"),
        _line("  # documents: my-documents", "a folder with texts of yours instead of random tokens"),
    ]


def _section(values: Mapping[str, Any], indent: str, comments: Mapping[str, str]) -> list[str]:
    return [_line(f"{indent}{name}: {_value(value)}", comments.get(name, "")) for name, value in values.items()]


def _line(text: str, comment: str) -> str:
    return f"{text:<{_COLUMN}} # {comment}" if comment else text


def _value(value: Any) -> str:
    """Write a value as YAML on one line."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = list(value)
    elif isinstance(value, Mapping):
        value = dict(value)
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return str(text).removesuffix("...\n").strip()
