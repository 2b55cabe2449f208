"""A folder of the user's documents, as texts and as tokens cut to exact lengths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tuner.errors import WorkloadError
from tuner.workload.source import Passage, SkippedLine, Source, is_text, json_objects, none_usable, unreadable
from tuner.workload.streams import Ids, Stream
from tuner.workload.tokenizer import Tokenizer

SUFFIXES = (".txt", ".md", ".jsonl")


@dataclass(frozen=True, slots=True)
class Document:
    """One text and the place it comes from."""

    path: str
    line: int
    text: str


def document_files(folder: Path) -> list[Path]:
    """Files of the folder and its subfolders that hold documents, in an order that every file system agrees on.

    Raises
    ------
    WorkloadError
        If there is no such folder, or no such file in it.
    """
    if not folder.is_dir():
        raise WorkloadError(
            f"{folder}: no such folder; set workload.documents to a folder with .txt, .md or .jsonl files"
        )
    files = [path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()]
    if not files:
        raise WorkloadError(
            f"{folder}: holds no .txt, .md or .jsonl file; set workload.documents to a folder that does"
        )
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def read(files: list[Path]) -> tuple[list[Document], list[SkippedLine]]:
    """Read every document: a .txt or .md file is one, a line of a .jsonl file with a `text` field is one."""
    documents: list[Document] = []
    skipped: list[SkippedLine] = []
    for path in files:
        if path.suffix.lower() == ".jsonl":
            documents += _from_lines(path, skipped)
        else:
            documents += _from_file(path, skipped)
    return documents, skipped


def _from_lines(path: Path, skipped: list[SkippedLine]) -> list[Document]:
    documents = []
    for number, value in json_objects(path, skipped):
        text = value.get("text")
        if is_text(text) and text.strip():
            documents.append(Document(str(path), number, text))
        else:
            skipped.append(SkippedLine(str(path), number, "no `text` field with text in it"))
    return documents


def _from_file(path: Path, skipped: list[SkippedLine]) -> list[Document]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        skipped.append(SkippedLine(str(path), content.count(b"\n", 0, error.start) + 1, "not UTF-8: file left out"))
        return []
    if not text.strip():
        skipped.append(SkippedLine(str(path), 1, "empty file"))
        return []
    return [Document(str(path), 1, text)]


def load(folder: Path, files: list[Path], wanted_tokens: int, tokenizer: Tokenizer, order: Stream) -> Source:
    """Tokenise documents, in random order, until they hold `wanted_tokens` or none is left.

    Raises
    ------
    WorkloadError
        If no document of the folder can be used.
    """
    documents, skipped = read(files)
    passages: list[Passage] = []
    held = 0
    for i in order.order(len(documents)):
        if held >= wanted_tokens:
            break
        ids = np.array(tokenizer.encode(documents[i].text), dtype=np.uint32)
        if len(ids):
            passages.append(Passage(ids))
            held += len(ids)
        else:
            skipped.append(SkippedLine(documents[i].path, documents[i].line, "no token comes out of it"))
    if not passages:
        raise none_usable(folder, skipped, "documents with text in them")
    return Source(tuple(passages), tuple(skipped))


def cut(source: Source, lengths: list[int]) -> list[Ids]:
    """Cut the documents, laid end to end, into pieces of exactly these lengths, one after the other.

    Where the text ends it begins again, so pieces can repeat; `prompts.with_distinct_heads` tells them apart.
    """
    corpus = np.concatenate([passage.ids for passage in source.passages])
    pieces = []
    start = 0
    for length in lengths:
        pieces.append(np.take(corpus, np.arange(start, start + length), mode="wrap"))
        start = (start + length) % len(corpus)
    return pieces
