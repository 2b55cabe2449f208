"""Deployment documents against published schemas, which lie in tests/data/schemas."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema

SCHEMAS = Path(__file__).parents[1] / "data" / "schemas"


def schema(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(gzip.decompress((SCHEMAS / f"{name}.json.gz").read_bytes()))
    return loaded


def validate(document: Any, name: str, draft: Any = jsonschema.Draft202012Validator) -> None:
    """Raises for a document that does not keep the schema; the schema itself is taken as it was published."""
    draft(schema(name)).validate(document)


def unknown_fields(value: Any, known: dict[str, Any], path: str = "") -> list[str]:
    """Paths of mappings' keys that the schema does not name, where it names any: what an API server would drop."""
    if isinstance(value, list):
        return [p for i, item in enumerate(value) for p in unknown_fields(item, known.get("items", {}), f"{path}[{i}]")]
    names = known.get("properties")
    if not isinstance(value, dict) or not names:
        return []
    unknown = [f"{path}.{key}" for key in value if key not in names]
    return unknown + [p for k, v in value.items() if k in names for p in unknown_fields(v, names[k], f"{path}.{k}")]
