"""What the tuner itself costs a trial: ask, check, score, ledger, tell, tracking, at trial 200 of a study.

The engine is replaced by one that answers at once with a measurement of 24 requests; everything else is the real thing:
the proposer on SQLite, vLLM's own validation in its helper process, the ledger with fsync, MLflow on SQLite. The twin's
predictions are off: they are made while an engine runs, and here none does.

    python benchmarks/overhead.py [--trials 200] [--folder DIR [--for-s 50]]

With a folder the study can be left after some seconds and gone on with by the same command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from pathlib import Path

import yaml

from objectives.measurement import EngineFacts, Failure, Measurement, RequestRecord
from tuner.config import EngineConfig
from tuner.engine.pool import FixedPool
from tuner.engine.protocol import MeasurePlan, Progress
from tuner.ledger import History, TrialRecord
from tuner.opening import opened
from tuner.proposal import Proposal
from tuner.study import StudyRun
from tuner.study_file import read
from tuner.workload.model import Workload

MODEL = Path(__file__).parents[1] / "models" / "smollm2-135m-instruct"
TARGET_S = 1.0
LEAST = 10
"""Fewer trials than this make no row of the table."""


class InstantEngine:
    """Answers at once, with times that follow the configuration as a real engine's do."""

    def run(
        self, config: EngineConfig, workload: Workload, plan: MeasurePlan, progress: Progress
    ) -> Measurement | Failure:
        """Make up a measurement."""
        seqs, tokens = config.args.get("max_num_seqs", 128), config.args.get("max_num_batched_tokens", 2048)
        ttft_s, tpot_s = 20 / math.sqrt(seqs) + 200 / tokens, 0.01 * math.log(seqs + 1) * math.log(tokens)
        requests = tuple(
            RequestRecord(
                request_id=f"{plan.salt}-0-{i}",
                prompt_tokens=r.prompt_tokens,
                output_tokens=r.output_tokens,
                scheduled_s=r.arrival_s,
                sent_s=r.arrival_s,
                first_token_s=r.arrival_s + ttft_s * (1 + i / 50),
                last_token_s=r.arrival_s + ttft_s * (1 + i / 50) + tpot_s * (r.output_tokens - 1),
                token_times_s=tuple(r.arrival_s + ttft_s * (1 + i / 50) + tpot_s * k for k in range(r.output_tokens)),
                finish_reason="length",
                cached_tokens=0,
            )
            for i, r in enumerate(workload.requests)
        )
        facts = EngineFacts("vllm", "0", "cpu", 1, "model", 1.0, kv_tokens=40_000, kv_tokens_needed=8192)
        return Measurement(facts, workload.fingerprint(), requests, (), (), (30.0,))

    def close(self) -> None:
        """Nothing to close."""


class Quiet:
    """A listener that only notes how long each trial took, and ends the run when its time is up."""

    def __init__(self, times: Path, for_s: float | None) -> None:
        self._times = times
        self._until_s = math.inf if for_s is None else time.perf_counter() + for_s
        self._last_s: float | None = None

    def began(self, proposal: Proposal, of_trials: int | None, ends_at: float | None) -> None:
        """Nothing to show."""

    def progressed(self, number: int, text: str) -> None:
        """Nothing to show."""

    def finished(self, record: TrialRecord, history: History) -> None:
        """Note the time since the trial before; the first of a run has none."""
        now_s = time.perf_counter()
        if self._last_s is not None:
            with self._times.open("a") as file:
                file.write(json.dumps([len(history.finished), now_s - self._last_s]) + "\n")
        self._last_s = now_s
        if now_s > self._until_s:
            raise KeyboardInterrupt

    def noted(self, text: str) -> None:
        """Nothing to show."""


def study_file(folder: Path) -> Path:
    document = {
        "study": "overhead",
        "model": str(MODEL),
        "engine": {"args": {"max_model_len": 8192, "gpu_memory_utilization": 0.2}, "env": {"HF_HUB_OFFLINE": 1}},
        "workload": {
            "kind": "long_documents",
            "prompt_tokens": {"256": 8, "1024": 8, "3500": 8},
            "output_tokens": 32,
            "arrivals": {"kind": "poisson", "rate_per_s": 1},
        },
        "space": {
            "max_num_seqs": {"low": 1, "high": 512, "log": True},
            "max_num_batched_tokens": {"low": 512, "high": 16384, "log": True},
            "kv_cache_memory_bytes": {"low": 2**28, "high": 2**32, "log": True},
            "block_size": [32, 64, 128],
            "long_prefill_token_threshold": {"low": 0, "high": 2048},
        },
        "budget": {"trials": 10_000},
        "noise": {"sentinel_every": 0, "aa_runs": 0},
        "search": {"twin": False},
    }
    path = folder / "overhead.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def play(folder: Path, trials: int, for_s: float | None) -> None:
    """Run the study, or go on with it, until it has so many trials or the time is up."""
    os.chdir(folder)
    file = read(study_file(folder))
    import tuner.opening

    engine = InstantEngine()
    tuner.opening.make_pool = lambda *_: FixedPool([engine], "nowhere")  # type: ignore[assignment]  # all else is real
    with (
        contextlib.suppress(KeyboardInterrupt),
        opened(file, Quiet(folder / "times.jsonl", for_s), fresh=False) as rooms,
    ):
        StudyRun(rooms, trials=trials, deadline=None).run()


def report(folder: Path, trials: int) -> None:
    """Print the overhead along the study."""
    times = [json.loads(line) for line in (folder / "times.jsonl").read_text().splitlines()]
    for upto in sorted({25, 50, 75, 100, 150, trials}):
        some = [seconds for number, seconds in times if upto - 20 < number <= upto]
        if len(some) >= LEAST:
            print(f"trials {upto - 19} to {upto}: median {statistics.median(some):.2f} s, worst {max(some):.2f} s")
    if times[-1][0] < trials:
        print(f"{times[-1][0]} of {trials} trials; the same command goes on")
        return
    last = [seconds for number, seconds in times if number > trials - 20]
    print(f"target {TARGET_S:g} s: {'met' if statistics.median(last) <= TARGET_S else 'missed'}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="where the study is kept; a temporary folder by default")
    parser.add_argument("--for-s", type=float, help="leave the study after so many seconds")
    call = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = call.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        play(folder.resolve(), call.trials, call.for_s)
        report(folder.resolve(), call.trials)


if __name__ == "__main__":
    main()
