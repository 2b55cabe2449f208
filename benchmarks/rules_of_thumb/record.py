"""Short runs of the real CPU engine that the table of the CPU engine has no place for, kept under data/rules/.

Shared prefixes (100 requests, one prefix of 500 tokens, one by one or all at once, cached in blocks of either size or
not at all), and the same burst of short requests under two values of `max_model_len`.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cpu_table import STUDY
from objectives.measurement import Measurement
from tuner.artifacts import load, save, write_json
from tuner.config import EngineConfig
from tuner.engine.host import Broken, EngineHost
from tuner.engine.processes import ProcessIdentity
from tuner.engine.protocol import MeasurePlan
from tuner.opening import base_config
from tuner.study_file import read
from tuner.workload.model import Request, Workload

DATA = Path(__file__).parents[1] / "data" / "rules"
MIB = 2**20
VOCABULARY = (100, 49_000)
"""Ids of ordinary tokens of the quickstart's model."""

SHARERS = 100
PREFIX_TOKENS = 500
QUESTION_TOKENS = 50
ANSWER_TOKENS = 4
GAP_S = 0.5
"""Between requests that come one by one: somewhat longer than one of them takes on two cores without a cache."""

BURST = 40
BURST_PROMPT_TOKENS, BURST_OUTPUT_TOKENS = 256, 128


@dataclass(frozen=True, slots=True)
class Recording:
    """One engine: its arguments beside the quickstart's, and the workloads that it is asked one after the other."""

    args: Mapping[str, Any]
    workloads: Mapping[str, Workload]


def shared_prefix(
    requests: int, prefix_tokens: int, question_tokens: int, output_tokens: int, gap_s: float, seed: int = 5
) -> Workload:
    """Return requests that share one prefix, `gap_s` apart; 0 sends all at once."""
    draw = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(*VOCABULARY) for _ in range(count))

    prefix = ids(prefix_tokens)
    made = tuple(
        Request(i * gap_s, prefix + ids(question_tokens), output_tokens, shared_tokens=prefix_tokens)
        for i in range(requests)
    )
    return Workload("shared prefix", made, VOCABULARY, seed)


def burst(seed: int = 5) -> Workload:
    """Return short requests that all come at once."""
    draw = random.Random(seed)
    made = tuple(
        Request(0.0, tuple(draw.randrange(*VOCABULARY) for _ in range(BURST_PROMPT_TOKENS)), BURST_OUTPUT_TOKENS)
        for _ in range(BURST)
    )
    return Workload("burst", made, VOCABULARY, seed)


def recordings() -> dict[str, Recording]:
    """Return every engine that is run, by its name."""
    engine = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 512 * MIB}
    paces = {
        name: shared_prefix(SHARERS, PREFIX_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS, gap_s)
        for name, gap_s in (("at_once", 0.0), ("apart", GAP_S))
    }
    found = {"prefix-off": Recording({**engine, "enable_prefix_caching": False}, paces)}
    for size in (128, 32):
        args = {**engine, "enable_prefix_caching": True, "block_size": size}
        found[f"prefix-block{size}"] = Recording(args, paces)
    pool = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 192 * MIB}
    for length in (1024, 8192):
        found[f"length-{length}"] = Recording({**pool, "max_model_len": length}, {"burst": burst()})
    return found


def recorded(name: str, workload: str) -> Measurement | None:
    """Return a run that was kept."""
    folder = DATA / name / workload
    return load(folder) if (folder / "facts.json").exists() else None


def record(name: str, say: Callable[[str], None]) -> None:
    """Run one engine and keep what it measured.

    Raises
    ------
    RuntimeError
        When the engine fails or leaves something behind.
    """
    recording = recordings()[name]
    measured = asyncio.run(_measure(recording, say))
    for workload, measurement in measured.items():
        save(measurement, DATA / name / workload)
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_json(DATA / name / "case.json", {"args": dict(recording.args), "measured_at": at})


async def _measure(recording: Recording, say: Callable[[str], None]) -> dict[str, Measurement]:
    base = base_config(read(STUDY))
    config = EngineConfig({**base.args, **recording.args}, dict(base.env))
    log = Path(tempfile.mkdtemp()) / "engine.log"
    host = EngineHost(ProcessIdentity.of(os.getpid()), socket.gethostname())
    measured: dict[str, Measurement] = {}
    try:
        facts = await host.start(config, log)
        if isinstance(facts, Broken):
            raise RuntimeError(f"the engine does not start, see {log}: {facts.error_text[-1000:]}")
        for name, workload in recording.workloads.items():
            say(f"measuring {name}")
            outcome = await host.measure(workload, MeasurePlan(salt=int(time.time())))
            if isinstance(outcome, Broken):
                raise RuntimeError(f"{name} broke, see {log}: {outcome.error_text[-1000:]}")
            measured[name] = outcome
    finally:
        stopped = await host.stop(60.0)
    if stopped.left:
        raise RuntimeError(f"the engine left {stopped.left}")
    return {
        name: replace(
            m, engine=replace(m.engine, model=Path(m.engine.model).name, stop_s=stopped.seconds, effective_args={})
        )
        for name, m in measured.items()
    }
