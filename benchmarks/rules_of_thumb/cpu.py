"""The table of the real CPU engine (benchmarks/data/cpu_table) as pairs that differ in one argument.

Only its quickstart workload: 20 documents of 256 to 3,500 tokens at 0.9 a second, more than two cores keep up with, so
its load is saturation. Times are divided by the speed of the machine when they were measured: the probe's prefill over
the median of those that were cut into as many pieces, since the grid was measured in random order. A configuration that
was measured more than once counts for the mean.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.cpu_table import DATA
from benchmarks.rules_of_thumb.a6000 import Point, point
from benchmarks.rules_of_thumb.model import Change, Outcome, Tried, ms, percent
from objectives.measurement import Measurement, SpeedProbe
from objectives.speed import mean_probe, noise_floor
from tuner.artifacts import load
from tuner.probe import PROBE_PROMPT_TOKENS

WHERE = "CPU engine"
ASSUMED_NOISE = 0.10
"""Of figures that were measured once: the largest spread of the speed probe in the first cases."""
DEFAULT_BLOCK = 128
"""vLLM 0.32's block size on the CPU."""
TTFT, TPOT = "ttft_p95_s", "tpot_p95_s"
TIMES = ("ttft_mean_s", "ttft_p95_s", "tpot_mean_s", "tpot_p95_s", "ttft_short_s", "ttft_long_s")


@dataclass(frozen=True, slots=True)
class CpuCase:
    """One measured configuration.

    Parameters
    ----------
    name:
        Its folder.
    settings:
        What it was, as far as it can matter: `pool` is the size of the KV pool where it can be full, else "enough";
        prefix caching is left out, since this workload shares nothing.
    index:
        How many times as long the machine took for its probe's prefill as it does in the median.
    prefill_s, decode_s:
        The speed probe: 512 prompt tokens alone, and one token after them.
    """

    name: str
    settings: dict[str, Any]
    point: Point
    index: float
    prefill_s: float
    decode_s: float

    def seconds(self, figure: str) -> float:
        """Return a time as it would be at the machine's median speed."""
        return float(getattr(self.point, figure)) / self.index


@cache
def cases() -> tuple[CpuCase, ...]:
    """Read every case that is there."""
    found = [(folder, load(folder)) for folder in _folders()]
    settings = [_settings(_args(folder), measured) for folder, measured in found]
    probes = [_probe(measured) for _, measured in found]
    alike: dict[int, list[float]] = defaultdict(list)
    for one, probe in zip(settings, probes, strict=True):
        if one["eager"]:
            alike[_pieces(one)].append(probe.prefill_s)
    read = []
    for (folder, measured), one, probe in zip(found, settings, probes, strict=True):
        index = probe.prefill_s / statistics.median(alike[_pieces(one)]) if one["eager"] else 1.0
        read.append(CpuCase(folder.name, one, point(measured), index, probe.prefill_s, probe.decode_step_s))
    return tuple(read)


def _pieces(settings: Mapping[str, Any]) -> int:
    """Into how many pieces the probe's prompt was cut."""
    return -(-PROBE_PROMPT_TOKENS // int(settings["tokens"]))


def _folders() -> list[Path]:
    return sorted(path.parent for path in (DATA / "quickstart").glob("*/case.json"))


def _args(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "case.json").read_text())["args"])


def _probe(measured: Measurement) -> SpeedProbe:
    probe = mean_probe(measured)
    if probe is None:
        raise SystemExit("a case of the CPU table has no speed probe")
    return probe


def _settings(args: dict[str, Any], measured: Measurement) -> dict[str, Any]:
    seqs = int(args["max_num_seqs"])
    longest = sorted((r.prompt_tokens + r.output_tokens for r in measured.requests), reverse=True)[:seqs]
    enough = (measured.engine.kv_tokens or 0) >= sum(longest)
    return {
        "seqs": seqs,
        "tokens": int(args["max_num_batched_tokens"]),
        "long_prefill": int(args.get("long_prefill_token_threshold", 0)),
        "pool": "enough" if enough else int(args["kv_cache_memory_bytes"]),
        "block": int(args.get("block_size", DEFAULT_BLOCK)),
        "eager": bool(args.get("enforce_eager", True)),
    }


def averaged(found: Sequence[CpuCase]) -> list[CpuCase]:
    """Make one case, at the median speed, of all measurements of a configuration and those that come to the same."""
    same: dict[tuple[Any, ...], list[CpuCase]] = defaultdict(list)
    for case in found:
        same[_order(case)].append(case)
    return [_mean(same[key]) for key in sorted(same)]


