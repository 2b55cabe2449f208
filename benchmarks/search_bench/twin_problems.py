"""Problems (b) and (c): four A6000 and a 32B model, with a truth that is not the twin that the tuner may ask.

The truth is vLLM's scheduler on another clock than the catalogue's: every coefficient differs, steps that cut prompts
into small chunks are slower (as attention backends make them, and as the cost model has no term for), the values are
bent by a smooth field of ratios over all parameters, also those of which the twin knows no effect, and less memory is
left for the KV cache than the memory model says. What the tuner knows is the twin on the catalogue's clock, and once
three trials were measured, as its own calibration makes it from them.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from objectives.memory import relative_shortage
from search_bench.cache import Cache
from search_bench.field import FIELD_DEVIATION, FIELD_LENGTHS, Field
from search_bench.problem import (
    Changes,
    Knowledge,
    Predictor,
    Truth,
    Values,
    corner_of,
    front_of,
    key_of,
    lognormal,
    parameter,
    record,
)
from search_bench.twin_play import SMALL_CHUNK_SLOWER, TRUE_COEFFICIENTS, Player, TruthEngine
from tuner.config import EngineConfig
from tuner.design import design_points
from tuner.engine.twin.devices import find_device
from tuner.engine.twin.engine import TwinEngine
from tuner.engine.twin.memory import KvPool
from tuner.engine.twin.shape import model_shape, read_model_config
from tuner.engine.twin.steptime import Coefficients, KernelChoice, StepCost, StepLoad
from tuner.engine.vllm import vllm_version
from tuner.gate import Gate
from tuner.ledger import History, TrialRecord
from tuner.memory_model import MemoryPrediction
from tuner.model_files import config_folder
from tuner.opening import base_config, build_workload, machine_of, memory_predictor
from tuner.recipes import Skipped, applicable
from tuner.study_file import StudyFile, parse
from tuner.study_hours import start_time
from tuner.workload.model import Workload

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parents[1] / "data" / "search"
CALIBRATED_ON = 3
"""So many measured trials calibrate the twin; before, it is on the catalogue's clock."""
EXAMPLE = ROOT / "examples" / "a6000-qwen32b-longdoc.yaml"

