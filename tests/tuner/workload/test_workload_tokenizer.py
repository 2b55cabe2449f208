from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.errors import WorkloadError
from tuner.workload.tokenizer import TransformersTokenizer, load, vocabulary_of

TEMPLATE = "{% for m in messages %}<user> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<end>{% endif %}"


@dataclass
class Ids:
    vocab_size: int
    special_ids: Collection[int]
    identity: str = "ids"

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        return []

    def encode_chat(self, message: str) -> list[int]:
        return []


@given(st.integers(2, 200), st.sets(st.integers(-5, 220), max_size=20))
def test_the_vocabulary_is_the_longest_run_without_a_special_id(size: int, special: set[int]) -> None:
    runs = "".join("x" if i in special else "." for i in range(size)).split("x")
    longest = max(map(len, runs))

    if longest < 2:
        with pytest.raises(WorkloadError):
            vocabulary_of(Ids(size, special))
        return
    low, high = vocabulary_of(Ids(size, special))

    assert high - low == longest
    assert low >= 0
    assert high <= size
    assert not special & set(range(low, high))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<bos>", "<end>", "<user>", *(f"w{i}" for i in range(20)), "<pad>"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<bos>",
        eos_token="<end>",
        pad_token="<pad>",
        additional_special_tokens=["<user>"],
        chat_template=TEMPLATE,
    )
    path = tmp_path_factory.mktemp("model")
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> TransformersTokenizer:
    return load(str(folder))


def test_a_saved_tokenizer_encodes_with_and_without_markers(loaded: TransformersTokenizer) -> None:
    assert loaded.encode("w1 w2") == [4, 5]
    assert loaded.encode("w1 w2", special_tokens=True) == [0, 4, 5]


def test_a_chat_message_is_wrapped_once_and_gets_no_second_bos(loaded: TransformersTokenizer) -> None:
    assert loaded.encode_chat("w1 w2") == [2, 4, 5, 1]


def test_its_vocabulary_leaves_out_every_special_token(loaded: TransformersTokenizer) -> None:
    assert loaded.vocab_size == 24
    assert set(loaded.special_ids) == {0, 1, 2, 23}
    assert vocabulary_of(loaded) == (3, 23)


def test_the_identity_is_the_content_not_the_place(folder: Path, loaded: TransformersTokenizer, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    same = load(str(tmp_path)).identity
    tokens = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(tokens.replace('"w19"', '"v19"'))

    assert same == loaded.identity
    assert load(str(tmp_path)).identity != loaded.identity


def test_a_model_without_a_chat_template_says_what_to_set(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')

    with pytest.raises(WorkloadError, match="chat_template to false"):
        load(str(tmp_path)).encode_chat("w1")


def test_a_folder_without_a_tokenizer_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=str(tmp_path)):
        load(str(tmp_path))
