"""Whether the machine drifts and engines beside each other disturb, by repeated measurements of the reference.

Both compare with the noise floor, which the first measurements of the reference give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from objectives.speed import drifts, noise_floor
from tuner.ledger import History, StudyNote, TrialRecord, TrialState

INTERFERENCE = "interference"
"""Code of the note that says that engines on one machine disturb each other."""


def drift_note(history: History, objectives: Sequence[str], aa_runs: int, at: float) -> StudyNote | None:
    """Compare the latest measurement of the reference with the first: beyond the floor, the machine drifted.

    Measurements beside a busy neighbour are compared with each other, as are those without.
    """
    series = _reference_series(history)
    floors = _floors(series, objectives, aa_runs)
    if not series or not floors:
        return None
    alike = [t for t in series if bool(t.neighbours) == bool(series[-1].neighbours)]
    if len(alike) < 2 or (not alike[-1].neighbours and len(alike) <= 1 + aa_runs):
        return None
    for drift in drifts([_values(t) for t in alike], floors):
        if drift.index == len(alike) - 1:
            since, until = alike[-2].number, alike[-1].number
            return StudyNote(
                "drift",
                f"trial {until} measured the reference again: {drift.metric} changed by {drift.relative_change:+.0%} "
                f"since the study began, more than the noise floor of {drift.floor:.0%}; trials after {since} are in "
                "doubt",
                at,
                {"since": since, "until": until},
            )
    return None


def interference_note(history: History, objectives: Sequence[str], aa_runs: int, at: float) -> StudyNote | None:
    """Compare the first measurement of the reference beside a busy neighbour with those alone, once a study."""
    if any(note.code == INTERFERENCE for note in history.notes):
        return None
    series = _reference_series(history)
    floors = _floors(series, objectives, aa_runs)
    beside = [t for t in series if t.neighbours]
    if not beside or not floors:
        return None
    alone = next(t for t in series if not t.neighbours)
    found = drifts([_values(alone), _values(beside[0])], floors)
    if not found:
        return None
    worst = max(found, key=lambda drift: abs(drift.relative_change) / max(drift.floor, 1e-9))
    return StudyNote(
        INTERFERENCE,
        f"engines beside each other disturb: {worst.metric} of the reference changed by {worst.relative_change:+.0%} "
        f"beside a busy neighbour (trial {beside[0].number}), more than the noise floor of {worst.floor:.0%}; the "
        "front's members are measured again alone at the end",
        at,
        {"trial": beside[0].number, "relative_change": worst.relative_change, "floor": worst.floor},
    )


def beside_was_measured(history: History) -> bool:
    """Whether the reference was measured beside a busy neighbour already."""
    return any(t.neighbours for t in _reference_series(history))


def _reference_series(history: History) -> list[TrialRecord]:
    """Good measurements of the reference, the first first."""
    return [
        t
        for t in history.finished
        if t.source in ("reference", "sentinel") and t.score is not None and t.state is TrialState.COMPLETE
    ]


def _floors(series: Sequence[TrialRecord], objectives: Sequence[str], aa_runs: int) -> dict[str, float]:
    """Noise floor of each objective, from the reference and its first repetitions, which were alone."""
    runs = [_values(t) for t in series if not t.neighbours][: 1 + aa_runs]
    if len(runs) < 2:
        return {}
    floors = noise_floor(runs)
    return {name: floors[name] for name in objectives if name in floors}


def _values(record: TrialRecord) -> Mapping[str, float]:
    return record.score.values if record.score is not None else {}
