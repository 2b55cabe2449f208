"""Keep secrets out of everything that is stored or shown: parameters, tags, artefacts, logs, reports.

A secret is known by the name that it is stored under, by being the value of an environment variable of such a name,
or by a shape that only secrets have. `mask` replaces them in text, `mask_tree` in a JSON document.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MASKED = "***"
SHORTEST_SECRET = 6
"""Shorter values are not searched for in texts: they would take harmless words ("true", "0", "auto") with them."""

_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])")
_SECRET_WORDS = frozenset(
    {
        "token", "key", "keys", "apikey", "secret", "secrets", "password", "passwords", "passwd", "passphrase",
        "pgpassword", "credential", "credentials",
    }
)  # fmt: skip
"""Words that make a name a secret's. Not "tokens": `max_num_batched_tokens` counts them."""
_COUNTS = re.compile(r"token_threshold", re.IGNORECASE)
"""What only sounds like a secret's name: vLLM's `long_prefill_token_threshold` is a number of tokens."""

_SHAPES = re.compile(
    r"""
    (?<=://)[^/@\s:]*:[^/@\s]+(?=@)                 # user:password in a URL
    | (?<=[Bb]earer\ )[\w.~+/-]{6,}=*               # an authorisation header
    | \bhf_[A-Za-z0-9]{20,}\b                       # a Hugging Face token
    | \bsk-[A-Za-z0-9_-]{20,}\b                     # the customary form of an API key
    """,
    re.VERBOSE,
)
_ASSIGNED = re.compile(r"""(?P<name>[A-Za-z_][\w-]*)(?P<sign>["']?\s*[=:]\s*["']?)(?P<value>[^\s"',;}]+)""")


def is_secret(name: str) -> bool:
    """Whether what is stored under this name is a secret: `HF_TOKEN`, `api_key`, `dbPassword`; not `max_tokens`."""
    return any(word.lower() in _SECRET_WORDS for word in _WORDS.findall(_COUNTS.sub("", name)))


def secret_values(*environments: Mapping[str, Any]) -> tuple[str, ...]:
    """Values of the secrets in these environments (the process's own when none is given), longest first."""
    found = {
        str(value)
        for environment in environments or (os.environ,)
        for name, value in environment.items()
        if is_secret(name) and len(str(value)) >= SHORTEST_SECRET
    }
    return tuple(sorted(found, key=lambda value: (-len(value), value)))


def mask(text: str, values: tuple[str, ...] | None = None) -> str:
    """Return the text without secrets.

    Parameters
    ----------
    values:
        What `secret_values` returned; the secrets of the process's own environment when left out.
    """
    for value in secret_values() if values is None else values:
        text = text.replace(value, MASKED)
    return _ASSIGNED.sub(_mask_assignment, _SHAPES.sub(MASKED, text))


def mask_tree(document: Any, values: tuple[str, ...] | None = None) -> Any:
    """Return the JSON document with every secret replaced, by the name of its key or within its text."""
    known = secret_values() if values is None else values
    if isinstance(document, Mapping):
        return {
            key: MASKED if value and isinstance(value, str) and is_secret(str(key)) else mask_tree(value, known)
            for key, value in document.items()
        }
    if isinstance(document, list | tuple):
        return [mask_tree(item, known) for item in document]
    return mask(document, known) if isinstance(document, str) else document


def _mask_assignment(match: re.Match[str]) -> str:
    # In running text only the last word counts: the word after "KeyError:" is evidence, not a secret.
    words = _WORDS.findall(match["name"])
    if not words or words[-1].lower() not in _SECRET_WORDS:
        return match[0]
    if len(match["value"]) < SHORTEST_SECRET or _is_plain(match["value"]):
        return match[0]
    return f"{match['name']}{match['sign']}{MASKED}"


def _is_plain(value: str) -> bool:
    """Whether a value is a number or a switch, as in `key=12`, which tells a reader something and betrays nothing."""
    return value.lower() in {"true", "false", "none", "null"} or value.replace(".", "", 1).isdigit()
