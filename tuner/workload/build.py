"""From the `workload:` section to the frozen requests: a pure function of the section, its files and one seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tuner.errors import WorkloadError
from tuner.workload import documents, jsonl, sharegpt, trace
from tuner.workload.arrivals import Arrival, arrivals
from tuner.workload.cache import cached, content_key
from tuner.workload.lengths import exact_lengths, output_lengths
from tuner.workload.model import Request, Workload
from tuner.workload.prompts import HEAD_TOKENS, as_tuples, rekeyed, shared_tokens, with_distinct_heads
from tuner.workload.source import SkippedLine, Source
from tuner.workload.spec import ArrivalsSpec, Jsonl, LongDocuments, SharedPrefix, ShareGpt, Trace, WorkloadSpec
from tuner.workload.streams import Ids, stream
from tuner.workload.tokenizer import Tokenizer

Vocabulary = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BuiltWorkload:
    """A workload, and the lines of its source that it does not use."""

    workload: Workload
    skipped: tuple[SkippedLine, ...] = ()


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Prompts in order of arrival, with what each shares on purpose and how much it generates."""

    ids: Sequence[Ids]
    shared: Sequence[int]
    outputs: Sequence[int]
    skipped: tuple[SkippedLine, ...] = ()


@dataclass(frozen=True, slots=True)
class _Place:
    """What a build needs beside the section itself."""

    tokenizer: Tokenizer | None
    vocabulary: Vocabulary
    base_folder: Path
    cache_folder: Path | None

    def model_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise WorkloadError("this workload holds text, which needs the model's tokenizer, and there is none")
        return self.tokenizer


def build(
    spec: WorkloadSpec,
    *,
    tokenizer: Tokenizer | None,
    vocabulary: Vocabulary,
    base_folder: Path,
    cache_folder: Path | None = None,
) -> BuiltWorkload:
    """Make the workload of a section.

    Parameters
    ----------
    tokenizer:
        The model's; may be `None` unless `spec.needs_tokenizer`.
    vocabulary:
        Token ids that random prompts may use, half-open; see `tokenizer.vocabulary_of`.
    base_folder:
        Folder that relative paths of the section start from: the study file's.
    cache_folder:
        Where tokenised text is kept between runs; `None` keeps nothing.

    Raises
    ------
    WorkloadError
        If a source cannot be read or holds nothing usable, or the vocabulary is too small.
    StoreError
        If the cache cannot be written.
    """
    if vocabulary[0] < 0 or vocabulary[1] - vocabulary[0] < 2:
        raise WorkloadError(f"the vocabulary {vocabulary} holds fewer than two token ids; give the model's own")
    place = _Place(tokenizer, vocabulary, base_folder, cache_folder)
    if isinstance(spec, Trace):
        return _trace(spec, place)
    if isinstance(spec, LongDocuments):
        prompts = _long_documents(spec, place)
    elif isinstance(spec, SharedPrefix):
        prompts = _shared_prefix(spec, place)
    else:
        prompts = _prompt_file(spec, place)
    times = _arrivals(spec.arrivals, len(prompts.ids), spec.seed)
    return _frozen(spec, place, prompts, times, keeps_text=spec.needs_tokenizer)


def _arrivals(spec: ArrivalsSpec, count: int, seed: int) -> list[Arrival]:
    return arrivals(spec, count, stream("arrivals", seed))


def _frozen(
    spec: WorkloadSpec, place: _Place, prompts: _Prompts, times: Sequence[Arrival], *, keeps_text: bool
) -> BuiltWorkload:
    requests = tuple(
        Request(
            arrival_s=time.arrival_s,
            prompt_token_ids=ids,
            output_tokens=output,
            shared_tokens=shared,
            user=time.user,
            think_s=time.think_s,
        )
        for ids, shared, output, time in zip(
            as_tuples(prompts.ids), prompts.shared, prompts.outputs, times, strict=True
        )
    )
    workload = Workload(
        name=spec.kind,
        requests=requests,
        vocabulary=place.vocabulary,
        seed=spec.seed,
        max_concurrency=spec.max_concurrency,
        keeps_text=keeps_text,
    )
    return BuiltWorkload(workload, prompts.skipped)


