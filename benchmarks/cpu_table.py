"""A table of the real CPU engine: many configurations of the quickstart's model, measured one after the other.

Every configuration is a start of vLLM's CPU engine, measured as a trial of a study is: warmed, with the speed probe
before and after, fresh token ids, stopped and proven gone. Kept with its request and step rows under
data/cpu_table/WORKLOAD/NAME/, so that the twin and the search can be held against it without an engine; what is there
is not measured again, so that the table can be made in several sittings.

Two workloads: `quickstart` is the quickstart study's own; `shared` has documents that many questions share. The
configurations of `quickstart` are a full grid over the scheduler's arguments, in random order, and variants that
change what the grid holds fixed (block size, compiled, prefix caching off). Some of the grid is measured again, for
the noise, and so is the front of the table that `search.py --table` makes of it: the best of many measurements are the
lucky ones among them. The two are called in turn, some measurements each: each may change who is on the front. What is
void by the limits of `objectives.validity` (a change of speed of 1.3; a study's default is 1.5) is not kept.

    PYTHONPATH=. python benchmarks/cpu_table.py [--count 60] [--lock FILE]      measure so many more
    PYTHONPATH=. python benchmarks/cpu_table.py --show                          what is there

`--lock` holds an exclusive lock on a file while something is measured (not while engines start and stop), for a machine
that does other work too: whatever loads it has to take the same lock.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import itertools
import json
import os
import random
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from search_bench.table_snapshot import SNAPSHOT
from search_bench.table_twin import figures

from objectives.measurement import Measurement
from objectives.pareto import front
from objectives.validity import void_reasons
from tuner.artifacts import load, save, write_json
from tuner.config import EngineConfig
from tuner.engine.host import Broken, EngineHost
from tuner.engine.processes import ProcessIdentity
from tuner.engine.protocol import MeasurePlan
from tuner.judge import expectations_of
from tuner.opening import base_config, build_workload
from tuner.study_file import read
from tuner.workload.build import build
from tuner.workload.model import Workload
from tuner.workload.spec import SharedPrefix

DATA = Path(__file__).parent / "data" / "cpu_table"
STUDY = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
MIB = 2**20

SEQS = (1, 2, 4, 8, 16, 32)
BATCHED_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096)
KV_BYTES = (192 * MIB, 1024 * MIB)
LONG_PREFILL = (0, 128, 512)
"""Most tokens of one prompt in a step, where smaller than `max_num_batched_tokens`; 0 for no such limit."""
REPEATED = 20
"""So many of the grid are measured again, and once again."""
MEASUREMENTS_OF_THE_FRONT = 4
"""So many times every member of the front is measured: half the noise of a single measurement."""
MEASURE_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration on one workload; `name` is its folder."""

    workload: str
    name: str
    args: dict[str, Any]


def _case(workload: str, seqs: int, tokens: int, kv_mib: int, long_prefill: int = 0, **more: Any) -> Case:
    args: dict[str, Any] = {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens,
        "kv_cache_memory_bytes": kv_mib * MIB,
    }
    name = f"s{seqs}-t{tokens}-kv{kv_mib}"
    if long_prefill:
        args["long_prefill_token_threshold"] = long_prefill
        name += f"-l{long_prefill}"
    for key, value in more.items():
        args[key] = value
        name += f"-{key}={value}"
    return Case(workload, name, args)


