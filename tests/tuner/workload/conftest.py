from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from tuner.workload.build import BuiltWorkload, build
from tuner.workload.spec import WorkloadSpec

VOCABULARY = (100, 32_000)
POISSON = {"kind": "poisson", "rate_per_s": 2.0}


class WordTokenizer:
    """A word is a token; ids 0 to 99 are special; BOS is 1."""

    identity = "words"
    vocab_size = 32_000
    special_ids = frozenset(range(100))

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        self.encoded += 1
        words = [100 + zlib.crc32(word.encode()) % 31_900 for word in text.split()]
        return [1, *words] if special_tokens else words

    def encode_chat(self, message: str) -> list[int]:
        system = " ".join(f"system{i}" for i in range(20))
        return [2, *self.encode(system), 3, *self.encode(message), 4]


@pytest.fixture
def tokenizer() -> WordTokenizer:
    return WordTokenizer()


@pytest.fixture
def make(tmp_path: Path, tokenizer: WordTokenizer) -> Callable[..., BuiltWorkload]:
    """Build the workload of a section whose files lie in tmp_path."""

    def made(section: dict[str, Any], cache_folder: Path | None = None) -> BuiltWorkload:
        spec = TypeAdapter(WorkloadSpec).validate_python(section)
        return build(spec, tokenizer=tokenizer, vocabulary=VOCABULARY, base_folder=tmp_path, cache_folder=cache_folder)

    return made


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    """Write a file of JSON lines; strings and bytes are written as they are."""

    def written(name: str, *rows: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [row if isinstance(row, bytes | str) else json.dumps(row) for row in rows]
        path.write_bytes(b"".join((t if isinstance(t, bytes) else t.encode()) + b"\n" for t in texts))
        return path

    return written


@pytest.fixture
def sections(tmp_path: Path, lines: Callable[..., Path]) -> dict[str, dict[str, Any]]:
    """One small section of every kind, with the files that they need."""
    lines("docs/a.txt", " ".join(f"alpha{i}" for i in range(300)))
    lines("docs/b.jsonl", *({"text": " ".join(f"beta{j}x{i}" for i in range(40))} for j in range(5)))
    chats = [
        {"conversations": [{"value": f"please tell me number {i} of them"}, {"value": "one two three four five"}]}
        for i in range(6)
    ]
    (tmp_path / "chats.json").write_text(json.dumps(chats, indent=1))
    lines("prompts.jsonl", *({"prompt": f"prompt number {i} it is", "output_tokens": 3 + i} for i in range(6)))
    lines(
        "mooncake.jsonl",
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 250, "input_length": 1100, "output_length": 7, "hash_ids": [0, 2, 3]},
        {"timestamp": 900, "input_length": 30, "output_length": 2, "hash_ids": [9]},
    )
    lines(
        "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
    )
    common = {"output_tokens": 8, "arrivals": POISSON, "seed": 7}
    return {
        "long_documents": {"kind": "long_documents", "prompt_tokens": {512: 2, 64: 6}, "max_concurrency": 4, **common},
        "long_documents_text": {
            "kind": "long_documents",
            "requests": 9,
            "prompt_tokens": [64, 100],
            "documents": "docs",
            **common,
            "output_tokens": {"lognormal": {"median": 20, "sigma": 0.8, "max": 60}},
        },
        "shared_prefix": {
            "kind": "shared_prefix",
            "requests": 9,
            "prefixes": 2,
            "prefix_tokens": [128, 64],
            "question_tokens": 32,
            **common,
            "arrivals": {"kind": "closed_loop", "users": 3, "think_s": 0.5},
        },
        "sharegpt": {
            "kind": "sharegpt",
            "path": "chats.json",
            "requests": 8,
            "seed": 7,
            "arrivals": {"kind": "gamma", "rate_per_s": 4, "burstiness": 0.4},
        },
        "jsonl": {
            "kind": "jsonl",
            "path": "prompts.jsonl",
            "seed": 7,
            "arrivals": {"kind": "ramp", "start_rate_per_s": 1, "end_rate_per_s": 5},
        },
        "mooncake": {"kind": "trace", "path": "mooncake.jsonl", "time_scale": 0.5, "seed": 7},
        "azure": {"kind": "trace", "path": "azure.csv", "seed": 7},
    }
