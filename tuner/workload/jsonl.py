"""The custom format of `vllm bench`: one `{"prompt": text, "output_tokens": number}` a line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tuner.workload.lengths import longest_output
from tuner.workload.source import Passage, SkippedLine, Source, collected, is_text, json_objects, token_count
from tuner.workload.spec import Jsonl
from tuner.workload.streams import Stream
from tuner.workload.tokenizer import Tokenizer

EXPECTED = '{"prompt": text, "output_tokens": number} on each line'


@dataclass(frozen=True, slots=True)
class Prompt:
    """One usable line. `output_tokens` is `None` where the spec sets it for all."""

    line: int
    text: str
    output_tokens: int | None


def read(path: Path, *, needs_output_tokens: bool) -> tuple[list[Prompt], list[SkippedLine]]:
    """Read every line with a prompt and, where the spec leaves it to the file, a number of output tokens."""
    prompts: list[Prompt] = []
    skipped: list[SkippedLine] = []
    for number, value in json_objects(path, skipped):
        text = value.get("prompt")
        output_tokens = token_count(value.get("output_tokens")) if needs_output_tokens else None
        if not is_text(text) or not text:
            skipped.append(SkippedLine(str(path), number, "no `prompt` field with text in it"))
        elif needs_output_tokens and output_tokens is None:
            reason = "no `output_tokens` field with a number of tokens, and the study file sets none for all"
            skipped.append(SkippedLine(str(path), number, reason))
        else:
            prompts.append(Prompt(number, text, output_tokens))
    return prompts, skipped


def load(spec: Jsonl, path: Path, tokenizer: Tokenizer, order: Stream) -> Source:
    """Tokenise prompts until there are as many usable ones as the spec asks for, or none is left.

    Raises
    ------
    WorkloadError
        If none is usable.
    """
    prompts, skipped = read(path, needs_output_tokens=spec.output_tokens is None)
    indices = order.order(len(prompts)) if spec.shuffle else range(len(prompts))
    candidates = ((prompts[i].line, _passage(spec, prompts[i], tokenizer)) for i in indices)
    return collected(path, candidates, spec.requests, skipped, EXPECTED)


def _passage(spec: Jsonl, prompt: Prompt, tokenizer: Tokenizer) -> Passage | str:
    """Tokenise a prompt, or say why it is passed over."""
    if spec.chat_template:
        ids = tokenizer.encode_chat(prompt.text)
    else:
        ids = tokenizer.encode(prompt.text, special_tokens=True)
    if not ids:
        return "no token comes out of the prompt"
    output = prompt.output_tokens if spec.output_tokens is None else longest_output(spec.output_tokens)
    total = len(ids) + (output or 0)
    if spec.max_total_tokens is not None and total > spec.max_total_tokens:
        return f"{total} tokens are above max_total_tokens ({spec.max_total_tokens})"
    return Passage(np.array(ids, dtype=np.uint32), prompt.output_tokens)
