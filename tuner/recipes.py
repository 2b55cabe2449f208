"""Starting points that operators use, by name, as data with where each comes from.

A recipe sets engine arguments only. In a study it is tried after the reference; where it cannot hold the study's
workload, it is skipped with a line that says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_GUIDE = "starting points that circulate in vLLM tuning guides, collected 2026-11"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A named set of engine arguments, what it is for, and its source."""

    args: Mapping[str, Any]
    purpose: str
    source: str = _GUIDE


def _recipe(
    purpose: str, utilisation: float, length: int, seqs: int | None, batched: int | None, **more: Any
) -> Recipe:
    args = {
        "gpu_memory_utilization": utilisation,
        "max_model_len": length,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": batched,
        **more,
    }
    return Recipe({name: value for name, value in args.items() if value is not None}, purpose)


RECIPES: Mapping[str, Recipe] = {
    "high-throughput-offline": _recipe("as many tokens a second as possible, latency aside", 0.95, 2048, 512, 16384),
    "balanced-online": _recipe("interactive traffic of medium length", 0.90, 4096, 128, 8192),
    "low-latency": _recipe("few users who must not wait", 0.85, 2048, 32, 4096),
    "long-context": _recipe("long prompts, few at a time", 0.92, 32768, 16, 8192),
    "chat": _recipe("multi-turn chat", 0.90, 8192, None, None, enable_chunked_prefill=True),
    "document-summary": _recipe("one document a request", 0.90, 32768, None, None, enable_chunked_prefill=True),
    "whole-book": _recipe("a whole book in one prompt, prefilled at once", 0.90, 131072, None, 262144),
    "long-document-a6000": _recipe("long documents on four A6000", 0.70, 65536, None, 131072, tensor_parallel_size=4),
}


@dataclass(frozen=True, slots=True)
class Skipped:
    """A recipe that cannot be tried in a study, and why."""

    recipe: str
    reason: str


def applicable(
    name: str, *, fixed: Mapping[str, Any], longest_tokens: int, num_gpus: int
) -> Mapping[str, Any] | Skipped:
    """Return the arguments that a recipe sets in a study, or why it cannot be tried there.

    What the study fixes stays fixed; everything else of the recipe applies, also where it lies outside the space: a
    starting point is worth measuring even if the search would not go there.

    Parameters
    ----------
    fixed:
        `engine.args` of the study.
    longest_tokens:
        Prompt plus output of the longest request of the workload.
    """
    args = RECIPES[name].args
    length = fixed.get("max_model_len", args.get("max_model_len"))
    if length is not None and length < longest_tokens:
        return Skipped(name, f"its max_model_len {length} cannot hold the longest request of {longest_tokens} tokens")
    parallel = fixed.get("tensor_parallel_size", args.get("tensor_parallel_size", 1))
    if parallel > max(1, num_gpus):
        return Skipped(name, f"it needs {parallel} GPUs (tensor_parallel_size), the study has {num_gpus}")
    changes = {key: value for key, value in args.items() if key not in fixed}
    return changes or Skipped(name, "everything that it sets is fixed by the study")