SPACE: dict[str, Any] = {
    "gpu_memory_utilization": {"low": 0.32, "high": 0.96, "step": 0.04},
    "max_model_len": [33792, 65536, 98304, 131072],
    "max_num_seqs": [4, 8, 12, 16, 24, 32, 48, 64, 128, 256],
    "max_num_batched_tokens": [512 * 2 ** (i // 2) * (3 if i % 2 else 2) // 2 for i in range(17)],
    "long_prefill_token_threshold": [0, 1024, 2048, 4096, 8192],
    "enable_prefix_caching": [True, False],
    "block_size": [16, 32, 64],
    "async_scheduling": [True, False],
}
DEFAULT = {
    "gpu_memory_utilization": 0.92,
    "max_model_len": 131072,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "long_prefill_token_threshold": 0,
    "enable_prefix_caching": True,
    "block_size": 16,
    "async_scheduling": True,
}
"""What an operator would start with: vLLM's defaults, on the grid of the space."""
EFFECTIVE = {"enable_chunked_prefill": True}
"""What vLLM sets by default of what recipes name beyond the space."""

LESS_KV_GIB = 0.1
LESS_KV_OF_ACTIVATION = 0.03
"""Published start-up logs are within 0.16 GiB of the memory model in 95 of 100 cases, at worst 0.97 GiB."""
STOP_S = 15.0
PROBE_POINTS = 256
_CLOCK = [TRUE_COEFFICIENTS, SMALL_CHUNK_SLOWER]
_TRUTH = [SPACE, DEFAULT, LESS_KV_GIB, LESS_KV_OF_ACTIVATION, FIELD_DEVIATION, FIELD_LENGTHS, STOP_S]
"""What the truth hangs on: schedules that were played on another clock, and runs on another truth, are stale."""


class TwinProblem:
    """A workload on four A6000."""

    def __init__(self, name: str, title: str, workload: dict[str, Any], field_seed: int) -> None:
        self.name, self.title = name, title
        self._document = _document(name, workload)
        self._field = Field(self.space, field_seed)
        self.default: Changes = DEFAULT
        played = _digest([workload, _CLOCK, self._twin_fingerprint()])
        self.version = _digest([played, field_seed, _TRUTH])
        self._truths = Cache(DATA / f"{name}-truth.jsonl", played)
        self._catalogue = Cache(DATA / f"{name}-catalogue.jsonl", played)
        self._predictions = Cache(DATA / f"{name}-twin.jsonl", played)
        self._seen = Cache(DATA / f"{name}-seen.jsonl", self.version)

    def _twin_fingerprint(self) -> list[Any]:
        """What the twin says of some steps, and whose scheduler it plays: another twin makes another truth."""
        folder = config_folder(self.file)
        assert folder is not None
        shape = model_shape(read_model_config(folder))
        cost = StepCost(shape, find_device(machine_of(self.file).name), KernelChoice(tensor_parallel=4))
        loads = (
            StepLoad(0, 0.0, 0, 1, 500, 1),
            StepLoad(0, 0.0, 0, 64, 200000, 64),
            StepLoad(4096, 1e7, 9000, 8, 9000, 9),
        )
        return [vllm_version(), *([float(f"{s:.6g}") for s in cost.components(load)] for load in loads)]

    @cached_property
    def file(self) -> StudyFile:
        """The study that an operator would write."""
        path = DATA / f"{self.name}.yaml"
        return StudyFile(path, parse(self._document, path))

    @cached_property
    def space(self) -> Any:
        """The study's space, in the order in which everybody else's search has it."""
        return {name: parameter(values) for name, values in SPACE.items()}

    @cached_property
    def _base(self) -> EngineConfig:
        return base_config(self.file)

    @cached_property
    def _workload(self) -> Workload:
        return build_workload(self.file, Path("/tmp") / "search-benchmark").workload

    @cached_property
    def _player(self) -> Player:
        return Player(self._base, self._workload)

    @cached_property
    def _memory(self) -> Callable[[EngineConfig], MemoryPrediction | None]:
        return self._memory_after([])

    def _memory_after(self, trials: list[TrialRecord]) -> Callable[[EngineConfig], MemoryPrediction | None]:
        """Return the memory model that has learned from trials."""
        return memory_predictor(self.file, machine_of(self.file), lambda: History(None, tuple(trials), (), ()))

    # The truth ------------------------------------------------------------------------------------------------------

    def truth(self, changes: Changes) -> Truth:
        """Return what a configuration is worth; what was played once is not played again."""
        predicted = self._predicted_memory(changes)
        kv_gib = predicted.kv_gib - LESS_KV_GIB - LESS_KV_OF_ACTIVATION * predicted.activation_gib
        tokens = int(max(0.0, kv_gib) * 2**30 / predicted.kv_bytes_per_token)
        start_s = start_time(weights_gib=4 * predicted.weights_gib, on_cpu=False, eager=False).value
        short = relative_shortage(predicted.kv_tokens_needed, tokens)
        if predicted.kv_tokens >= predicted.kv_tokens_needed and predicted.violation > 0:
            short = max(short, predicted.violation)  # room for the pool, but not for what comes after it
        if short > 0:
            return Truth(None, short, start_s)
        settings = {**DEFAULT, **changes}
        ttft_s, tpot_s, run_s = self._player.played(self._truths, lambda: self._true_engine, settings, tokens)
        bent = self._field(settings)
        return Truth(
            (ttft_s * bent[0], tpot_s * bent[1]),
            short,
            start_s + run_s + STOP_S,
            weights_gib=predicted.weights_gib,
            kv_gib=kv_gib,
        )

    def noise(self, generator: np.random.Generator) -> Values:
        """Draw a measurement's noise; two measurements of the defaults of a real study were 4% and 6% apart."""
        return lognormal(0.05, generator)

    def _predicted_memory(self, changes: Changes) -> MemoryPrediction:
        predicted = self._memory(self._base.with_args({**DEFAULT, **changes}))
        assert predicted is not None
        return predicted

    @cached_property
    def _true_engine(self) -> TwinEngine:
        return self._engine(TruthEngine, Coefficients(TRUE_COEFFICIENTS))

    def _engine(self, kind: type[TwinEngine], coefficients: Coefficients) -> TwinEngine:
        folder = config_folder(self.file)
        assert folder is not None
        ample = KvPool(10**7, 100.0)  # what there is stands in num_gpu_blocks_override
        return kind(find_device(machine_of(self.file).name), folder, lambda _: ample, coefficients)

    # What is known ---------------------------------------------------------------------------------------------------

    def knowledge(self) -> Knowledge:
        """Return the memory model as a gate, the calibrated twin, and the recipes that fit."""
        return Knowledge(self._base, self._gate, self._predictor, first=self._recipes(), effective=EFFECTIVE)

    def _gate(self, history: Callable[[], History]) -> Gate:
        predict = memory_predictor(self.file, machine_of(self.file), history)
        return Gate(None, predict, longest_tokens=self._workload_tokens, memory="verify", num_gpus=4)

    @cached_property
    def _workload_tokens(self) -> int:
        return self._workload.longest_tokens

    def _recipes(self) -> list[tuple[str, Changes]]:
        found = []
        for name in self.file.spec.recipes:
            args = applicable(name, fixed=self.file.spec.engine.args, longest_tokens=self._workload_tokens, num_gpus=4)
            if not isinstance(args, Skipped):
                found.append((f"recipe:{name}", args))
        return found

    def _predictor(self, _: Callable[[], History]) -> Predictor:
        def predict(changes: Changes, basis: int) -> Values | None:
            settings = {**DEFAULT, **changes}
            is_calibrated = basis >= CALIBRATED_ON
            memory = (self._learned_memory if is_calibrated else self._memory)(self._base.with_args(settings))
            assert memory is not None
            if not memory.fits:
                return (math.inf, math.inf)
            if is_calibrated:
                return self._player.played(self._predictions, lambda: self._calibrated, settings, memory.kv_tokens)[:2]
            return self._player.played(self._catalogue, lambda: self._uncalibrated, settings, memory.kv_tokens)[:2]

        return predict

    @cached_property
    def _uncalibrated(self) -> TwinEngine:
        """The twin on the catalogue's clock."""
        return self._engine(TwinEngine, Coefficients())

    @cached_property
    def _calibrating(self) -> list[Changes]:
        """The first three trials that run."""
        wanted = (DEFAULT, *(c for _, c in self._recipes()), *design_points(self.space, 8, 0))
        return [c for c in wanted if self.truth(c).values is not None][:CALIBRATED_ON]

    @cached_property
    def _learned_memory(self) -> Callable[[EngineConfig], MemoryPrediction | None]:
        """The memory model as the tuner has it after them."""
        trials = enumerate(self._calibrating)
        return self._memory_after([record(i, self._base, {**DEFAULT, **c}, self.truth(c)) for i, c in trials])

    @cached_property
    def _calibrated(self) -> TwinEngine:
        """The twin calibrated on them as the tuner does it."""
        from tuner.engine.twin.calibrate import calibrate
        from tuner.engine.twin.replay import MeasuredTrial

        twin = self._uncalibrated
        kept = self._predictions.get("coefficients")
        if kept is None:
            trials: list[MeasuredTrial] = []
            for changes in self._calibrating:
                schedule = self._player.schedule({**DEFAULT, **changes}, self._predicted_memory(changes).kv_tokens)
                outcome = self._player.run(self._true_engine, schedule)
                config = self._base.with_args({**outcome.engine.effective_args})
                trials.append(MeasuredTrial(config, self._workload, outcome))
            kept = dict(calibrate(trials, twin).values)
            self._predictions.put("coefficients", kept)
        return twin.with_coefficients(Coefficients(kept))

    # What it is measured by -----------------------------------------------------------------------------------------

    def known_points(self) -> list[Values]:
        """Return the values of every configuration that a run or `widen` looked at, and that starts."""
        truths = [self.truth(c) for c in (*self._looked_at(), *design_points(self.space, PROBE_POINTS, 1))]
        return [t.values for t in truths if t.values is not None]

    def _looked_at(self) -> list[dict[str, Any]]:
        return [json.loads(key) for key in self._seen.known()]

    def note(self, changes: Changes) -> None:
        """Remember a configuration that was looked at, for what is best known."""
        if self._seen.get(key := key_of(changes)) is None:
            self._seen.put(key, 1)

    def widen(self, until_s: float) -> str:
        """Look at neighbours of the best known front until `time.monotonic()` says so; returns what came of it."""
        pool = [(c, t.values) for c in self._looked_at() if (t := self.truth(c)).values is not None]
        generator = np.random.default_rng(len(pool))
        tried = 0
        while time.monotonic() < until_s:
            pool = [pool[i] for i in front_of([values for _, values in pool])]
            for row in generator.choice(len(pool), size=min(len(pool), 16), replace=False):
                other = self._moved(pool[row][0], generator)
                truth = self.truth(other)
                tried += 1
                if truth.values is not None:
                    self.note(other)
                    pool.append((other, truth.values))
        return f"{tried} configurations tried, front of {len(pool)}"

    def _moved(self, changes: Changes, generator: np.random.Generator) -> dict[str, Any]:
        """Return a neighbour: one to three parameters some steps further."""
        other = {**DEFAULT, **changes}
        for name in generator.choice(list(SPACE), size=int(generator.integers(1, 4)), replace=False):
            p = self.space[str(name)]
            listed = list(p.ordered_choices) or [p.at_step(i) for i in range(int(p.cardinality))]
            place = int(np.argmin([abs(float(v) - float(other[str(name)])) for v in listed]))
            place += int(generator.choice([-2, -1, 1, 2]))
            other[str(name)] = listed[min(len(listed) - 1, max(0, place))]
        return {name: other[name] for name in SPACE}

    def corner(self) -> Values:
        """Return the reference point: from an even sample of the space, so that it does not move with what is known."""
        return _corner(self)


@cache
def _corner(problem: TwinProblem) -> Values:
    truths = [problem.truth(c) for c in design_points(problem.space, PROBE_POINTS, 1)]
    return corner_of([t.values for t in truths if t.values is not None])


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:8]


def _document(name: str, workload: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    return {
        "study": name,
        "model": document["model"],
        "model_config_file": "../../../examples/" + document["model_config_file"],
        "engine": {
            "backend": "twin",
            "device": "a6000",
            "args": {"tensor_parallel_size": 4, "max_cudagraph_capture_size": 512},
        },
        "resources": document["resources"],
        "workload": workload,
        "space": SPACE,
        "recipes": document["recipes"],
        "objectives": ["ttft_p95_s", "tpot_p95_s"],
        "budget": {"trials": 40},
    }


def long_documents() -> TwinProblem:
    """Problem (b): the example's documents, half as many with half the answer, arriving steadily."""
    workload = {
        "kind": "long_documents",
        "requests": 40,
        "prompt_tokens": {512: 16, 2048: 12, 8192: 8, 32768: 4},
        "output_tokens": 512,
        "arrivals": {"kind": "poisson", "rate_per_s": 0.15},
        "seed": 32,
    }
    return TwinProblem("a6000-long", "(b) 4×A6000, 32B, long documents", workload, 21)


def shared_prefixes() -> TwinProblem:
    """Problem (c): questions on shared documents, in bursts."""
    workload = {
        "kind": "shared_prefix",
        "requests": 60,
        "prefixes": 10,
        "prefix_tokens": [8192, 16384],
        "question_tokens": {256: 2, 2048: 1},
        "output_tokens": 256,
        "arrivals": {"kind": "gamma", "rate_per_s": 0.3, "burstiness": 0.25},
        "seed": 33,
    }
    return TwinProblem("a6000-shared", "(c) 4×A6000, 32B, shared prefixes, bursts", workload, 22)
