"""The ShareGPT JSON file: a list of conversations, of which the first turn is the prompt and the second the answer.

Which entries count is as in `vllm bench`: at least two turns, and lengths within the limits of the spec. The file is
walked entry by entry, so that a bad one can be named by its line and a file that was cut off is used up to there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tuner.errors import WorkloadError
from tuner.workload.lengths import longest_output
from tuner.workload.source import Passage, SkippedLine, Source, collected, is_text, unreadable
from tuner.workload.spec import ShareGpt
from tuner.workload.streams import Stream
from tuner.workload.tokenizer import Tokenizer

EXPECTED = 'a JSON list of {"conversations": [{"value": prompt}, {"value": answer}, ...]}'
_BLANK = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Conversation:
    """The two turns that are used, and the line on which the entry begins."""

    line: int
    prompt: str
    answer: str


def read(path: Path) -> tuple[list[Conversation], list[SkippedLine]]:
    """Read every conversation with two turns of text.

    Raises
    ------
    WorkloadError
        If the file cannot be read, is not UTF-8, or is not a JSON list.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: not UTF-8 (byte {error.start + 1}); it must hold {EXPECTED}") from error
    conversations: list[Conversation] = []
    skipped: list[SkippedLine] = []
    for line, entry in _entries(path, text, skipped):
        turns = _two_turns(entry)
        if turns is None:
            skipped.append(SkippedLine(str(path), line, "not a conversation with two turns of text"))
        else:
            conversations.append(Conversation(line, *turns))
    return conversations, skipped


def _entries(path: Path, text: str, skipped: list[SkippedLine]) -> Iterator[tuple[int, Any]]:
    """Yield (line, value) of the top-level list, up to where it stops being JSON."""
    decoder = json.JSONDecoder()
    position, line = _past_blank(text, 0), 1
    if not text.startswith("[", position):
        raise WorkloadError(f"{path}: not a JSON list; it must hold {EXPECTED}")
    counted = 0
    position = _past_blank(text, position + 1)
    while not text.startswith("]", position):
        line += text.count("\n", counted, position)
        counted = position
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            skipped.append(SkippedLine(str(path), line, f"not JSON from here on ({error})"))
            return
        yield line, value
        position = _past_blank(text, position)
        if text.startswith(",", position):
            position = _past_blank(text, position + 1)


def _past_blank(text: str, position: int) -> int:
    while position < len(text) and text[position] in _BLANK:
        position += 1
    return position


def _two_turns(entry: Any) -> tuple[str, str] | None:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
    prompt, answer = texts
    return (prompt, answer) if is_text(prompt) and is_text(answer) else None


def load(spec: ShareGpt, path: Path, tokenizer: Tokenizer, order: Stream) -> Source:
    """Tokenise conversations until there are as many usable ones as the spec asks for, or none is left.

    Raises
    ------
    WorkloadError
        If none is usable.
    """
    conversations, skipped = read(path)
    indices = order.order(len(conversations)) if spec.shuffle else range(len(conversations))
    candidates = ((conversations[i].line, _passage(spec, conversations[i], tokenizer)) for i in indices)
    return collected(path, candidates, spec.requests, skipped, EXPECTED)


def _passage(spec: ShareGpt, conversation: Conversation, tokenizer: Tokenizer) -> Passage | str:
    """Tokenise a conversation, or say why it is passed over."""
    ids = tokenizer.encode(conversation.prompt, special_tokens=True)
    if len(ids) < spec.min_tokens:
        return f"prompt of {len(ids)} tokens is below min_tokens ({spec.min_tokens})"
    if len(ids) > spec.max_prompt_tokens:
        return f"prompt of {len(ids)} tokens is above max_prompt_tokens ({spec.max_prompt_tokens})"
    if spec.output_tokens is None:
        answer = len(tokenizer.encode(conversation.answer, special_tokens=True))
        if answer < spec.min_tokens:
            return f"answer of {answer} tokens is below min_tokens ({spec.min_tokens})"
        total = len(ids) + answer
    else:
        answer = None
        total = len(ids) + longest_output(spec.output_tokens)
    if total > spec.max_total_tokens:
        return f"{total} tokens are above max_total_tokens ({spec.max_total_tokens})"
    return Passage(np.array(ids, dtype=np.uint32), answer)
