"""How good is the memory model? Predicts every published start-up fact from its configuration alone and scores it.

Rows are divided by a hash of their id: constants of `tuner.memory_terms` may be fitted on one part, the other scores.

    python benchmarks/memory.py              the table
    python benchmarks/memory.py --rows       every row
    python benchmarks/memory.py --fit        constants refitted on the fit part, beside those in use
    python benchmarks/memory.py --markdown   the section for benchmarks/README.md

Exit status 1 when a target is missed on the rows kept for scoring.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from memory_facts import (
    MEMORY_FAILURES,
    Row,
    args_of,
    has_architecture,
    has_settings,
    is_fit_part,
    load_facts,
    predict_row,
)

from tuner.memory_model import MeasuredMemory, MemoryPrediction
from tuner.memory_terms import CONSTANTS, Constant

MEDIAN_TARGET_GIB = 0.15
TAIL_TARGET_GIB = 0.7
FAILED_TARGET = 0.9
BYTES_TARGET = 0.01


@dataclass(frozen=True)
class Score:
    """One line of the table: what, over how many rows, the result, and whether the target is met."""

    what: str
    target: str
    rows: int
    result: str
    met: bool


Predicted = tuple[Row, MemoryPrediction]


def predicted_rows(rows: Iterable[Row]) -> list[Predicted]:
    return [(row, predict_row(row)) for row in rows if has_architecture(row)]


def bytes_per_token_score(pairs: list[Predicted]) -> Score:
    pairs = [(row, p) for row, p in pairs if row.get("bytes_per_token_expected")]
    errors = [abs(p.kv_bytes_per_token / row["bytes_per_token_expected"] - 1) for row, p in pairs]
    worst = max(errors)
    return Score("KV bytes a token", "<= 1 %", len(errors), f"worst {worst:.2%}", worst <= BYTES_TARGET)


def pool_errors(pairs: list[Predicted]) -> list[float]:
    """Return absolute errors of the pool in GiB, on rows that state all settings."""
    return sorted(abs(p.kv_gib - row["kv_cache_gib"]) for row, p in pairs if has_settings(row))


def pool_score(pairs: list[Predicted], what: str = "KV pool from config.json alone") -> Score:
    errors = pool_errors(pairs)
    median, tail = statistics.median(errors), quantile(errors, 0.95)
    return Score(
        what,
        f"median <= {MEDIAN_TARGET_GIB}, 95 % <= {TAIL_TARGET_GIB} GiB",
        len(errors),
        f"median {median:.3f}, 95 % {tail:.2f}, worst {errors[-1]:.2f} GiB",
        median <= MEDIAN_TARGET_GIB and tail <= TAIL_TARGET_GIB,
    )


def interval_score(pairs: list[Predicted]) -> Score:
    rows = [(row, p) for row, p in pairs if has_settings(row)]
    inside = [p.intervals["kv_gib"][0] <= row["kv_cache_gib"] <= p.intervals["kv_gib"][1] for row, p in rows]
    return Score("KV pool inside its interval", "-", len(inside), f"{sum(inside)} of {len(inside)}", met=True)


def started_score(pairs: list[Predicted]) -> Score:
    rows = [(row, p) for row, p in pairs if row["outcome"] == "ok" and has_length(row)]
    refused = [row["id"] for row, p in rows if p.violation_interval[0] > 0]
    unfit = [row["id"] for row, p in rows if not p.fits]
    text = f"{len(refused)} refused, {len(unfit)} predicted not to fit"
    return Score("rows that started", "none refused", len(rows), text, not refused)


def failed_score(pairs: list[Predicted]) -> Score:
    rows = [(row, p) for row, p in pairs if row.get("failure_class") in MEMORY_FAILURES]
    refused = [row["id"] for row, p in rows if p.violation_interval[0] > 0]
    reached = [row["id"] for row, p in rows if p.violation_interval[1] >= 0]
    missed = sorted({row["id"] for row, _ in rows} - set(reached))
    text = f"{len(refused)} refused, {len(reached) - len(refused)} reach zero" + (
        f", missed {', '.join(missed)}" if missed else ""
    )
    met = not rows or len(reached) >= FAILED_TARGET * len(rows)
    return Score("rows that failed for memory", ">= 90 % refused or reaching 0", len(rows), text, met)


def doubtful_score(pairs: list[Predicted]) -> Score:
    rows = [p for row, p in pairs if row["outcome"] == "ok" and has_length(row)]
    doubtful = sum(p.violation_interval[1] >= 0 for p in rows)
    return Score("started rows whose interval reaches 0", "-", len(rows), f"{doubtful} of {len(rows)}", met=True)


def overhead_score(pairs: list[Predicted]) -> Score:
    rows = [
        (r, p) for r, p in pairs if r.get("activation_peak_gib") and r.get("max_num_seqs") and "rank 0" not in notes(r)
    ]
    errors = sorted(
        abs(p.activation_gib + p.non_torch_gib - r["activation_peak_gib"] - r["non_torch_gib"]) for r, p in rows
    )
    text = f"median {statistics.median(errors):.3f}, worst {errors[-1]:.2f} GiB"
    return Score("activation peak + non-torch", "-", len(errors), text, met=True)


def after_first_trial(rows: list[Row]) -> Score:
    """Score pools predicted with what one earlier row on the same model, device and version measured."""
    errors, first = [], {}
    for row in (row for row in rows if has_settings(row) and row.get("weights_gib")):
        key = (row["arch_key"], row["gpu"], row["vllm_version"], row["tp"], row["pp"], row.get("quantization"))
        if key not in first:
            graphs = row.get("cudagraph_estimate_gib")
            first[key] = MeasuredMemory(args_of(row), row["weights_gib"], row["kv_cache_gib"], graphs)
            continue
        errors.append(abs(predict_row(row, measured=first[key]).kv_gib - row["kv_cache_gib"]))
    errors.sort()
    median, tail = statistics.median(errors), quantile(errors, 0.95)
    text = f"median {median:.3f}, 95 % {tail:.2f}, worst {errors[-1]:.2f} GiB"
    return Score("KV pool after one measured trial", "-", len(errors), text, met=True)


def notes(row: Row) -> str:
    return row.get("notes") or ""


def has_length(row: Row) -> bool:
    """Whether the row states the length and share that decide whether it fits."""
    stated = row.get("max_model_len") is not None and row.get("gpu_memory_utilization") is not None
    return stated and not is_inferred(row)


def is_inferred(row: Row) -> bool:
    return any("gpu_memory_utilization(inferred" in field for field in row.get("derived_fields") or ())


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def all_scores(rows: list[Row]) -> list[Score]:
    pairs = [(row, p) for row, p in predicted_rows(rows) if not is_inferred(row)]
    scorers: list[Callable[[list[Predicted]], Score]] = [
        bytes_per_token_score,
        pool_score,
        interval_score,
        overhead_score,
        started_score,
        doubtful_score,
        failed_score,
    ]
    return [*(score(pairs) for score in scorers), after_first_trial([row for row, _ in pairs])]


def fitted(rows: list[Row]) -> dict[str, tuple[float, int]]:
    """Refit the constants that the facts determine: name -> (median over rows, rows)."""
    pairs = [(row, p) for row, p in predicted_rows(rows) if has_settings(row) or row.get("activation_peak_gib")]
    samples: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        samples.setdefault(name, []).append(value)

    for row, p in pairs:
        version = tuple(int(part) for part in row["vllm_version"].split(".")[:2] if part.isdigit())
        peak, outside = row.get("activation_peak_gib"), row.get("non_torch_gib")
        if peak and outside and row.get("max_num_seqs") and "rank 0" not in notes(row):
            add("torch_workspace_gib", CONSTANTS["torch_workspace_gib"].value + peak - p.activation_gib)
            base = "non_torch_large_gib" if version >= (0, 16) else "non_torch_large_old_gib"
            if row["tp"] == 1:
                add(base, outside)
            else:
                name = "collectives_nvlink_gib" if version >= (0, 16) else "collectives_gib"
                add(name, outside - CONSTANTS[base].value)
        elif outside and "rank 0" in notes(row):
            add("non_torch_stage_gib", outside)
        elif version >= (0, 22) and row.get("weights_gib") and row.get("kv_cache_gib"):
            graphs = row.get("cudagraph_estimate_gib") or 0.0
            budget = row["gpu_memory_utilization"] * row["gpu_total_gib"]
            add("non_torch_gib", budget - row["weights_gib"] - row["kv_cache_gib"] - graphs - p.activation_gib)
            fit_graphs(row, p, add)
    return {name: (statistics.median(values), len(values)) for name, values in samples.items()}


def fit_graphs(row: Row, p: MemoryPrediction, add: Callable[[str, float], None]) -> None:
    """Each row with captured graphs determines one constant: that of its kind of graph, the others being held."""
    estimate = row.get("cudagraph_estimate_gib")
    if not estimate or not p.graphs_gib:
        return
    args = args_of(row)
    flashinfer, full = args.get("attention_backend") == "FLASHINFER", args.get("optimization_level", 2) >= 2
    name = "piece_graph_mib"
    if full:
        wide = args["max_num_seqs"] > 512 and args["max_cudagraph_capture_size"] > 512
        name = (
            "full_graph_layer_mib"
            if not flashinfer
            else ("flashinfer_wide_graph_mib" if wide else "flashinfer_graph_mib")
        )
    scale = graph_scale(row, name)
    if scale:
        add(name, CONSTANTS[name].value + (estimate - p.graphs_gib) / scale)


def graph_scale(row: Row, name: str) -> float:
    """GiB of the prediction for one unit of a graph constant."""
    constant = CONSTANTS[name]
    before = predict_row(row).graphs_gib
    changed = Constant(constant.value + 1, constant.low, constant.high, constant.source)
    CONSTANTS[name] = changed
    try:
        return predict_row(row).graphs_gib - before
    finally:
        CONSTANTS[name] = constant


def print_scores(title: str, scores: list[Score]) -> None:
    print(f"\n{title}")
    for score in scores:
        mark = "ok  " if score.met else "MISS"
        print(f"  {mark} {score.what:<40} {score.target:<34} {score.rows:>4} rows   {score.result}")


def print_rows(rows: list[Row]) -> None:
    for row, p in predicted_rows(rows):
        error = f"{p.kv_gib - row['kv_cache_gib']:+.2f}" if row.get("kv_cache_gib") is not None else ""
        low, high = p.violation_interval
        part = "fit" if is_fit_part(row) else "score"
        print(
            f"{row['id']} {part:<5} {row['model'][:32]:<32} {row.get('vllm_version') or '?':<16}"
            f" tp{row['tp']} pp{row['pp']}"
            f" pool {p.kv_gib:7.2f} {error:>6}  violation {low:+.3f} {p.violation:+.3f} {high:+.3f}"
            f"  {row['outcome']} {row.get('failure_class') or ''}"
        )


def print_markdown(kept: list[Score], fit: list[Score]) -> None:
    print("| what | target | rows kept for scoring | result | fit part | |")
    print("|---|---|---|---|---|---|")
    for score, other in zip(kept, fit, strict=True):
        mark = "met" if score.met else "**missed**"
        mark = "" if score.target == "-" else mark
        print(f"| {score.what} | {score.target} | {score.rows} | {score.result} | {other.result} | {mark} |")


def main() -> int:
    parser = argparse.ArgumentParser(description="Score the memory model on published start-up facts.")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--fit", action="store_true", help="refit constants on the fit part and show them")
    parser.add_argument("--markdown", action="store_true", help="print the section for benchmarks/README.md")
    options = parser.parse_args()
    rows = load_facts()
    fit, kept = [row for row in rows if is_fit_part(row)], [row for row in rows if not is_fit_part(row)]
    if options.rows:
        print_rows(rows)
    if options.fit:
        for name, (value, count) in sorted(fitted(fit).items()):
            print(f"{name:<28} in use {CONSTANTS[name].value:8.3f}   fitted {value:8.3f}   {count} rows")
    kept_scores, fit_scores = all_scores(kept), all_scores(fit)
    if options.markdown:
        print_markdown(kept_scores, fit_scores)
    elif not options.fit:
        unknown = sum(not has_architecture(row) for row in rows)
        print(f"{len(rows)} facts, {unknown} of them without a known architecture or device total (not predictable)")
        print_scores("kept for scoring", kept_scores)
        print_scores("fit part", fit_scores)
    return 0 if all(score.met for score in kept_scores) else 1


if __name__ == "__main__":
    raise SystemExit(main())
