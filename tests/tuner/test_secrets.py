from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.secrets import MASKED, is_secret, mask, mask_tree, secret_values
from tuner.space import engine_argument_names


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "PGPASSWORD", "api_key", "AWS_SECRET_ACCESS_KEY", "dbPassword", "GOOGLE_CREDENTIALS", "apiKey", "key"],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_num_batched_tokens",
        "long_prefill_token_threshold",
        "dbo_decode_token_threshold",
        "tokenizer",
        "TOKENIZERS_PARALLELISM",
        "monkey",
        "kv_tokens",
        "keyword",
    ],
)
def test_names_that_only_look_like_it_are_not(name: str) -> None:
    assert not is_secret(name)


def test_no_engine_argument_but_the_token_of_the_hub_counts_as_a_secret() -> None:
    assert [name for name in sorted(engine_argument_names()) if is_secret(name)] == ["hf_token"]


def test_the_value_of_a_secret_variable_is_masked_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cr3t-value")
    assert mask("GET /x?k=s3cr3t-value failed") == f"GET /x?k={MASKED} failed"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("postgresql://tuner:hunter22@db:5432/mlflow", "hunter22"),
        ("Authorization: Bearer abc.def-123456", "abc.def-123456"),
        ("token hf_abcdefghijklmnopqrstuvwx used", "hf_abcdefghijklmnopqrstuvwx"),
        ("env HF_TOKEN=abcdef99 vllm serve", "abcdef99"),
        ('{"api_key": "abcdef99"}', "abcdef99"),
    ],
)
def test_secrets_are_known_by_their_shape(text: str, secret: str) -> None:
    masked = mask(text, ())
    assert secret not in masked
    assert MASKED in masked


@pytest.mark.parametrize(
    "text", ["max_num_batched_tokens=8192", "https://host/path", "key=1234567", "a: b", "", "KeyError: 'model.layers'"]
)
def test_harmless_text_is_left_alone(text: str) -> None:
    assert mask(text, ()) == text


def test_a_document_is_masked_by_its_keys_and_by_values_seen_elsewhere() -> None:
    values = secret_values({"HF_TOKEN": "abcdef99"})
    document = {"env": {"HF_TOKEN": "abcdef99"}, "args": ["--x", "abcdef99"], "max_tokens": 5, "password": ""}
    assert mask_tree(document, values) == {
        "env": {"HF_TOKEN": MASKED},
        "args": ["--x", MASKED],
        "max_tokens": 5,
        "password": "",
    }


@given(st.text(min_size=6), st.text(), st.text())
def test_no_known_secret_survives(secret: str, before: str, after: str) -> None:
    if secret not in MASKED * 3:
        assert secret not in json.dumps(mask_tree({"a": [before + secret + after]}, (secret,)), ensure_ascii=False)
