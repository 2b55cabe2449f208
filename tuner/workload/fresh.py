"""The same workload with token ids that no engine has seen: one for each trial and repeat.

A repeat whose prompts an engine has seen measures its prefix cache (vLLM issues 54227 and 52884: up to 49 times too
good). Lengths, arrivals and which prompts share which prefix stay; only the ids change.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tuner.workload.model import Workload
from tuner.workload.prompts import HEAD_TOKENS, as_tuples, rekeyed
from tuner.workload.streams import stream


def fresh(workload: Workload, salt: int, repeat: int) -> Workload:
    """Replace token ids by those of `(workload.seed, salt, repeat)`.

    Random ids are all replaced. Where the prompts are text (`workload.keeps_text`) only the first `HEAD_TOKENS` of
    each are: that is enough for no cached block to fit, since a block is named by everything before it, and it leaves
    mixture-of-experts routing and speculative decoding the text to work on. Ids outside the vocabulary, such as the
    markers of a chat template, stay.

    Returns
    -------
    Workload
        Two different `(salt, repeat)`, or one and the original, share the first `HEAD_TOKENS` tokens of a prompt only
        by chance: once in size-of-vocabulary to the power of 16 pairs of prompts.
    """
    low, high = workload.vocabulary
    longest = max(r.prompt_tokens for r in workload.requests)
    pad = stream("fresh", workload.seed, salt, repeat).ids(longest, (0, high - low))
    head = HEAD_TOKENS if workload.keeps_text else None
    prompts = as_tuples(
        [
            rekeyed(np.array(r.prompt_token_ids, dtype=np.uint32), pad, workload.vocabulary, head)
            for r in workload.requests
        ]
    )
    requests = zip(workload.requests, prompts, strict=True)
    return replace(workload, requests=tuple(replace(r, prompt_token_ids=ids) for r, ids in requests))
