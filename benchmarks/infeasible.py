"""How many proposals do not fit, with and without the gate, on the twin of four A6000 and a 32B model.

A space of which about a third is out of memory, GP sampler, the same seed; `off` lets every proposal reach the engine,
`refuse` asks the memory model first.

    PYTHONPATH=. python benchmarks/infeasible.py [--trials 40]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import yaml

from tuner.ledger import History, TrialRecord, TrialState
from tuner.opening import opened
from tuner.proposer import Proposal
from tuner.study import StudyRun
from tuner.study_file import read

EXAMPLE = Path(__file__).parents[1] / "examples" / "a6000-qwen32b-longdoc.yaml"
FIRST = 5
"""Trials after which the promise holds: at most 5% of what is proposed does not fit."""


class Quiet:
    """A listener that shows nothing."""

    def began(self, proposal: Proposal, of_trials: int | None, ends_at: float | None) -> None:
        """Nothing to show."""

    def progressed(self, text: str) -> None:
        """Nothing to show."""

    def finished(self, record: TrialRecord, history: History) -> None:
        """Nothing to show."""

    def noted(self, text: str) -> None:
        """Nothing to show."""


def study_file(folder: Path, gate: str, seed: int) -> Path:
    """Write the example as a twin study with a space that reaches far into what does not fit."""
    document = yaml.safe_load(EXAMPLE.read_text())
    config = EXAMPLE.parent / document["model_config_file"]
    document |= {
        "study": f"infeasible-{gate}-{seed}",
        "model_config_file": str(config),
        "engine": {"backend": "twin", "device": "a6000", "args": {"tensor_parallel_size": 4}},
        "recipes": [],
        "budget": {"trials": 1_000},
        "search": {"startup_trials": FIRST, "seed": seed},
        "noise": {"aa_runs": 0, "sentinel_every": 0},
        "confirm": {"rounds": 0},
        "gate": {"memory": gate},
    }
    document["space"] = {
        "gpu_memory_utilization": {"low": 0.36, "high": 0.96, "step": 0.02},
        "max_model_len": [33792, 65536, 98304, 131072],
        "max_num_seqs": [12, 16, 24, 32, 48, 64, 128, 256],
        "max_num_batched_tokens": {"low": 512, "high": 131072, "log": True},
    }
    path = folder / f"{gate}-{seed}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    print("| gate | seed | engine starts | did not fit, first 5 | did not fit, after | refused without an engine |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        for gate in ("off", "refuse"):
            for seed in range(arguments.seeds):
                file = read(study_file(Path(temporary), gate, seed))
                with opened(file, Quiet(), fresh=False) as rooms:
                    StudyRun(rooms, trials=arguments.trials, deadline=None).run()
                    trials = rooms.folder.ledger.history().finished
                started = [t for t in trials if t.engine_s > 0]
                wrong = [t.state is TrialState.INFEASIBLE for t in started]
                refused = len(trials) - len(started)
                after = sum(wrong[FIRST:]) / max(1, len(wrong[FIRST:]))
                print(
                    f"| {gate} | {seed} | {len(started)} | {sum(wrong[:FIRST])} | {after:.0%} | {refused} |", flush=True
                )


if __name__ == "__main__":
    main()