def _long_documents(spec: LongDocuments, place: _Place) -> _Prompts:
    lengths = exact_lengths(spec.prompt_tokens, spec.count, stream("prompt lengths", spec.seed))
    pieces, skipped = _pieces(spec, lengths, place)
    return _Prompts(
        ids=with_distinct_heads(pieces, spec.seed, place.vocabulary),
        shared=[0] * spec.count,
        outputs=output_lengths(spec.output_tokens, spec.count, stream("output lengths", spec.seed)),
        skipped=skipped,
    )


def _shared_prefix(spec: SharedPrefix, place: _Place) -> _Prompts:
    prefix_lengths = exact_lengths(spec.prefix_tokens, spec.prefixes, stream("prefix lengths", spec.seed))
    question_lengths = exact_lengths(spec.question_tokens, spec.requests, stream("question lengths", spec.seed))
    pieces, skipped = _pieces(spec, prefix_lengths + question_lengths, place)
    pieces = with_distinct_heads(pieces, spec.seed, place.vocabulary)
    prefixes, questions = pieces[: spec.prefixes], pieces[spec.prefixes :]
    chosen = [i % spec.prefixes for i in stream("prefix of request", spec.seed).order(spec.requests)]
    return _Prompts(
        ids=[np.concatenate([prefixes[i], question]) for i, question in zip(chosen, questions, strict=True)],
        shared=[prefix_lengths[i] for i in chosen],
        outputs=output_lengths(spec.output_tokens, spec.requests, stream("output lengths", spec.seed)),
        skipped=skipped,
    )


def _pieces(
    spec: LongDocuments | SharedPrefix, lengths: list[int], place: _Place
) -> tuple[list[Ids], tuple[SkippedLine, ...]]:
    """Token ids of exactly these lengths: random, or cut from the user's documents."""
    if spec.documents is None:
        return [stream("ids", spec.seed, i).ids(n, place.vocabulary) for i, n in enumerate(lengths)], ()
    folder, tokenizer, wanted = place.base_folder / spec.documents, place.model_tokenizer(), sum(lengths)
    files = documents.document_files(folder)
    source = cached(
        place.cache_folder,
        content_key(files, "documents", tokenizer.identity, spec.seed, wanted),
        lambda: documents.load(folder, files, wanted, tokenizer, stream("document order", spec.seed)),
    )
    return documents.cut(source, lengths), source.skipped


def _prompt_file(spec: ShareGpt | Jsonl, place: _Place) -> _Prompts:
    source = _tokenised(spec, place)
    passages = source.passages
    count = spec.requests or len(passages)
    ids = [_copy(passages[i % len(passages)].ids, i // len(passages), spec.seed, place) for i in range(count)]
    if spec.output_tokens is None:
        recorded = [passage.output_tokens for passage in passages if passage.output_tokens is not None]
        outputs = [recorded[i % len(recorded)] for i in range(count)]
    else:
        outputs = output_lengths(spec.output_tokens, count, stream("output lengths", spec.seed))
    return _Prompts(ids, shared_tokens(ids), outputs, source.skipped)


def _tokenised(spec: ShareGpt | Jsonl, place: _Place) -> Source:
    path, tokenizer = place.base_folder / spec.path, place.model_tokenizer()
    order = stream("entry order", spec.seed)
    options = spec.model_dump_json(exclude={"path", "arrivals", "max_concurrency"})

    def load() -> Source:
        if isinstance(spec, ShareGpt):
            return sharegpt.load(spec, path, tokenizer, order)
        return jsonl.load(spec, path, tokenizer, order)

    return cached(place.cache_folder, content_key([path], tokenizer.identity, options), load)


def _copy(ids: Ids, number: int, seed: int, place: _Place) -> Ids:
    """Return the prompt itself (number 0), or a copy whose first tokens are those of this copy of the file."""
    if number == 0:
        return ids
    low, high = place.vocabulary
    pad = stream("copy", seed, number).ids(len(ids), (0, high - low))
    return rekeyed(ids, pad, place.vocabulary, HEAD_TOKENS)


def _trace(spec: Trace, place: _Place) -> BuiltWorkload:
    lines, skipped = trace.read(spec, place.base_folder / spec.path)
    ids = trace.prompts(lines, spec.seed, place.vocabulary)
    prompts = _Prompts(ids, shared_tokens(ids), [line.output_tokens for line in lines], tuple(skipped))
    times = [Arrival(time) for time in trace.arrival_times(lines, spec.time_scale)]
    return _frozen(spec, place, prompts, times, keeps_text=False)
