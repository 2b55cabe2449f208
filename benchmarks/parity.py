"""Does this driver measure what `vllm bench serve` measures? The same load, the same configuration, side by side.

Three sides, one after the other in every round, each round in another order:

- `bench`: `vllm bench serve` against `vllm serve`, the tool that everybody quotes;
- `http`: this project's driver against the same server, so that only the client differs;
- `in_process`: this project's driver on an engine in its own process, as a trial of a study measures it.

Both engines live through the whole benchmark, and the one that is not measured is idle: a machine that drifts within
minutes would otherwise be compared with itself of some minutes ago. Prompt lengths, output lengths and the arrivals of
a round are the same on each side: `vllm bench serve` draws its arrivals from its seed, and here they are drawn again
from that seed and held against the times at which it really sent. Times count from sending on each side, as `vllm bench
serve` has it.

Two arguments of the engine are chosen for the comparison. Prefix caching is off, for `vllm bench serve` warms up with a
prompt that it measures later. Steps are short (128 tokens): whether a request that arrives with another just makes a
step, or waits for its end, is decided by a millisecond and by no tool, and with steps of a whole prompt it moved the
TTFT of all requests of a burst by 0.3 s or more, and the p95 of 24 requests by up to 40%. Those rounds are kept in
data/parity_whole_prompts.json (`--show --data FILE`); outside of bursts their requests agree within some percent.

    PYTHONPATH=. python benchmarks/parity.py [--rounds 3] [--markdown]      measure, keep the rounds, show them
    PYTHONPATH=. python benchmarks/parity.py --show [--markdown]            show the rounds that were kept
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from objectives.intervals import percentile
from objectives.latency import is_served, tpot_s, ttft_sent_s
from objectives.measurement import EngineFacts, Measurement
from tuner.config import EngineConfig
from tuner.engine.host import Broken, EngineHost
from tuner.engine.http import HttpSource, client_session
from tuner.engine.processes import ProcessIdentity
from tuner.engine.protocol import MeasurePlan
from tuner.engine.serve import ServedEngine
from tuner.engine.server import Server, vllm_command
from tuner.engine.telemetry import DeviceSampler
from tuner.engine.trial import measure
from tuner.engine.vllm import vllm_version
from tuner.workload.model import Request, Workload

MODEL = Path(__file__).parents[1] / "models" / "smollm2-135m-instruct"
DATA = Path(__file__).parent / "data" / "parity.json"
CONFIG = EngineConfig(
    {
        "model": str(MODEL),
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 2**28,
    },
    {"HF_HUB_OFFLINE": "1"},
)
VOCABULARY = (100, 49_000)
"""Ids of ordinary tokens of the model."""
SIDES = ("bench", "http", "in_process")
TITLES = {"bench": "`vllm bench serve`", "http": "this driver, same server", "in_process": "this driver, in process"}
WITHIN = (0.9, 1.1)
SENT_AS_DRAWN_S = 0.1
START_S = 300.0
SETTLE_S = 1.0


@dataclass(frozen=True)
class Load:
    """What every side runs in every round: lengths in tokens, Poisson arrivals."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    rate_per_s: float

    def arrivals_s(self, seed: int) -> list[float]:
        """Return when `vllm bench serve --seed SEED` sends: gaps of a Poisson process, scaled to its rate.

        Source: `get_request` in vllm/benchmarks/serve.py of vLLM 0.32.
        """
        gaps_s = np.random.RandomState(seed).gamma(shape=1.0, scale=1 / self.rate_per_s, size=self.requests)
        times_s = np.cumsum(gaps_s)
        return [float(t) for t in times_s * (self.requests / self.rate_per_s / times_s[-1])]

    def workload(self, seed: int) -> Workload:
        """Return the same load for this project's driver, with ids of its own."""
        draw = np.random.default_rng(seed)
        requests = tuple(
            Request(at_s, tuple(draw.integers(*VOCABULARY, self.prompt_tokens).tolist()), self.output_tokens)
            for at_s in self.arrivals_s(seed)
        )
        return Workload("parity", requests, VOCABULARY, seed)


