"""A workload as data: the frozen requests that every trial of a study runs, with a fingerprint that pins them."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Parameters
    ----------
    arrival_s:
        Scheduled arrival in seconds from the start of a repeat. In a closed loop it is 0 and `user` says whose turn
        the request is.
    prompt_token_ids:
        The prompt.
    output_tokens:
        Exact number of tokens to generate (the end-of-sequence token is ignored).
    shared_tokens:
        Length of the prefix that this request shares with others on purpose; 0 for none. Everything after it is
        private: no other request continues that prefix with the same block of tokens.
    user:
        Index of the closed-loop user that sends this request, or `None` in an open loop.
    think_s:
        Closed loop only: wait after the user's previous request has ended.
    """

    arrival_s: float
    prompt_token_ids: tuple[int, ...]
    output_tokens: int
    shared_tokens: int = 0
    user: int | None = None
    think_s: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class Workload:
    """A frozen list of requests in order of arrival.

    Parameters
    ----------
    vocabulary:
        The token ids that fresh prompts may use, as a half-open range `(low, high)`.
    max_concurrency:
        At most this many requests are in the engine at once; `None` for no cap. A request held back by the cap keeps
        its scheduled arrival, so that the wait counts.
    seed:
        The seed that made it; fresh ids of later repeats derive from it.
    keeps_text:
        The prompts are text, of which fresh ids replace only the first tokens; otherwise they replace all.
    """

    name: str
    requests: tuple[Request, ...]
    vocabulary: tuple[int, int]
    seed: int
    max_concurrency: int | None = None
    keeps_text: bool = False

    @property
    def longest_tokens(self) -> int:
        """Prompt plus output tokens of the longest request: what `max_model_len` must hold."""
        return max(r.prompt_tokens + r.output_tokens for r in self.requests)

    @property
    def shares_prefixes(self) -> bool:
        """Whether prefix-cache hits are intended."""
        return any(r.shared_tokens for r in self.requests)

    def fingerprint(self) -> str:
        """16 hex digits over every token and arrival: the same on every machine and Python, different for any change.

        Times are rounded to whole microseconds and hashed as 64-bit integers, ids as unsigned 32-bit, little endian.
        """
        digest = hashlib.sha256()
        low, high = self.vocabulary
        digest.update(
            struct.pack("<5q", len(self.requests), low, high, self.max_concurrency or 0, int(self.keeps_text))
        )
        for r in self.requests:
            digest.update(
                struct.pack(
                    "<6q",
                    round(r.arrival_s * 1e6),
                    r.output_tokens,
                    r.shared_tokens,
                    -1 if r.user is None else r.user,
                    round(r.think_s * 1e6),
                    r.prompt_tokens,
                )
            )
            digest.update(struct.pack(f"<{r.prompt_tokens}I", *r.prompt_token_ids))
        return digest.hexdigest()[:16]
