"""What others measured on GPUs and published, as far as a rule can be held against it. Each row names its source."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SERVING = Path(__file__).parents[1] / "data" / "rules" / "published.jsonl"
MEMORY = ROOT / "tests" / "data" / "memory_facts.jsonl"
A10G = ROOT / "tests" / "data" / "twin" / "a10g-study.jsonl"

DEFAULT_BUDGET = 2048
"""vLLM's default `max_num_batched_tokens` of a server on an A100."""


@dataclass(frozen=True, slots=True)
class Served:
    """One run of a sweep over the token budget."""

    budget: int
    ttft_s: float
    tpot_s: float
    tpot_p99_s: float
    source: str


def budgets() -> list[Served]:
    """Return the sweep, smallest budget first."""
    found = [
        Served(
            budget=row["params"].get("max_num_batched_tokens", DEFAULT_BUDGET),
            ttft_s=row["ttft"]["mean"] / 1e3,
            tpot_s=row["tpot"]["mean"] / 1e3,
            tpot_p99_s=row["tpot"]["p99"] / 1e3,
            source=row["source"],
        )
        for row in _lines(SERVING)
    ]
    return sorted(found, key=lambda run: run.budget)


def memory(*ids: str) -> list[dict[str, Any]]:
    """Return start-up logs by their ids, in this order."""
    rows = {row["id"]: row for row in _lines(MEMORY)}
    return [rows[name] for name in ids]


def full_pools() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the A10G study in which the KV pool was full (requests were preempted), by cache type."""
    found: dict[str, list[dict[str, Any]]] = {"bf16": [], "fp8": []}
    for row in _lines(A10G):
        if row["preemptions_per_s"] > 0:
            found["fp8" if row["params"]["kv_cache_dtype"].startswith("fp8") else "bf16"].append(row)
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