@dataclass(frozen=True)
class Run:
    """One side in one round: a value a request, in order of arrival."""

    side: str
    seed: int
    ttft_s: list[float]
    tpot_s: list[float]
    prompt_tokens: list[int]

    def metrics(self) -> dict[str, float]:
        """Return the figures that are compared, in seconds."""
        columns = {"TTFT": self.ttft_s, "TPOT": self.tpot_s}
        return {f"{name} p{p}": percentile(values, p) for name, values in columns.items() for p in (50, 95)}


class Benchmark:
    """Both engines, running."""

    def __init__(self, load: Load, server: Server, served: ServedEngine, host: EngineHost, folder: Path) -> None:
        self._load = load
        self._server = server
        self._served = served
        self._host = host
        self._folder = folder

    async def run(self, side: str, seed: int) -> Run:
        """Measure one side."""
        await asyncio.sleep(SETTLE_S)
        sides: dict[str, Callable[[int], Awaitable[Run]]] = {
            "bench": self._bench,
            "http": self._http,
            "in_process": self._in_process,
        }
        return await sides[side](seed)

    async def _bench(self, seed: int) -> Run:
        result = self._folder / f"bench-{seed}.json"
        load = self._load
        options = {
            "model": MODEL,
            "served-model-name": self._server.name,
            "base-url": self._server.url,
            "dataset-name": "random",
            "random-input-len": load.prompt_tokens,
            "random-output-len": load.output_tokens,
            "num-prompts": load.requests,
            "request-rate": load.rate_per_s,
            "seed": seed,
            "temperature": 0,
            "num-warmups": 2,
            "result-dir": result.parent,
            "result-filename": result.name,
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        flags = ["--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]
        process = await asyncio.create_subprocess_exec(
            *(vllm_command(), "bench", "serve", *arguments, *flags),
            env={**os.environ, **CONFIG.env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        printed, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"vllm bench serve ended with {process.returncode}: {printed.decode()[-2000:]}")
        return self._from_bench(json.loads(result.read_text()), seed)

    def _from_bench(self, result: Mapping[str, Any], seed: int) -> Run:
        load = self._load
        if result["completed"] != load.requests or set(result["output_lens"]) != {load.output_tokens}:
            raise RuntimeError(f"vllm bench serve lost something: {result['completed']} requests, {result['errors']}")
        drawn, sent = np.array(load.arrivals_s(seed)), np.array(result["start_times"])
        apart_s = float(np.abs((sent - sent[0]) - (drawn - drawn[0])).max())
        if apart_s > SENT_AS_DRAWN_S:
            raise RuntimeError(f"vllm bench serve sent up to {apart_s:.3f} s apart from the arrivals drawn here")
        tpot_s = [sum(gaps) / (load.output_tokens - 1) for gaps in result["itls"]]
        return Run("bench", seed, result["ttfts"], tpot_s, result["input_lens"])

    async def _http(self, seed: int) -> Run:
        measured = await measure(
            self._served,
            self._load.workload(seed),
            MeasurePlan(salt=seed, speed_probe=False),
            lambda: DeviceSampler(None, (), 0.5),
            lambda: 0,
            lambda _: None,
        )
        return _from_measurement("http", seed, measured)

    async def _in_process(self, seed: int) -> Run:
        measured = await self._host.measure(self._load.workload(seed), MeasurePlan(salt=seed, speed_probe=False))
        if isinstance(measured, Broken):
            raise RuntimeError(measured.error_text)
        return _from_measurement("in_process", seed, measured)


def _from_measurement(side: str, seed: int, measured: Measurement) -> Run:
    if lost := [r.error or r.finish_reason for r in measured.requests if not is_served(r)]:
        raise RuntimeError(f"{side}: {len(lost)} requests were lost: {lost[0]}")
    ttfts_s = [value for r in measured.requests if (value := ttft_sent_s(r)) is not None]
    tpots_s = [value for r in measured.requests if (value := tpot_s(r)) is not None]
    return Run(side, seed, ttfts_s, tpots_s, [r.prompt_tokens for r in measured.requests])


async def measure_rounds(load: Load, rounds: int, first_seed: int) -> list[Run]:
    """Start both engines, measure all sides in every round, and stop the engines."""
    runs: list[Run] = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parity-")))
        session = await stack.enter_async_context(client_session())
        server = Server(CONFIG, folder, stack.enter_context((folder / "serve.log").open("wb")))
        stack.callback(server.stop, 30.0)
        await until_healthy(server, session, folder / "serve.log")
        facts = EngineFacts("vllm", vllm_version(), "cpu", 1, str(MODEL), 0.0, max_model_len=1024)
        source = HttpSource(session, server.url, server.name, lambda: server.exit_code is None)
        host = EngineHost(ProcessIdentity.of(os.getpid()), socket.gethostname())
        stack.push_async_callback(host.stop, 30.0)
        started = await host.start(CONFIG, folder / "engine.log")
        if isinstance(started, Broken):
            raise RuntimeError(started.error_text)
        benchmark = Benchmark(load, server, ServedEngine(source, session, server.url, facts), host, folder)
        for number in range(rounds):
            turn = number % len(SIDES)
            for side in (*SIDES[turn:], *SIDES[:turn]):
                runs.append(await benchmark.run(side, first_seed + number))
                figures = "  ".join(f"{name} {value:.3f} s" for name, value in runs[-1].metrics().items())
                print(f"round {number + 1} {side:<10}  {figures}", flush=True)
    return runs


async def until_healthy(server: Server, session: Any, log: Path) -> None:
    """Wait until the server answers.

    Raises
    ------
    RuntimeError
        When it ended, or did not come up in time.
    """
    import aiohttp

    deadline_s = time.monotonic() + START_S
    while server.exit_code is None and time.monotonic() < deadline_s:
        try:
            async with session.get(f"{server.url}/health") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.5)
    raise RuntimeError(f"vllm serve did not come up: {log.read_text(errors='replace')[-2000:]}")


def table(runs: Sequence[Run], markdown: bool) -> str:
    """Show the median over the rounds of each figure, and the ratios to `vllm bench serve` with their spread."""
    by_side = {side: [run.metrics() for run in runs if run.side == side] for side in SIDES}
    rows = [["figure", *(TITLES[side] for side in SIDES), *(f"{TITLES[side]} / bench" for side in SIDES[1:])]]
    for name in by_side["bench"][0]:
        values = {side: [metrics[name] for metrics in by_side[side]] for side in SIDES}
        row = [name, *(f"{statistics.median(values[side]):.3f} s" for side in SIDES)]
        for side in SIDES[1:]:
            ratios = [a / b for a, b in zip(values[side], values["bench"], strict=True)]
            row.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f} … {max(ratios):.3f})")
        rows.append(row)
    if markdown:
        rows.insert(1, ["---"] * len(rows[0]))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; each round has the next one")
    parser.add_argument("--show", action="store_true", help="show the rounds that were kept, measure nothing")
    parser.add_argument("--data", type=Path, default=DATA, help="where the rounds are kept")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    if not options.show:
        load = Load(options.requests, options.prompt_tokens, options.output_tokens, options.rate)
        runs = asyncio.run(measure_rounds(load, options.rounds, options.seed))
        document = {
            "vllm": vllm_version(),
            "cores": psutil.cpu_count(),
            "arguments": {**CONFIG.args, "model": MODEL.name},
            "load": asdict(load),
            "runs": [asdict(run) for run in runs],
        }
        options.data.parent.mkdir(exist_ok=True)
        options.data.write_text(json.dumps(document, indent=1) + "\n")
    document = json.loads(options.data.read_text())
    print(table([Run(**run) for run in document["runs"]], options.markdown))


if __name__ == "__main__":
    main()
