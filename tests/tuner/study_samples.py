"""A made-up study, the same on every machine: histories and study folders for the tests of tracking, report and CLI.

Thirty trials by default: the reference, complete ones along a trade-off, some refused by the gate, out of memory,
beyond a constraint, void, failed by the machine, one repeat of the reference, and one that still runs.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from objectives.measurement import (
    DeviceSample,
    EngineFacts,
    Failure,
    FailureKind,
    Measurement,
    RequestRecord,
    SpeedProbe,
    Stage,
    StepRecord,
)
from objectives.score import Score, VoidReason
from tuner import artifacts
from tuner.config import EngineConfig
from tuner.ledger import History, Ledger, StudyHeader, StudyNote, TrialLine, TrialRecord, TrialState, Verification

STUDY = "longdoc"
CREATED_AT = 1_795_000_000.0
TRIAL_S = 300.0
DEFAULTS = {"max_num_batched_tokens": 2048, "max_num_seqs": 128, "block_size": 16, "gpu_memory_utilization": 0.9}
CHOICES: dict[str, tuple[float, ...]] = {
    "max_num_batched_tokens": (256, 512, 1024, 2048, 4096, 8192),
    "max_num_seqs": (4, 8, 16, 32, 64, 128),
    "block_size": (16, 32),
    "gpu_memory_utilization": (0.8, 0.85, 0.9, 0.95),
}
GPU = "GPU-5b1f6c52-0d6c-4f0e-9e53-7a1c0f1f2a10"
ENGINE_LOG = """INFO 11-30 02:11:07 [core.py:94] Initializing a V1 LLM engine (v0.32.0)
INFO 11-30 02:11:31 [gpu_model_runner.py:2653] Model loading took 15.27 GiB and 21.4 seconds
INFO 11-30 02:11:50 [gpu_worker.py:298] Available KV cache memory: 0.41 GiB
ERROR 11-30 02:11:51 [core.py:708] ValueError: To serve at least one request with the models's max seq len (32768), \
(4.00 GiB KV cache is needed, which is larger than the available KV cache memory (0.41 GiB).
ERROR 11-30 02:11:52 [core_client.py:600] RuntimeError: Engine core initialization failed. See root cause above.
"""


def sample_history(trials: int = 30, seed: int = 0, predicted: bool = False, running: bool = True) -> History:
    """Build a history of `trials` trials; the last one runs when `running`."""
    records = [_record(number, seed, predicted) for number in range(trials)]
    if running and trials > 1:
        records[-1] = _running(records[-1])
    header = StudyHeader(STUDY, "5f0c2d1e9a7b4c33", "ab12cd34ef56ab78", "long documents", "0.32.0", "0.1.0", CREATED_AT)
    note = StudyNote("budget", "The budget of 30 trials is spent.", CREATED_AT + trials * TRIAL_S)
    return History(header, tuple(records), (), () if running else (note,))


def sample_verification(number: int) -> Verification:
    """Build a verification of trial `number`: TTFT better, TPOT no different."""
    return Verification(
        number=number,
        rounds=3,
        change={"ttft_p95_s": -0.31, "tpot_p95_s": 0.01},
        interval={"ttft_p95_s": (-0.36, -0.25), "tpot_p95_s": (-0.03, 0.05)},
        verdict={"ttft_p95_s": "better", "tpot_p95_s": "no difference"},
        over_http=True,
        finished_at=CREATED_AT + 20_000.0,
    )


def write_study(folder: Path, history: History, tables: bool = True) -> Ledger:
    """Write the ledger, the tables of measured trials and the logs of failed ones as a study leaves them."""
    ledger = Ledger(folder / "ledger.jsonl")
    if history.header is not None:
        ledger.append(history.header)
    for record in history.trials:
        ledger.append(TrialLine(record))
        place = folder / "trials" / str(record.number)
        if tables and record.score is not None:
            artifacts.save(sample_measurement(record), place)
        if record.failure is not None and record.failure.stage is not Stage.GATE:
            place.mkdir(parents=True, exist_ok=True)
            (place / "engine.log").write_text(ENGINE_LOG)
    for line in (*history.verifications, *history.notes):
        ledger.append(line)
    return ledger


def sample_measurement(record: TrialRecord, requests: int = 24) -> Measurement:
    """Build request, step and device rows that fit the trial's score."""
    assert record.engine is not None
    assert record.score is not None
    random_numbers = random.Random(record.number)
    ttft_s, tpot_s = record.score.values["ttft_p95_s"], record.score.values["tpot_p95_s"]
    rows = []
    for index in range(requests):
        prompt_tokens = 512 * (1 + index % 6)
        first_s = index + ttft_s * (0.25 + prompt_tokens / 4096) * random_numbers.uniform(0.8, 1.2)
        gap_s = tpot_s * random_numbers.uniform(0.6, 1.0)
        times = tuple(first_s + k * gap_s for k in range(16))
        rows.append(
            RequestRecord(
                f"{record.number}-{index}",
                prompt_tokens,
                16,
                float(index),
                index + 0.001,
                index + 0.002,
                index + 0.01,
                times[0],
                times[-1],
                0,
                "length",
                token_times_s=times,
            )
        )
    end_s = max(row.last_token_s or 0.0 for row in rows)
    steps = tuple(
        StepRecord(k * end_s / 60, end_s / 60, 256, 4, 4, k % 5, 0.3 + 0.5 * math.sin(k / 20) ** 2, 0, 0, 0)
        for k in range(60)
    )
    devices = tuple(
        DeviceSample(k * 0.5, GPU, 40.0 + 0.01 * k, 47.5, 0.9, 280.0, 60.0 + k / 40, 1700.0 - k / 4, 0)
        for k in range(240)
    )
    return Measurement(
        record.engine,
        "ab12cd34ef56ab78",
        tuple(rows),
        steps,
        devices,
        (end_s,),
        record.speed_before,
        record.speed_after,
        record.predicted,
    )


