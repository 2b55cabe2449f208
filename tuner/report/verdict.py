"""What a study found, in sentences: better than the defaults or not, what it trades, how far it can be trusted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.ledger import TrialRecord, TrialState
from tuner.report.table import Cell, Row, trial_row
from tuner.report.words import count, digits, interval, label, param_text, percent, quantity
from tuner.view import StudyView, hypervolume_series


@dataclass(frozen=True, slots=True)
class TradeOff:
    """One configuration worth deploying: what it is good for, and what it costs."""

    title: str
    row: Row
    sentence: str
    changed: str
    pick: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A study in sentences.

    Parameters
    ----------
    headline:
        The answer to "is there something better than the defaults?".
    trade_offs:
        The knee, then the best of each objective, each configuration once.
    verification:
        What measuring the pick again, interleaved with the defaults, said; `None` if nobody did.
    deploy:
        Commands that bring the pick to production.
    trust:
        What a reader should know before believing the numbers.
    """

    headline: str
    trade_offs: tuple[TradeOff, ...]
    verification: str | None
    deploy: tuple[str, ...]
    trust: tuple[str, ...]


def verdict(study: StudyView) -> Verdict:
    """Say what the study found."""
    trade_offs = _trade_offs(study)
    return Verdict(
        headline=_headline(study, trade_offs),
        trade_offs=trade_offs,
        verification=_verification(study),
        deploy=_deploy(study),
        trust=tuple(_trust(study)),
    )


def gains(study: StudyView, number: int) -> bool:
    """Whether a trial is better than the reference in anything by more than the noise; true where there is none."""
    row = trial_row(study, number)
    if row is None or row.reference:
        return False
    return study.reference is None or any(cell.better for cell in row.cells)


def failures_by_kind(study: StudyView) -> list[tuple[str, str, int, TrialRecord]]:
    """Kind, stage, how often, and the latest example of each way to fail, most frequent first."""
    ended = [t for t in study.trials if t.state is not TrialState.CENSORED]
    failed = [(t.failure.kind.value, t.failure.stage.value, t) for t in ended if t.failure]
    latest = {(kind, stage): trial for kind, stage, trial in failed}
    counts = Counter((kind, stage) for kind, stage, _ in failed)
    return [(kind, stage, number, latest[kind, stage]) for (kind, stage), number in counts.most_common()]


def outcome_counts(study: StudyView) -> dict[str, int]:
    """Trials by what became of them, those that the gate refused apart from those that an engine was started for."""
    counts = Counter(
        "refused by the gate" if t.failure and t.failure.stage.value == "gate" else t.state.value for t in study.trials
    )
    return dict(counts.most_common())


def change_text(cell: Cell) -> str:
    """One objective against the reference: `1.20 s (1.13–1.28 s), −31%`."""
    ends = f" ({interval(*cell.interval, cell.objective.unit)})" if cell.interval else ""
    value = f"{quantity(cell.value, cell.objective.unit)}{ends}"
    if cell.change is None:
        return value
    return f"{value}, {percent(cell.change)}{'' if cell.better is not None else ' (within noise)'}"


def _trade_offs(study: StudyView) -> tuple[TradeOff, ...]:
    if study.knee is None:
        return ()
    picks = [("Best trade-off (knee)", study.knee, "knee")]
    for objective in study.objectives:
        best = min if objective.direction == "minimize" else max
        number = best(study.front, key=lambda n: study.results[n].values[objective.name])
        word = "Lowest" if objective.direction == "minimize" else "Highest"
        picks.append((f"{word} {label(objective.name)}", number, f"trial:{number}"))
    found: dict[int, TradeOff] = {}
    for title, number, pick in picks:
        row = trial_row(study, number)
        if number in found:
            known = found[number]
            found[number] = TradeOff(
                f"{known.title}; {title[0].lower()}{title[1:]}", known.row, known.sentence, known.changed, known.pick
            )
        elif row is not None:
            found[number] = TradeOff(title, row, _sentence(row), _changed(row), pick)
    return tuple(found.values())


def _sentence(row: Row) -> str:
    parts = [f"{label(c.objective.name)} {change_text(c)}" for c in row.cells]
    return "; ".join(parts) + "."


def _changed(row: Row) -> str:
    if row.reference or not row.changed:
        return "vLLM's defaults"
    return ", ".join(param_text(name, value) for name, value in row.changed.items())