def _order(case: CpuCase) -> tuple[Any, ...]:
    s = case.settings
    pool = 0 if s["pool"] == "enough" else s["pool"]
    return s["seqs"], s["long_prefill"], pool, s["block"], not s["eager"], s["tokens"]


def _mean(same: Sequence[CpuCase]) -> CpuCase:
    seconds = {name: statistics.fmean(c.seconds(name) for c in same) for name in TIMES}
    first = min(same, key=lambda c: ("-again" in c.name, c.name))
    return replace(first, point=replace(first.point, **seconds), index=1.0)


def pairs(found: Sequence[CpuCase], setting: str) -> Iterator[tuple[CpuCase, CpuCase]]:
    """Yield neighbours that differ in one setting only, the smaller value of it first; numbers in order."""
    groups: dict[str, list[CpuCase]] = defaultdict(list)
    for case in averaged(found):
        others = {name: value for name, value in case.settings.items() if name != setting}
        groups[json.dumps(others, sort_keys=True)].append(case)
    for group in groups.values():
        yield from pairwise(sorted(group, key=lambda c: c.settings[setting]))


def noise(found: Sequence[CpuCase], figure: str) -> tuple[float, str]:
    """Return the share beneath which a difference is none, and how it is known."""
    again: dict[str, list[CpuCase]] = defaultdict(list)
    for case in found:
        again[json.dumps(case.settings, sort_keys=True)].append(case)
    floors = [
        noise_floor([{figure: c.seconds(figure)} for c in same])[figure] for same in again.values() if len(same) > 1
    ]
    if not floors:
        return ASSUMED_NOISE, f"{ASSUMED_NOISE:.0%} (assumed: nothing was measured twice)"
    floor = statistics.median(floors)
    return floor, f"{floor:.0%} (noise floor of {len(floors)} configurations measured more than once)"


def speeds() -> str:
    """Say how the machine's speed varied over the table."""
    indices = [case.index for case in cases() if case.settings["eager"]]
    return f"speed of the machine {min(indices):.2f} to {max(indices):.2f} of its median" if indices else "no case"


def label(case: CpuCase, without: str) -> str:
    """Name a case by its settings, but for one."""
    s = case.settings
    words = {
        "seqs": f"seqs {s['seqs']}",
        "tokens": f"batched {s['tokens']}",
        "long_prefill": f"threshold {s['long_prefill']}" if s["long_prefill"] else "",
        "pool": "" if s["pool"] == "enough" else f"KV {s['pool'] // 2**20} MiB",
        "block": "" if s["block"] == DEFAULT_BLOCK else f"block {s['block']}",
        "eager": "" if s["eager"] else "compiled",
    }
    return ", ".join(text for name, text in words.items() if text and name != without)


Judge = Callable[[str, Change, Change, float], tuple[Outcome, ...]]


def paired(found: Sequence[CpuCase], setting: str, name: str, judge: Judge, where: str = WHERE) -> Tried:
    """Make a table of neighbours in one setting and judge each."""
    ttft_noise, ttft_text = noise(found, TTFT)
    tpot_noise, tpot_text = noise(found, TPOT)
    rows: list[tuple[str, ...]] = []
    outcomes: list[Outcome] = []
    for old, new in pairs(found, setting):
        ttft, tpot = (Change.of([old.seconds(f)], [new.seconds(f)]) for f in (TTFT, TPOT))
        values = f"{old.settings[setting]} → {new.settings[setting]}"
        rows.append(
            (
                label(old, setting),
                values,
                f"{ms(old.seconds(TTFT))} → {ms(new.seconds(TTFT))} ({percent(ttft.mid)})",
                f"{ms(old.seconds(TPOT))} → {ms(new.seconds(TPOT))} ({percent(tpot.mid)})",
            )
        )
        outcomes += judge(f"{label(old, setting)}, {values}", ttft, tpot, max(ttft_noise, tpot_noise))
    return Tried(
        where=where,
        predicted=False,
        how=(
            f"Measured, the quickstart's workload (saturated), one to four runs a configuration, pairs that differ in "
            f"nothing else; {speeds()}. Noise: TTFT {ttft_text}, TPOT {tpot_text}."
        ),
        header=("configuration", name, "TTFT p95", "TPOT p95"),
        rows=tuple(rows),
        outcomes=tuple(outcomes),
    )
