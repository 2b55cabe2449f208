"""`EngineConfig`: what one trial starts. Frozen, hashable by a stable key, comparable argument by argument."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Engine arguments (vLLM's own names) and environment variables of one engine start.

    Values are what YAML and JSON can say: numbers, strings, booleans, lists, mappings and null.
    """

    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def key(self) -> str:
        """16 hex digits that are equal for equal configurations, whatever the order of their keys."""
        text = json.dumps({"args": dict(self.args), "env": dict(self.env)}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def with_args(self, changes: Mapping[str, Any]) -> EngineConfig:
        """Return a copy with these arguments set; `env.NAME` keys set environment variables."""
        args = {**self.args, **{k: v for k, v in changes.items() if not k.startswith("env.")}}
        env = {**self.env, **{k.removeprefix("env."): str(v) for k, v in changes.items() if k.startswith("env.")}}
        return EngineConfig(args=args, env=env)

    def difference(self, other: EngineConfig) -> dict[str, tuple[Any, Any]]:
        """Arguments and `env.` variables that differ: name -> (mine, theirs), `None` where one does not set it."""
        mine = {**self.args, **{f"env.{k}": v for k, v in self.env.items()}}
        theirs = {**other.args, **{f"env.{k}": v for k, v in other.env.items()}}
        names = sorted(mine.keys() | theirs.keys())
        return {n: (mine.get(n), theirs.get(n)) for n in names if mine.get(n) != theirs.get(n)}