def _headline(study: StudyView, trade_offs: Sequence[TradeOff]) -> str:
    said = "Predicted, not measured: " if study.predicted else ""
    if not study.results:
        return "No configuration has been measured yet." if study.finished_count < 1 else _nothing_works(study)
    if study.reference is None or study.reference.score is None:
        front = count(len(study.front), "configuration")
        return f"{said}{front} on the front; the defaults have no measurement to compare with."
    rows = [row for n in study.front if (row := trial_row(study, n)) is not None and not row.reference]
    sentences = []
    free = [r for r in rows if any(c.better for c in r.cells) and not any(c.better is False for c in r.cells)]
    if free:
        best = max(free, key=_total_gain)
        sentences.append(f"Better than the defaults at no cost beyond noise: trial {best.number} has {_gains(best)}.")
    trading = [t.row for t in trade_offs if any(c.better for c in t.row.cells) and t.row not in free]
    if trading:
        name = f"the knee (trial {trading[0].number})" if trading[0].knee else f"trial {trading[0].number}"
        losses = " and ".join(_change(c) for c in trading[0].cells if c.better is False)
        sentences.append(f"A trade: {name} has {_gains(trading[0])}, for {losses}.")
    return said + (" ".join(sentences) or "Nothing was found that differs from the defaults by more than the noise.")


def _total_gain(row: Row) -> float:
    """Sum of the logarithms of all gains: positive where the better changes outweigh the worse, by their factors."""
    return sum(
        math.log1p(cell.change) * (-1.0 if cell.objective.direction == "minimize" else 1.0)
        for cell in row.cells
        if cell.change is not None and cell.change > -1.0
    )


def _gains(row: Row) -> str:
    return " and ".join(_change(c) for c in row.cells if c.better)


def _change(cell: Cell) -> str:
    word = "less" if (cell.change or 0.0) < 0 else "more"
    return f"{abs(cell.change or 0.0) * 100:.0f}% {word} {label(cell.objective.name)}"


def _nothing_works(study: StudyView) -> str:
    kinds = failures_by_kind(study)
    why = f"; most frequent: {kinds[0][0]} at {kinds[0][1]} ({kinds[0][2]} times)" if kinds else ""
    return f"None of {count(study.finished_count, 'trial')} is complete{why}."


def _verification(study: StudyView) -> str | None:
    if not study.verifications:
        return None
    last = study.verifications[-1]
    parts = [
        f"{label(name)} {percent(change)} ({percent(last.interval[name][0])} to {percent(last.interval[name][1])}): "
        f"{last.verdict[name]}"
        for name, change in last.change.items()
    ]
    how = "over HTTP" if last.over_http else "in process"
    rounds = count(last.rounds, "round")
    text = f"Trial {last.number} measured again against the defaults in {rounds} {how}: {'; '.join(parts)}."
    served = [
        f"{label(a.name)} {percent(a.change)} ({'within' if a.within_noise else 'beyond'} the noise)"
        for a in last.agreement
    ]
    return f"{text} As it is served, against the study in process: {'; '.join(served)}." if served else text


def _deploy(study: StudyView) -> tuple[str, ...]:
    if study.knee is None or study.predicted:
        return ()
    return (
        f"tuner verify {study.study} --pick knee",
        f"tuner export {study.study} --pick knee --format vllm -o deploy",
    )


def _trust(study: StudyView) -> list[str]:
    sentences = ["Everything here was predicted by the twin; nothing was measured."] if study.predicted else []
    states = Counter(t.state for t in study.trials)
    sentences.append("Trials: " + ", ".join(f"{n} {name}" for name, n in outcome_counts(study).items()) + ".")
    if study.noise:
        floors = ", ".join(f"{label(name)} {floor * 100:.1f}%" for name, floor in study.noise.items())
        sentences.append(f"Two measurements of one configuration differ by up to (noise floor, 95%): {floors}.")
        if pairs := study.same_within_noise:
            named = ", ".join(f"{a} and {b}" for a, b in pairs)
            sentences.append(f"On the front, trials {named} are the same as far as this noise can tell.")
    elif study.results:
        sentences.append("No configuration was measured twice, so the noise between engine starts is unknown.")
    if states[TrialState.VOID]:
        codes = Counter(r.code for t in study.trials if t.score for r in t.score.void)
        sentences.append(f"Void, hence not compared: {', '.join(f'{code} ({n})' for code, n in codes.most_common())}.")
    if indices := [t.score.values["speed_index"] for t in study.trials if t.score and "speed_index" in t.score.values]:
        sentences.append(
            f"While the study ran, the machine's speed index (1 is the reference's, more is slower) went from "
            f"{min(indices):.2f} to {max(indices):.2f}."
        )
    if in_doubt := sorted(study.in_doubt):
        sentences.append(
            f"In doubt, because the machine drifted while they ran: trials {', '.join(map(str, in_doubt))}."
        )
    if study.hypervolume is not None and len(series := hypervolume_series(study)) > 1:
        last_gain = max((i for i in range(1, len(series)) if series[i][1] > series[i - 1][1]), default=0)
        sentences.append(
            f"Hypervolume {digits(study.hypervolume)} (the defaults alone are 1); the front last moved "
            f"{count(len(series) - 1 - last_gain, 'measured trial')} before the end."
        )
    sentences += [note.text for note in study.notes]
    return sentences
