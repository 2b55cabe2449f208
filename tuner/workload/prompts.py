"""Arithmetic on prompts as arrays of token ids: replacing them without changing what they share, and what they share.

An engine's prefix cache works in blocks and names a block by everything before it too, so two prompts that differ
in their first tokens share no block. `HEAD_TOKENS` is how many of them we look at.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from tuner.errors import WorkloadError
from tuner.workload.streams import Ids, stream

HEAD_TOKENS = 16
"""vLLM's usual block: the smallest share of a prompt that is worth a cache hit."""

_ATTEMPTS = 100


def rekeyed(ids: Ids, pad: Ids, vocabulary: tuple[int, int], head: int | None = None) -> Ids:
    """Add a pad, position by position, to the ids within the vocabulary (modulo its size); others stay.

    With one pad for all prompts this is a one-to-one map at every position: prompts share exactly the prefixes that
    they shared before. With a random pad the new ids are uniform whatever the old ones were, so that two pads give
    the same n ids at the same place with probability size**-n.

    Parameters
    ----------
    ids:
        Shape (tokens,).
    pad:
        Numbers from 0 to the size of the vocabulary, shape (at least tokens,).
    head:
        Change only the first so many ids of the vocabulary; `None` for all.
    """
    low, high = vocabulary
    places = np.flatnonzero((ids >= low) & (ids < high))[:head]
    result = ids.copy()
    moved = (ids[places].astype(np.uint64) - np.uint64(low) + pad[places]) % np.uint64(high - low)
    result[places] = (moved + np.uint64(low)).astype(np.uint32)
    return result


def with_distinct_heads(prompts: Sequence[Ids], seed: int, vocabulary: tuple[int, int]) -> list[Ids]:
    """Replace the first tokens of every prompt that begins like one before it.

    Afterwards the first `HEAD_TOKENS` tokens of any two prompts differ; prompts shorter than that cannot fill a block
    and stay as they are.

    Raises
    ------
    WorkloadError
        If the vocabulary is too small to tell so many prompts apart.
    """
    seen: set[bytes] = set()
    result = []
    for index, original in enumerate(prompts):
        ids = original
        for attempt in range(_ATTEMPTS):
            if len(ids) < HEAD_TOKENS or ids[:HEAD_TOKENS].tobytes() not in seen:
                break
            pad = stream("head", seed, index, attempt).ids(len(ids), (0, vocabulary[1] - vocabulary[0]))
            ids = rekeyed(original, pad, vocabulary, HEAD_TOKENS)
        else:
            raise WorkloadError(
                f"prompt {index + 1} begins like an earlier one whatever its first tokens are: the vocabulary "
                f"({vocabulary[0]} to {vocabulary[1]}) cannot tell so many prompts apart; ask for fewer requests"
            )
        seen.add(ids[:HEAD_TOKENS].tobytes())
        result.append(ids)
    return result


def shared_tokens(prompts: Sequence[Ids]) -> list[int]:
    """Length of the longest prefix that each prompt shares with any other; below a block it counts as 0.

    In sorted order the prompt that shares most with another is its neighbour, so this takes n comparisons.
    """
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].astype(">u4").tobytes())
    longest = [0] * len(prompts)
    for left, right in itertools.pairwise(order):
        common = common_prefix(prompts[left], prompts[right])
        longest[left] = max(longest[left], common)
        longest[right] = max(longest[right], common)
    return [length if length >= HEAD_TOKENS else 0 for length in longest]


def common_prefix(a: Ids, b: Ids) -> int:
    """Count the tokens at the start of two prompts that are equal."""
    shorter = min(len(a), len(b))
    differ = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differ[0]) if len(differ) else shorter


def as_tuples(prompts: Sequence[Ids]) -> list[tuple[int, ...]]:
    """Return the prompts as tuples of Python integers, one object for each id that occurs.

    Sharing the objects takes 8 bytes a token instead of 40: 16 million tokens in 130 MB.
    """
    objects = np.arange(max((int(ids.max()) for ids in prompts if len(ids)), default=0) + 1).astype(object)
    return [tuple(objects[ids].tolist()) for ids in prompts]