def grid() -> list[Case]:
    """Every configuration of the grid whose schedule can differ from the others'."""
    return [
        _case("quickstart", seqs, tokens, kv // MIB, long_prefill)
        for seqs, tokens, kv, long_prefill in itertools.product(SEQS, BATCHED_TOKENS, KV_BYTES, LONG_PREFILL)
        if long_prefill < tokens and (seqs > 1 or kv == KV_BYTES[-1])
    ]


def variants() -> list[Case]:
    """What the grid holds fixed, changed."""
    plain = [(2, 256, 512), (4, 1024, 1024), (8, 128, 256), (16, 512, 192), (32, 2048, 1024), (4, 64, 192)]
    cases = [
        _case("quickstart", *where, block_size=size)
        for where, size in zip(plain, (32, 64, 32, 64, 32, 256), strict=True)
    ]
    cases += [_case("quickstart", *where, enable_prefix_caching=False) for where in plain[1:]]
    compiled = [(4, 512, 1024), (16, 2048, 1024), (8, 256, 256), (32, 1024, 512), (2, 128, 192), (16, 64, 1024)]
    cases += [_case("quickstart", *where, enforce_eager=False) for where in compiled]
    return cases


def shared() -> list[Case]:
    """Configurations on documents that questions share."""
    where = [(1, 512), (2, 128), (2, 1024), (4, 64), (4, 512), (8, 256), (8, 2048), (16, 128), (16, 1024), (32, 4096)]
    cases = [_case("shared", seqs, tokens, 1024) for seqs, tokens in where]
    cases += [_case("shared", seqs, tokens, 192) for seqs, tokens in where[4::2]]
    cases += [_case("shared", seqs, tokens, 1024, enable_prefix_caching=False) for seqs, tokens in where[4::3]]
    return cases


def cases() -> list[Case]:
    """Everything, in the order in which it is measured."""
    full = grid()
    random.Random(20261130).shuffle(full)
    once, twice = (_again(full[:REPEATED], i) for i in (1, 2))
    wanted = full[:REPEATED] + once + full[REPEATED:] + _front(full) + twice + shared() + variants()
    return list({(case.workload, case.name): case for case in wanted}.values())


def _again(measured: list[Case], time: int) -> list[Case]:
    return [replace(case, name=f"{case.name}-again{time}") for case in measured]


def _front(full: list[Case]) -> list[Case]:
    """One more measurement of members of the front of the search's table, as far as it was made; the least known first.

    So many as are wanted at once, since every measurement may change who is a member: `--count`.
    """
    if not SNAPSHOT.exists():
        return []
    rows = json.loads(SNAPSHOT.read_text())["configurations"]
    members = [rows[i] for i in front(np.array([[row["ttft_s"], row["tpot_s"]] for row in rows]))]
    members.sort(key=lambda row: row["measurements"])
    return [
        again
        for row in members
        if row["measurements"] < MEASUREMENTS_OF_THE_FRONT
        for again in _again([case for case in full if case.args == _set(row["args"])], row["measurements"])
    ]


def _set(args: dict[str, Any]) -> dict[str, Any]:
    """Return what a configuration of the table sets, as a case has it: no limit is no argument."""
    return {name: value for name, value in args.items() if value}


def workloads() -> dict[str, Workload]:
    """Return the two workloads."""
    quickstart = build_workload(read(STUDY), Path(tempfile.gettempdir()) / "cpu-table-store").workload
    spec = SharedPrefix.model_validate(
        {
            "kind": "shared_prefix",
            "requests": 24,
            "prefixes": 3,
            "prefix_tokens": [1024, 2048],
            "question_tokens": {128: 2, 512: 1},
            "output_tokens": 40,
            "arrivals": {"kind": "gamma", "rate_per_s": 1.2, "burstiness": 0.5},
            "seed": 11,
        }
    )
    built = build(spec, tokenizer=None, vocabulary=quickstart.vocabulary, base_folder=STUDY.parent, cache_folder=None)
    return {"quickstart": quickstart, "shared": built.workload}


@contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Hold the lock, with a file beside it that asks others to let it be taken first."""
    if lock is None:
        yield
        return
    wants = lock.with_name("campaign.wants")
    wants.touch()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        wants.unlink(missing_ok=True)
        yield


async def measure(host: EngineHost, case: Case, workload: Workload, salt: int, lock: Path | None) -> Measurement:
    """Start, measure, stop.

    Raises
    ------
    RuntimeError
        When the engine fails or leaves something behind, or the measurement is void.
    """
    base = base_config(read(STUDY))
    config = EngineConfig({**base.args, **case.args}, dict(base.env))
    log = Path(tempfile.gettempdir()) / "cpu-table-engine.log"
    log.unlink(missing_ok=True)
    try:
        facts = await host.start(config, log)
        if isinstance(facts, Broken):
            raise RuntimeError(f"{case.name} does not start: {facts.error_text[-2000:]}")
        with alone(lock):
            outcome = await asyncio.wait_for(host.measure(workload, MeasurePlan(salt=salt)), MEASURE_LIMIT_S)
    finally:
        stopped = await host.stop(60.0)
    if isinstance(outcome, Broken):
        raise RuntimeError(f"{case.name} broke: {outcome.error_text[-2000:]}")
    if stopped.left:
        raise RuntimeError(f"{case.name} left {stopped.left}")
    if reasons := void_reasons(outcome, None, expectations_of(workload)):
        raise RuntimeError(f"{case.name} is void: {'; '.join(reason.evidence for reason in reasons)}")
    facts = outcome.engine
    named = replace(facts, model=Path(facts.model).name, stop_s=stopped.seconds, effective_args={})
    return replace(outcome, engine=named)


def row(case: Case, measured: Measurement) -> str:
    """Say in a line what a measurement showed."""
    ttft, tpot = figures(measured)
    probes = [p for p in (measured.speed_before, measured.speed_after) if p is not None]
    speed = "  ".join(f"{p.prefill_s:.3f}/{p.decode_step_s * 1000:.1f}ms" for p in probes)
    return f"{case.workload:10} {case.name:44} ttft p95 {ttft:7.2f} s  tpot p95 {tpot * 1000:7.1f} ms  probes {speed}"


def is_there(case: Case) -> bool:
    """Whether it was measured."""
    return (DATA / case.workload / case.name / "case.json").exists()


async def campaign(count: int, lock: Path | None) -> None:
    """Measure what is missing."""
    built = workloads()
    host = EngineHost(ProcessIdentity.of(os.getpid()), socket.gethostname())
    todo = [case for case in cases() if not is_there(case)]
    for case in todo[:count]:
        began_s = time.monotonic()
        try:
            measured = await measure(host, case, built[case.workload], int(time.time()), lock)
        except RuntimeError as error:
            print(f"FAILED {error}", flush=True)
            continue
        folder = DATA / case.workload / case.name
        save(measured, folder)
        write_json(
            folder / "case.json", {"args": case.args, "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        )
        print(f"{row(case, measured)}  ({time.monotonic() - began_s:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--show", action="store_true")
    arguments = parser.parse_args()
    if arguments.show:
        wanted = cases()
        there = [case for case in wanted if is_there(case)]
        for case in there:
            print(row(case, load(DATA / case.workload / case.name)))
        print(f"{len(there)} of {len(wanted)} cases")
        return
    asyncio.run(campaign(arguments.count, arguments.lock))


if __name__ == "__main__":
    main()