def _record(number: int, seed: int, predicted: bool) -> TrialRecord:
    random_numbers = random.Random(seed * 1000 + number)
    params = {name: random_numbers.choice(choices) for name, choices in CHOICES.items()}
    source, repeats = "sampler" if number > 8 else "design", None
    if number == 0:
        params, source = dict(DEFAULTS), "reference"
    elif number == 20:
        params, source, repeats = dict(DEFAULTS), "sentinel", 0
    config = EngineConfig({"model": "Qwen/Qwen3-32B", "max_model_len": 32768, **params})
    started_at = CREATED_AT + number * TRIAL_S
    record = TrialRecord(
        number=number,
        state=TrialState.COMPLETE,
        source=source,
        params=params,
        config=config,
        started_at=started_at,
        finished_at=started_at + TRIAL_S - 10.0,
        score=_score(params, random_numbers),
        engine=_facts(config, predicted),
        speed_before=SpeedProbe(0.21, 0.031),
        speed_after=SpeedProbe(0.21 + 0.01 * math.sin(number / 5), 0.031),
        engine_s=TRIAL_S - 20.0,
        predicted=predicted,
        repeats=repeats,
    )
    return _with_outcome(record)


def _with_outcome(record: TrialRecord) -> TrialRecord:
    """Give some numbers another outcome than complete, one of each kind in every seven."""
    if record.number in (0, 20):
        return record
    unmeasured: dict[str, Any] = {"score": None, "engine": None, "speed_before": None, "speed_after": None}
    match record.number % 14:
        case 3:
            failure = Failure(FailureKind.OOM_KV_CACHE, Stage.GATE, "The KV cache would hold 0.4 of 4.0 GiB.", 4.0, 0.4)
            return _changed(
                record, state=TrialState.INFEASIBLE, failure=failure, engine_s=0.0, finished_at=record.started_at + 1.0,
                **unmeasured,
            )  # fmt: skip
        case 6:
            text = "4.00 GiB KV cache is needed, which is larger than the available KV cache memory (0.41 GiB)."
            failure = Failure(FailureKind.OOM_KV_CACHE, Stage.KV_CACHE, text, 4.0, 0.41, 3344)
            return _changed(record, state=TrialState.INFEASIBLE, failure=failure, **unmeasured)
        case 8:
            assert record.score is not None
            score = Score(
                record.score.values, record.score.intervals, {**record.score.violations, "ttft_p99_s <= 20": 0.34}
            )
            return _changed(record, state=TrialState.INFEASIBLE, score=score)
        case 10:
            assert record.score is not None
            void = (VoidReason("client_late", "The client sent 5 of 24 requests more than 50 ms late.", 5.0),)
            score = Score(record.score.values, record.score.intervals, record.score.violations, void)
            return _changed(record, state=TrialState.VOID, score=score)
        case 12:
            failure = Failure(FailureKind.HUNG, Stage.GRAPH_CAPTURE, "No progress for 1800 s.")
            return _changed(record, state=TrialState.FAILED, failure=failure, **unmeasured)
    return record


