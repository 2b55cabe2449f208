"""The `workload:` section of a study file, validated. What it means is in `build`; nothing here reads a file.

The descriptions of the fields are the documentation of the keys: the reference page is generated from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from tuner.section import Section

MOST_TOKENS = 10_000_000
"""No model's context is longer (Llama 4 Scout, 2025); more is a slip of the pen that would fill the memory."""

Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Shares = Annotated[dict[Tokens, Share], Field(min_length=1)]


def _some_share(shares: dict[int, float]) -> None:
    if not any(shares.values()):
        raise ValueError("every share is 0: give at least one length a share above 0")


# Lengths ------------------------------------------------------------------------------------------------------------


class UniformRange(Section):
    """Bounds of a uniform distribution."""

    low: Tokens = Field(description="Smallest number of tokens, included.")
    high: Tokens = Field(description="Largest number of tokens, included.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high}): swap them")
        return self


class LognormalShape(Section):
    """Shape of a lognormal distribution, the usual one of answer lengths."""

    median: Tokens = Field(description="Median number of tokens.")
    sigma: float = Field(gt=0, allow_inf_nan=False, description="Standard deviation of the natural logarithm.")
    max: Tokens = Field(description="Longer draws are cut to this number of tokens.")


class UniformTokens(Section):
    """`{uniform: {low, high}}`."""

    uniform: UniformRange = Field(description="Whole numbers from low to high, each as likely as the next.")


class LognormalTokens(Section):
    """`{lognormal: {median, sigma, max}}`."""

    lognormal: LognormalShape = Field(description="Lognormal lengths, rounded, at least 1 and at most max.")


class ChoiceTokens(Section):
    """`{choices: {length: share}}`."""

    choices: Shares = Field(description="Length -> share of the requests; the shares are met exactly, not on average.")

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        _some_share(self.choices)
        return self


def _output_tag(value: Any) -> str:
    """Name of the branch, so that an error is about the form that was meant and not about all of them."""
    keys = value if isinstance(value, dict) else type(value).model_fields if isinstance(value, BaseModel) else ()
    return next((name for name in ("uniform", "lognormal", "choices") if name in keys), "fixed")


OutputTokens = Annotated[
    Annotated[Tokens, Tag("fixed")]
    | Annotated[UniformTokens, Tag("uniform")]
    | Annotated[LognormalTokens, Tag("lognormal")]
    | Annotated[ChoiceTokens, Tag("choices")],
    Discriminator(_output_tag),
]
"""Number of output tokens: a number, or one distribution."""


def _prompt_tag(value: Any) -> str:
    return "shares" if isinstance(value, dict) else "list" if isinstance(value, list | tuple) else "fixed"


PromptTokens = Annotated[
    Annotated[Tokens, Tag("fixed")]
    | Annotated[tuple[Tokens, ...], Field(min_length=1), Tag("list")]
    | Annotated[Shares, Tag("shares")],
    Discriminator(_prompt_tag),
]
"""Exact prompt lengths: one length, a list in equal shares, or a mapping from length to share or count."""


# Arrivals -----------------------------------------------------------------------------------------------------------


class PoissonArrivals(Section):
    """Independent users: exponential gaps."""

    kind: Literal["poisson"]
    rate_per_s: Rate = Field(description="Requests per second, met exactly over the run.")


class GammaArrivals(Section):
    """Gamma gaps: burstier or more regular than Poisson."""

    kind: Literal["gamma"]
    rate_per_s: Rate = Field(description="Requests per second, met exactly over the run.")
    burstiness: Rate = Field(
        description="Shape of the gamma distribution, as in `vllm bench`: below 1 burstier than Poisson, 1 is Poisson, "
        "above 1 more regular."
    )


class ConstantArrivals(Section):
    """Equal gaps."""

    kind: Literal["constant"]
    rate_per_s: Rate = Field(description="Requests per second.")


class RampArrivals(Section):
    """A rate that rises or falls linearly over the run."""

    kind: Literal["ramp"]
    start_rate_per_s: Rate = Field(description="Requests per second at the first request.")
    end_rate_per_s: Rate = Field(description="Requests per second at the last request.")
    burstiness: Rate = Field(default=1.0, description="As for `gamma`; 1 is a Poisson process with a changing rate.")


class ClosedLoopArrivals(Section):
    """A fixed number of users, each waiting for the answer before asking again."""

    kind: Literal["closed_loop"]
    users: int = Field(ge=1, description="Number of users; requests are dealt to them in turn.")
    think_s: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds between an answer and the same user's next request.",
    )


ArrivalsSpec = Annotated[
    PoissonArrivals | GammaArrivals | ConstantArrivals | RampArrivals | ClosedLoopArrivals,
    Field(discriminator="kind"),
]


# Workloads ----------------------------------------------------------------------------------------------------------


class _Workload(Section):
    seed: int = Field(default=0, ge=0, lt=2**63, description="Everything that is drawn at random derives from it.")
    max_concurrency: int | None = Field(
        default=None,
        ge=1,
        description="At most this many requests are in the engine at once; the wait of a request held back counts "
        "into its time to first token. Left out: no cap.",
    )

    @property
    def needs_tokenizer(self) -> bool:
        """Whether `build` must be given the model's tokenizer, because the workload holds text."""
        return False


