from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from tuner.workload import spec
from tuner.workload.spec import LongDocuments, WorkloadSpec

ADAPTER: TypeAdapter[Any] = TypeAdapter(WorkloadSpec)
GOOD: dict[str, Any] = {
    "kind": "long_documents",
    "requests": 10,
    "prompt_tokens": 512,
    "output_tokens": 16,
    "arrivals": {"kind": "poisson", "rate_per_s": 1},
}


MODELS = [v for v in vars(spec).values() if isinstance(v, type) and issubclass(v, BaseModel) and v is not BaseModel]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_every_key_is_documented_and_unknown_keys_are_refused(model: type[BaseModel]) -> None:
    undocumented = [name for name, field in model.model_fields.items() if name != "kind" and not field.description]

    assert not undocumented
    assert model.model_config["extra"] == "forbid"
    assert model.__doc__ or model.__name__.startswith("_")


@pytest.mark.parametrize(
    "prompt_tokens", [512, 131_072, [512, 1024], {512: 3, 131_072: 1}, {"512": 0.25, "8192": 0.75}, (1, 2)]
)
def test_every_form_of_prompt_lengths_is_accepted(prompt_tokens: Any) -> None:
    assert ADAPTER.validate_python({**GOOD, "prompt_tokens": prompt_tokens}).count == 10


@pytest.mark.parametrize(
    "output_tokens",
    [
        1,
        {"uniform": {"low": 1, "high": 1}},
        {"lognormal": {"median": 100, "sigma": 0.5, "max": 400}},
        {"choices": {16: 3, 256: 1}},
    ],
)
def test_every_form_of_output_lengths_is_accepted_and_survives_json(output_tokens: Any) -> None:
    parsed = ADAPTER.validate_python({**GOOD, "output_tokens": output_tokens})

    assert ADAPTER.validate_json(ADAPTER.dump_json(parsed)) == parsed
    assert ADAPTER.validate_python(parsed) == parsed


@pytest.mark.parametrize(
    ("change", "where", "text"),
    [
        ({"colour": "red"}, "colour", "Extra inputs"),
        ({"kind": "long"}, "", "does not match any of the expected tags"),
        ({"prompt_tokens": 0}, "prompt_tokens", "greater than or equal to 1"),
        ({"prompt_tokens": []}, "prompt_tokens", "at least 1 item"),
        ({"prompt_tokens": {}}, "prompt_tokens", "at least 1 item"),
        ({"prompt_tokens": {512: 0}}, "", "every share is 0"),
        ({"prompt_tokens": {512: -1}}, "prompt_tokens", "greater than or equal to 0"),
        ({"output_tokens": {"normal": {}}}, "output_tokens", "valid integer"),
        ({"output_tokens": {"uniform": {"low": 9, "high": 3}}}, "uniform", "swap them"),
        ({"output_tokens": {"choices": {8: 0}}}, "choices", "every share is 0"),
        ({"output_tokens": {"lognormal": {"median": 9, "sigma": 0, "max": 9}}}, "sigma", "greater than 0"),
        ({"requests": None}, "", "set requests"),
        ({"requests": None, "prompt_tokens": {512: 0.5}}, "", "set requests"),
        ({"arrivals": {"kind": "poisson", "rate_per_s": 0}}, "rate_per_s", "greater than 0"),
        ({"arrivals": {"kind": "poisson", "rate_per_s": float("inf")}}, "rate_per_s", "finite"),
        ({"arrivals": {"kind": "poisson", "users": 3}}, "users", "Extra inputs"),
        ({"arrivals": {"kind": "closed_loop", "users": 0}}, "users", "greater than or equal to 1"),
        ({"max_concurrency": 0}, "max_concurrency", "greater than or equal to 1"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
    ],
)
def test_a_wrong_section_is_refused_at_its_key(change: dict[str, Any], where: str, text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ADAPTER.validate_python({**GOOD, **change})

    problems = caught.value.errors()
    assert len({problem["loc"] for problem in problems}) <= 2
    assert any(where in map(str, p["loc"]) or not where for p in problems)
    assert any(text in p["msg"] for p in problems)


def test_counts_of_lengths_are_summed_when_requests_are_left_out() -> None:
    section = ADAPTER.validate_python({**GOOD, "requests": None, "prompt_tokens": {512: 3, 8192: 4}})

    assert isinstance(section, LongDocuments)
    assert section.count == 7


@pytest.mark.parametrize(
    ("section", "needed"),
    [
        (GOOD, False),
        ({**GOOD, "documents": "docs"}, True),
        ({"kind": "jsonl", "path": "p.jsonl", "arrivals": GOOD["arrivals"]}, True),
        ({"kind": "trace", "path": "t.csv"}, False),
    ],
)
def test_only_text_needs_a_tokenizer(section: dict[str, Any], needed: bool) -> None:
    assert ADAPTER.validate_python(section).needs_tokenizer is needed
