"""The model's tokenizer, behind the little that workloads need of it. The only file here that imports transformers."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

from tuner.errors import WorkloadError


class Tokenizer(Protocol):
    """Text to token ids."""

    @property
    def identity(self) -> str:
        """Digest of everything that decides which ids a text becomes; part of the cache's key."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def special_ids(self) -> Collection[int]:
        """Ids that a prompt of random tokens must not hold: markers, and ids that stand for no token."""
        ...

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Ids of a text, with the markers that a server puts round a prompt (such as BOS) if asked for."""
        ...

    def encode_chat(self, message: str) -> list[int]:
        """Ids of one user message in the chat template, up to where the answer begins.

        Raises
        ------
        WorkloadError
            If the model has no chat template.
        """
        ...


def vocabulary_of(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the longest run of ids without a special one, as a half-open range: what random prompts are made of.

    Raises
    ------
    WorkloadError
        If there is no run of at least two ids.
    """
    barriers = [-1, *sorted({i for i in tokenizer.special_ids if 0 <= i < tokenizer.vocab_size}), tokenizer.vocab_size]
    runs = [(left + 1, right) for left, right in itertools.pairwise(barriers)]
    low, high = max(runs, key=lambda run: run[1] - run[0])
    if high - low < 2:
        raise WorkloadError("the tokenizer has no two neighbouring ids that are not special; use another model")
    return low, high


class TransformersTokenizer:
    """A tokenizer of the transformers library. Make one with `load`."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner = inner
        self._name = name
        vocabulary = inner.get_vocab()
        used = set(vocabulary.values())
        added = set(inner.added_tokens_decoder)
        self.vocab_size: int = max(used | added) + 1
        self.special_ids: frozenset[int] = frozenset(
            set(inner.all_special_ids) | added | (set(range(self.vocab_size)) - used)
        )
        self.identity: str = _identity(inner, vocabulary)

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Ids of a text; see `Tokenizer.encode`."""
        return [int(i) for i in self._inner.encode(text, add_special_tokens=special_tokens, verbose=False)]

    def encode_chat(self, message: str) -> list[int]:
        """Ids of one user message in the chat template; see `Tokenizer.encode_chat`."""
        if not self._inner.chat_template:
            raise WorkloadError(f"{self._name}: the model has no chat template; set workload.chat_template to false")
        text = self._inner.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
        )
        return self.encode(text)


def _identity(inner: Any, vocabulary: dict[str, int]) -> str:
    """Digest of the tokenizer's own serialised form, or of its vocabulary where it has none (slow tokenizers)."""
    backend = getattr(inner, "backend_tokenizer", None)
    body = backend.to_str() if backend is not None else json.dumps(sorted(vocabulary.items()))
    template = json.dumps(inner.chat_template, sort_keys=True)
    return hashlib.sha256("\0".join((type(inner).__name__, body, template)).encode()).hexdigest()[:16]


def load(model: str, *, trust_remote_code: bool = False, download: bool = True) -> TransformersTokenizer:
    """Load the tokenizer of a local folder or of a model's name on the hub.

    Parameters
    ----------
    download:
        Whether the hub may be asked for what is not on this machine.

    Raises
    ------
    WorkloadError
        If it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        inner = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code, local_files_only=not download)
    except (OSError, ValueError, ImportError, KeyError) as error:
        where = "in this folder" if Path(model).is_dir() else "on this machine or the hub"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WorkloadError(
            f"{model}: no tokenizer can be loaded {where} ({reason}); set model to one that has it"
        ) from error
    return TransformersTokenizer(inner, model)