class LongDocuments(_Workload):
    """Documents of exact lengths that share no prefix: summaries, extraction, retrieval without reuse."""

    kind: Literal["long_documents"]
    requests: int | None = Field(
        default=None,
        ge=1,
        description="Number of requests. Left out: `prompt_tokens` is a mapping of lengths to counts, and they are "
        "summed.",
    )
    prompt_tokens: PromptTokens = Field(
        description="Exact prompt lengths in tokens: one length, a list of lengths in equal shares, or a mapping from "
        "length to share (or count)."
    )
    output_tokens: OutputTokens = Field(
        description="Tokens to generate: a number, `{uniform: {low, high}}`, `{lognormal: {median, sigma, max}}` or "
        "`{choices: {length: share}}`."
    )
    documents: Path | None = Field(
        default=None,
        description="Folder with your documents (.txt, .md, .jsonl with a `text` field), cut to the exact lengths. "
        "Left out: random token ids. Relative to the study file.",
    )
    arrivals: ArrivalsSpec = Field(description="When requests arrive.")

    @model_validator(mode="after")
    def _countable(self) -> Self:
        if isinstance(self.prompt_tokens, dict):
            _some_share(self.prompt_tokens)
        if self.requests is None:
            counts = self.prompt_tokens.values() if isinstance(self.prompt_tokens, dict) else ()
            if not counts or not all(count.is_integer() for count in counts):
                raise ValueError("set requests, or give prompt_tokens as a mapping from length to a whole number")
        return self

    @property
    def count(self) -> int:
        """Number of requests, given or summed."""
        if self.requests is None and isinstance(self.prompt_tokens, dict):
            return int(sum(self.prompt_tokens.values()))
        return self.requests or 0

    @property
    def needs_tokenizer(self) -> bool:
        """Whether the prompts are text."""
        return self.documents is not None


class SharedPrefix(_Workload):
    """A few system prompts or documents with many questions each: prefix caching on purpose."""

    kind: Literal["shared_prefix"]
    requests: int = Field(ge=1, description="Number of requests, over all prefixes.")
    prefixes: int = Field(ge=1, description="Number of different prefixes; each gets the same share of the requests.")
    prefix_tokens: PromptTokens = Field(
        description="Exact lengths of the prefixes: one length, a list in equal shares, or a mapping from length to "
        "share."
    )
    question_tokens: PromptTokens = Field(description="Exact lengths of what follows the prefix, in the same forms.")
    output_tokens: OutputTokens = Field(description="Tokens to generate, in the forms of `long_documents`.")
    documents: Path | None = Field(
        default=None,
        description="Folder with documents that prefixes and questions are cut from. Left out: random token ids.",
    )
    arrivals: ArrivalsSpec = Field(description="When requests arrive.")

    @model_validator(mode="after")
    def _shares(self) -> Self:
        for lengths in (self.prefix_tokens, self.question_tokens):
            if isinstance(lengths, dict):
                _some_share(lengths)
        return self

    @property
    def needs_tokenizer(self) -> bool:
        """Whether the prompts are text."""
        return self.documents is not None


class _PromptFile(_Workload):
    path: Path = Field(description="The file, relative to the study file.")
    requests: int | None = Field(
        default=None,
        ge=1,
        description="Number of requests. Left out: every usable entry once. More than there are: the file is gone "
        "through again with the first tokens of each copy replaced, so that no copy hits the prefix cache.",
    )
    shuffle: bool = Field(default=True, description="Take entries in an order drawn from the seed, not the file's.")
    output_tokens: OutputTokens | None = Field(
        default=None, description="Tokens to generate, in the forms of `long_documents`. Left out: as the file says."
    )
    arrivals: ArrivalsSpec = Field(description="When requests arrive.")

    @property
    def needs_tokenizer(self) -> bool:
        """Always: the prompts are text."""
        return True


class ShareGpt(_PromptFile):
    """The ShareGPT JSON file that `vllm bench` takes: the first turn is the prompt, the second the answer."""

    kind: Literal["sharegpt"]
    min_tokens: int = Field(
        default=4, ge=1, description="Entries with a shorter prompt or (where the file decides) answer are passed over."
    )
    max_prompt_tokens: int = Field(default=1024, ge=1, description="Entries with a longer prompt are passed over.")
    max_total_tokens: int = Field(
        default=2048, ge=2, description="Entries whose prompt and answer are longer together are passed over."
    )


class Jsonl(_PromptFile):
    """The custom format of `vllm bench`: a line is `{"prompt": text, "output_tokens": number}`."""

    kind: Literal["jsonl"]
    chat_template: bool = Field(
        default=True, description="Wrap each prompt in the model's chat template, as `vllm bench` does."
    )
    max_total_tokens: int | None = Field(
        default=None, ge=2, description="Entries whose prompt and output are longer together are passed over."
    )


class Trace(_Workload):
    """A recorded trace with its own arrival times."""

    kind: Literal["trace"]
    path: Path = Field(description="The file, relative to the study file.")
    format: Literal["mooncake", "azure"] | None = Field(
        default=None,
        description="`mooncake`: JSON lines with timestamp (ms), input_length, output_length, hash_ids. `azure`: CSV "
        "with TIMESTAMP, ContextTokens, GeneratedTokens. Left out: .jsonl is mooncake, .csv is azure.",
    )
    time_scale: Rate = Field(
        default=1.0, description="Arrival times are multiplied by it: 0.5 plays the trace twice as fast."
    )
    limit: int | None = Field(default=None, ge=1, description="Only the first so many usable lines. Left out: all.")
    max_total_tokens: int | None = Field(
        default=None, ge=2, description="Requests with more prompt and output tokens together are passed over."
    )


WorkloadSpec = Annotated[LongDocuments | SharedPrefix | ShareGpt | Jsonl | Trace, Field(discriminator="kind")]
"""The `workload:` section."""
