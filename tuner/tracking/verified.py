"""What the verifications of a trial look like in its run: metrics, tags and one file. Pure functions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import TypeAdapter

from tuner.ledger import Verification
from tuner.tracking.content import Point, finite, metric_key
from tuner.view import StudyView

_VERIFICATIONS = TypeAdapter(tuple[Verification, ...])


@dataclass(frozen=True, slots=True)
class VerificationContent:
    """Everything that verifying a trial adds to its run; the tags say which of it is there."""

    metrics: tuple[Point, ...]
    tags: Mapping[str, str]
    file: str
    text: str


def verification_content(study: StudyView, number: int) -> VerificationContent:
    """Describe every verification of a trial that has at least one: the metrics' steps count them from 0."""
    done = tuple(v for v in study.verifications if v.number == number)
    data = _VERIFICATIONS.dump_json(done)
    tags = {
        "verification": verdict_text(done[-1]),
        "verification.revision": hashlib.sha256(data).hexdigest()[:16],
    }
    metrics = (point for step, verification in enumerate(done) for point in _points(verification, step))
    return VerificationContent(finite(metrics), tags, "verify.json", json.dumps(json.loads(data), indent=1) + "\n")


def verdict_text(verification: Verification) -> str:
    """One line for a tag: `ttft_p95_s better, tpot_p95_s no difference (5 rounds over HTTP)`."""
    said = ", ".join(f"{name} {verdict}" for name, verdict in verification.verdict.items())
    how = "over HTTP" if verification.over_http else "in process"
    return f"{said} ({verification.rounds} rounds {how})"


def _points(verification: Verification, step: int) -> Iterator[Point]:
    values = {"verify.rounds": float(verification.rounds)}
    for name, change in verification.change.items():
        low, high = verification.interval[name]
        values |= {f"verify.{name}.change": change, f"verify.{name}.low": low, f"verify.{name}.high": high}
    values |= {f"verify.{a.name}.served_change": a.change for a in verification.agreement}
    at_ms = round(verification.finished_at * 1000)
    return (Point(metric_key(name), value, at_ms, step) for name, value in values.items())