def _changed(record: TrialRecord, **changes: Any) -> TrialRecord:
    values = {name: getattr(record, name) for name in record.__dataclass_fields__}
    return TrialRecord(**{**values, **changes})


def _running(record: TrialRecord) -> TrialRecord:
    return _changed(
        record,
        state=TrialState.RUNNING,
        finished_at=None,
        score=None,
        failure=None,
        engine=None,
        speed_before=None,
        speed_after=None,
        engine_s=0.0,
    )


def _score(params: dict[str, float], random_numbers: random.Random) -> Score:
    """A trade-off like that of a scheduler: larger batches of prompt tokens shorten TTFT and lengthen TPOT."""
    chunk, seqs = params["max_num_batched_tokens"], params["max_num_seqs"]
    noise = [random_numbers.gauss(1.0, 0.02) for _ in range(2)]
    ttft_s = (0.8 + 900.0 / chunk + 20.0 / seqs + 0.004 * seqs) * noise[0]
    tpot_s = (0.03 + chunk / 150_000 + seqs / 2500 + 0.002 * (params["block_size"] == 32)) * noise[1]
    values = {
        "ttft_p95_s": ttft_s,
        "ttft_mean_s": ttft_s * 0.6,
        "tpot_p95_s": tpot_s,
        "tpot_mean_s": tpot_s * 0.8,
        "e2el_p95_s": ttft_s + 16 * tpot_s,
        **{f"ttft_p95_s@{tokens}": ttft_s * (0.3 + tokens / 4096) for tokens in (512, 1024, 2048, 3072)},
        "requests_per_s": 1.0 / (1.0 + ttft_s / 10),
        "output_tokens_per_s": 16.0 / (1.0 + ttft_s / 10),
    }
    intervals = {name: (value * 0.94, value * 1.07) for name, value in values.items()}
    headroom = (params["gpu_memory_utilization"] - 1.0) * 0.5
    notes = ("ttft_p95_s rests on 24 requests; the interval is wide.",)
    return Score(values, intervals, {"memory": headroom, "ttft_p99_s <= 20": ttft_s / 20.0 - 1.0}, notes=notes)


def _facts(config: EngineConfig, predicted: bool) -> EngineFacts:
    return EngineFacts(
        engine="twin" if predicted else "vllm",
        vllm_version="0.32.0",
        device_name="NVIDIA RTX A6000",
        device_count=4,
        model="Qwen/Qwen3-32B",
        start_s=95.0,
        kv_tokens=118_000,
        kv_gib=28.9,
        kv_tokens_needed=32768,
        weights_gib=15.3,
        max_model_len=32768,
        warmup_s=12.0,
        stop_s=4.0,
        effective_args={**config.args, "enable_prefix_caching": True, "dtype": "bfloat16"},
    )
