"""What the tuner itself costs a trial: ask, check, score, ledger, tell, tracking, at trial 200 of a study.

The engine is replaced by one that answers at once with a measurement of 24 requests; everything else is the real thing:
Optuna's GP sampler on SQLite, vLLM's own validation in its helper process, the ledger with fsync, MLflow on SQLite.

    python benchmarks/overhead.py [--trials 200]
"""

from __future__ import annotations

import argparse
import itertools
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
from tuner.proposer import Proposal
from tuner.study import StudyRun
from tuner.study_file import read
from tuner.workload.model import Workload

MODEL = Path(__file__).parents[1] / "models" / "smollm2-135m-instruct"
TARGET_S = 1.0


class InstantEngine:
    """Answers at once, with times that follow the configuration as a real engine's do."""

    def __init__(self) -> None:
        self.busy_s = 0.0

    def run(
        self, config: EngineConfig, workload: Workload, plan: MeasurePlan, progress: Progress
    ) -> Measurement | Failure:
        """Make up a measurement."""
        began_s = time.perf_counter()
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
        measured = Measurement(facts, workload.fingerprint(), requests, (), (), (30.0,))
        self.busy_s += time.perf_counter() - began_s
        return measured

    def close(self) -> None:
        """Nothing to close."""


class Quiet:
    """A listener that only notes when trials end."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def began(self, proposal: Proposal, of_trials: int | None, ends_at: float | None) -> None:
        """Nothing to show."""

    def progressed(self, number: int, text: str) -> None:
        """Nothing to show."""

    def finished(self, record: TrialRecord, history: History) -> None:
        """Note the time."""
        self.ends_s.append(time.perf_counter())
        if len(self.ends_s) % 25 == 0:
            latest = [b - a for a, b in itertools.pairwise(self.ends_s[-21:])]
            print(f"trial {len(self.ends_s)}: median {statistics.median(latest):.2f} s", flush=True)

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
    }
    path = folder / "overhead.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=200)
    trials = parser.parse_args().trials
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        listener, engine = Quiet(), InstantEngine()
        file = read(study_file(Path(temporary)))
        import tuner.opening

        tuner.opening.make_pool = lambda *_: FixedPool([engine], "nothing")  # type: ignore[assignment]  # the one thing that is not real
        with opened(file, listener, fresh=False) as rooms:
            StudyRun(rooms, trials=trials, deadline=None).run()
        gaps = [b - a for a, b in itertools.pairwise(listener.ends_s)]
        last = gaps[-20:]
    print(f"{len(gaps) + 1} trials; the engine's own share {engine.busy_s / len(listener.ends_s):.3f} s a trial")
    print(f"overhead a trial, last 20: median {statistics.median(last):.2f} s, worst {max(last):.2f} s")
    print(f"target {TARGET_S:g} s: {'met' if statistics.median(last) <= TARGET_S else 'missed'}")


if __name__ == "__main__":
    main()
