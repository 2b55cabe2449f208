"""What the classifier makes of failures: every known phrase in whole logs, and laws that hold for any text."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_logs import (
    AFTERMATH,
    CORE,
    DEATH_AT_RUN,
    NOISE,
    REACHED,
    WORKERS,
    failed,
    interleave,
    start,
    traceback,
)

from objectives.measurement import FailureKind, Stage
from tuner.engine.failures import classify, stage_line, watchdog_line

DATA = Path(__file__).parents[2] / "data"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 47.41 GiB "
    "of which 1.25 GiB is free."
)
OOM_AT = {
    Stage.CONFIG: FailureKind.OOM_WEIGHTS,
    Stage.WEIGHTS: FailureKind.OOM_WEIGHTS,
    Stage.PROFILE: FailureKind.OOM_PROFILE,
    Stage.KV_CACHE: FailureKind.OOM_GRAPH_CAPTURE,
    Stage.GRAPH_CAPTURE: FailureKind.OOM_GRAPH_CAPTURE,
    Stage.WARMUP: FailureKind.OOM_WARMUP,
    Stage.RUN: FailureKind.OOM_RUNTIME,
}
KIND_OF_CLASS = {
    "oom-profile": FailureKind.OOM_PROFILE,
    "kv-too-small": FailureKind.OOM_KV_CACHE,
    "startup-free-memory-too-low": FailureKind.MEMORY_NOT_FREE,
    "invalid-config": FailureKind.INVALID_CONFIG,
    "nccl/distributed": FailureKind.COMMUNICATION,
    "hang/timeout": FailureKind.HUNG,
    "port-in-use": FailureKind.PORT_IN_USE,
    "model-not-found/gated": FailureKind.MODEL_UNAVAILABLE,
    "driver/gpu lost": FailureKind.DEVICE_LOST,
    "worker died": FailureKind.CRASHED,
    "host OOM-killer": FailureKind.HOST_MEMORY,
}


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


SIGNATURES = {row["id"]: row for row in rows("failure_signatures.jsonl")}
TERMINAL = [row for row in SIGNATURES.values() if row["terminal"]]
TEXTS = rows("failure_texts.jsonl")


def as_worker_error(text: str) -> list[str]:
    return interleave(traceback(WORKERS[1], text), traceback(WORKERS[0], "RuntimeError: cancelled"))


def as_bare_line(text: str) -> list[str]:
    return text.splitlines()


def expected_kind(row: dict[str, Any], stage: Stage) -> FailureKind:
    if row.get("needs_stage") or row.get("kind") == "device_memory":
        return OOM_AT[stage]
    return FailureKind(row["kind"]) if "kind" in row else KIND_OF_CLASS[row["class"]]


@pytest.mark.parametrize("embed", [as_worker_error, as_bare_line])
@pytest.mark.parametrize("row", TERMINAL, ids=lambda row: row["id"])
def test_every_terminal_signature_is_recognised_in_a_whole_log(row: dict[str, Any], embed: Any) -> None:
    for stage in (Stage.CONFIG, Stage.WEIGHTS, Stage.PROFILE):
        if row["class"] == "oom-profile" and stage is not Stage.PROFILE:
            continue
        failure = classify(failed(embed(row["phrase"]), stage))

        assert failure.kind is expected_kind(row, stage), stage


@pytest.mark.parametrize("embed", [as_worker_error, as_bare_line])
@pytest.mark.parametrize("row", TEXTS, ids=lambda row: row["text"][:50])
def test_other_texts_of_the_same_kinds_are_recognised_with_their_figures(row: dict[str, Any], embed: Any) -> None:
    for stage in (Stage.CONFIG, Stage.GRAPH_CAPTURE):
        failure = classify(failed(embed(row["text"]), stage))

        assert failure.kind is expected_kind(row, stage), (stage, failure)
        figures = (failure.needed_gib, failure.available_gib, failure.fitting_tokens)
        left = 10.25 if row["kind"] == "oom_kv_cache" and stage is Stage.GRAPH_CAPTURE else None
        assert figures == (row.get("needed_gib"), row.get("available_gib", left), row.get("fitting_tokens"))


@pytest.mark.parametrize("stage", REACHED)
@pytest.mark.parametrize("row", [row for row in TERMINAL if row.get("needs_stage")], ids=lambda row: row["id"])
def test_generic_out_of_memory_becomes_the_kind_of_the_last_progress_line(row: dict[str, Any], stage: Stage) -> None:
    failure = classify(failed(as_worker_error(row["phrase"]), stage))

    assert failure.kind is OOM_AT[stage]


def test_stage_of_other_kinds_is_the_last_progress_line_too() -> None:
    for stage in REACHED:
        failure = classify(failed(as_worker_error("OSError: [Errno 28] No space left on device"), stage))

        assert (failure.kind, failure.stage) == (FailureKind.HOST_DISK, stage)


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        (("_initialize_kv_caches", "determine_available_memory", "profile_run"), FailureKind.OOM_PROFILE),
        (("determine_available_memory", "profile_cudagraph_memory"), FailureKind.OOM_GRAPH_CAPTURE),
        (("compile_or_warm_up_model", "capture_model"), FailureKind.OOM_GRAPH_CAPTURE),
        (("initialize_from_config", "_allocate_kv_cache_tensors"), FailureKind.OOM_PROFILE),
        (("load_model", "process_weights_after_loading"), FailureKind.OOM_WEIGHTS),
        (("compile_or_warm_up_model", "_dummy_sampler_run"), FailureKind.OOM_WARMUP),
        (("_initialize_kv_caches", "initialize_from_config", "compile_or_warm_up_model"), FailureKind.OOM_WARMUP),
        (("initialize_from_config", "compile_or_warm_up_model", "capture_model"), FailureKind.OOM_GRAPH_CAPTURE),
        (("run_busy_loop", "_process_engine_step", "execute_model"), FailureKind.OOM_RUNTIME),
    ],
)
def test_functions_in_the_traceback_tell_the_stage_better_than_progress_lines(
    frames: tuple[str, ...], kind: FailureKind
) -> None:
    for reached in (Stage.PROFILE, Stage.KV_CACHE, Stage.WARMUP):
        log = failed(interleave(traceback(WORKERS[1], OOM, frames), traceback(WORKERS[0], "cancelled")), reached)

        assert classify(log).kind is kind


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        ("f06", FailureKind.OOM_GRAPH_CAPTURE),
        ("f07", FailureKind.OOM_GRAPH_CAPTURE),
        ("f08", FailureKind.OOM_PROFILE),
        ("f11", FailureKind.OOM_PROFILE),
    ],
)
def test_signature_frames_decide_only_together_with_an_out_of_memory_line(frame: str, kind: FailureKind) -> None:
    phrase = SIGNATURES[frame]["phrase"]

    assert classify(failed([WORKERS[0].error(phrase), WORKERS[0].error(OOM)], Stage.KV_CACHE)).kind is kind
    assert classify(failed([WORKERS[0].error(phrase)], Stage.KV_CACHE)).kind is FailureKind.CRASHED


def test_eager_engine_out_of_memory_after_the_kv_cache_was_warming_up() -> None:
    log = failed(as_worker_error(OOM), Stage.KV_CACHE, eager=True)

    assert classify(log).kind is FailureKind.OOM_WARMUP


def test_rank_that_is_behind_its_sibling_fails_in_its_own_stage() -> None:
    ahead = [line for line in start(Stage.PROFILE) if "TP0" in line]
    behind = [line for line in start(Stage.WEIGHTS) if "TP1" in line]
    log = "\n".join([*behind, *ahead, *traceback(WORKERS[1], OOM), *AFTERMATH])

    assert classify(log).kind is FailureKind.OOM_WEIGHTS


def test_rank_that_writes_no_progress_is_where_its_sibling_is() -> None:
    log = "\n".join([*start(Stage.PROFILE, workers=WORKERS[:1]), *traceback(WORKERS[1], OOM), *AFTERMATH])

    assert classify(log).kind is FailureKind.OOM_PROFILE


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        ("INFO 01-11 10:00:00 model_runner.py:1100] Starting to load model org/m...", FailureKind.OOM_WEIGHTS),
        ("INFO 01-11 10:00:09 model_runner.py:1105] Loading model weights took 14.9888 GB", FailureKind.OOM_PROFILE),
        (
            "INFO 08-11 10:00:09 [backends.py:215] Compiling a graph for shape 1",
            FailureKind.OOM_PROFILE,
        ),
        ("INFO 01-11 10:00:12 worker.py:241] Memory profiling takes 1.90 seconds", FailureKind.OOM_GRAPH_CAPTURE),
        (
            "INFO 01-11 10:00:13 runner.py:1415] Capturing the model for CUDA graphs",
            FailureKind.OOM_GRAPH_CAPTURE,
        ),
        ("INFO 01-11 10:00:33 [launcher.py:27] Starting vLLM API server on http://0.0.0.0:80", FailureKind.OOM_WARMUP),
        ("INFO:     Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C to quit)", FailureKind.OOM_RUNTIME),
    ],
)
def test_progress_lines_of_older_versions_and_servers_tell_the_stage_too(last: str, kind: FailureKind) -> None:
    assert classify(f"{last}\nERROR 01-11 10:01:00 engine.py:366] {OOM}").kind is kind


@pytest.mark.parametrize("phrase", ["sampler with 1024 dummy requests.", "pooler (num_reqs=512)."])
def test_warm_up_of_sampler_or_pooler_is_profiling_before_the_kv_cache_and_warm_up_after_the_graphs(
    phrase: str,
) -> None:
    evidence = as_worker_error(f"RuntimeError: CUDA out of memory occurred when warming up {phrase}")

    assert classify(failed(evidence, Stage.PROFILE)).kind is FailureKind.OOM_PROFILE
    assert classify(failed(evidence, Stage.WARMUP)).kind is FailureKind.OOM_WARMUP


def test_stage_lines_of_the_tuner_tell_its_own_warm_up_from_the_run() -> None:
    evidence = traceback(CORE, OOM, ("run_busy_loop", "_process_engine_step"))
    engine = start(Stage.WARMUP)

    in_warmup = classify("\n".join([*engine, stage_line(Stage.WARMUP), *evidence]))
    in_run = classify("\n".join([*engine, stage_line(Stage.WARMUP), stage_line(Stage.RUN), *evidence]))

    assert (in_warmup.kind, in_run.kind) == (FailureKind.OOM_WARMUP, FailureKind.OOM_RUNTIME)


@pytest.mark.parametrize("lines", [AFTERMATH, DEATH_AT_RUN])
def test_wrappers_alone_mean_crashed(lines: tuple[str, ...]) -> None:
    assert classify("\n".join([*start(Stage.PROFILE), *lines])).kind is FailureKind.CRASHED


@pytest.mark.parametrize("stage", REACHED)
def test_noise_alone_never_decides(stage: Stage) -> None:
    failure = classify("\n".join([*NOISE, *start(stage), *NOISE]))

    assert (failure.kind, failure.stage) == (FailureKind.CRASHED, stage)


def test_benign_signatures_never_decide() -> None:
    for name in ("f42", "f64"):
        assert classify(failed([SIGNATURES[name]["phrase"]], Stage.WEIGHTS)).kind is FailureKind.CRASHED


@pytest.mark.parametrize(
    "consequence",
    [
        "RuntimeError: NCCL error: remote process exited or there was a network error",
        "TimeoutError: RPC call to execute_model timed out.",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.4]:41234",
        "AssertionError",
        "Worker proc VllmWorker-1 died unexpectedly (exit code: 1), shutting down executor.",
    ],
)
def test_cause_wins_over_a_consequence_that_was_written_first(consequence: str) -> None:
    evidence = [*traceback(WORKERS[0], consequence), *traceback(WORKERS[1], OOM)]

    assert classify(failed(evidence, Stage.PROFILE)).kind is FailureKind.OOM_PROFILE


def test_first_of_two_causes_wins() -> None:
    evidence = [
        *traceback(WORKERS[1], "OSError: [Errno 28] No space left on device"),
        *traceback(WORKERS[0], "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ]

    assert classify(failed(evidence, Stage.PROFILE)).kind is FailureKind.HOST_DISK


def test_refused_argument_is_no_explanation_of_a_defect_in_the_middle_of_a_run() -> None:
    for text in ("AssertionError", "ValueError: list.remove(x): x not in list"):
        log = failed(traceback(CORE, text, ("run_busy_loop",)), Stage.RUN)

        assert classify(log).kind is FailureKind.CRASHED


def test_advice_that_names_the_memory_killer_is_no_evidence_of_it() -> None:
    advice = (
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
        "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the "
        "process was killed by the OOM killer due to high memory usage, (2) ray stop --force was called"
    )

    assert classify(advice, -9).kind is FailureKind.CRASHED


@pytest.mark.parametrize("exit_code", [-9, 137, -11, 1, 0, None])
def test_exit_code_alone_is_a_crash(exit_code: int | None) -> None:
    failure = classify("", exit_code)

    assert failure.kind is FailureKind.CRASHED
    assert failure.message
    assert (str(exit_code) in failure.message) == bool(exit_code)


def test_killed_process_is_host_memory_only_with_evidence() -> None:
    log = "\n".join(start(Stage.WEIGHTS))

    assert classify(log, -9).kind is FailureKind.CRASHED
    assert (
        classify(log + "\n[812.3] oom-kill:constraint=CONSTRAINT_MEMCG,task=VLLM", -9).kind is FailureKind.HOST_MEMORY
    )


def test_overdrawn_engine_reports_what_was_left_for_the_cache() -> None:
    lines = [*start(Stage.KV_CACHE)[:-2], CORE.info("gpu_worker.py:760", "Available KV cache memory: -1.50 GiB")]
    log = "\n".join([*lines, *traceback(CORE, "ValueError: No available memory for the cache blocks.")])

    assert classify(log).available_gib == -1.5


def test_figures_on_the_line_below_the_evidence_are_read() -> None:
    text = (
        "RuntimeError: CUDA out of memory.\nTried to allocate 20.00 MiB.\nGPU 0 has 44 GiB, of which 10.00 MiB is free."
    )

    failure = classify(failed(as_worker_error(text), Stage.PROFILE))

    assert failure.needed_gib == pytest.approx(20 / 1024)
    assert failure.available_gib == pytest.approx(10 / 1024)


def test_message_of_a_pydantic_report_is_the_line_that_names_the_reason() -> None:
    text = (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig\n"
        "  Value error, max_num_batched_tokens (64) is odd. [type=value_error, input_value=ArgsKwargs(())]"
    )

    assert classify(failed(as_worker_error(text), Stage.CONFIG)).message.startswith("Value error, max_num_batched")


def test_message_is_free_of_colours_and_prefixes() -> None:
    log = (
        f"\x1b[0;36m(EngineCore pid=9)\x1b[0;0m \x1b[31mERROR\x1b[0m 11-30 02:00:00 \x1b[90m[core.py:1510]\x1b[0m {OOM}"
    )

    assert classify(log).message == OOM


def test_watchdog_line_means_hung_unless_the_log_names_a_cause() -> None:
    ended = watchdog_line("start engine", 1800)

    assert classify("\n".join([*start(Stage.PROFILE), ended])).kind is FailureKind.HUNG
    assert classify("\n".join([*start(Stage.PROFILE), *as_worker_error(OOM), ended])).kind is FailureKind.OOM_PROFILE


def test_hang_while_the_ranks_meet_is_communication() -> None:
    log = "\n".join([*NOISE, *start(Stage.CONFIG), watchdog_line("start engine", 1800)])

    assert classify(log).kind is FailureKind.COMMUNICATION


def test_second_engine_in_a_process_is_not_the_configurations_fault() -> None:
    text = "ValueError: Duplicated timeseries in CollectorRegistry: {'vllm:num_requests_running'}"

    assert not classify(failed(as_worker_error(text), Stage.CONFIG)).kind.is_configuration_fault


@pytest.mark.parametrize("path", sorted((DATA / "engine_logs").glob("*.log")), ids=lambda path: path.stem)
def test_real_logs_of_provoked_failures_are_recognised(path: Path) -> None:
    failure = classify(path.read_text(encoding="utf-8"))

    assert failure.kind is FailureKind(path.name.split(".", maxsplit=1)[0])


@pytest.mark.parametrize("line_end", ["\r\n", "\r", "\n\n"])
@pytest.mark.parametrize(
    "prefix",
    [
        "2026-11-30T02:00:00.123456789Z stdout F ",
        "vllm-1  | ",
        "(EngineActor pid=7) ",
        "\x1b[36m(EngineHost pid=77, ip=10.0.0.3)\x1b[0m ",
        "[pod/vllm-7f9c-abcde/vllm] ",
        "Nov 30 02:12:01 gpu-box vllm[4242]: ",
        "[default0]:",
    ],
)
def test_what_wraps_the_lines_does_not_matter(prefix: str, line_end: str) -> None:
    log = failed(as_worker_error(OOM), Stage.PROFILE)
    wrapped = line_end.join(prefix + line for line in log.split("\n"))

    assert classify(wrapped).kind is FailureKind.OOM_PROFILE


@pytest.mark.parametrize(
    "wrap",
    [
        lambda line: {"log": line + "\n", "stream": "stderr", "time": "2026-11-30T02:00:00Z"},
        lambda line: {"asctime": "2026-11-30 02:00:00", "message": line},
        lambda line: {"severity": "ERROR" if " ERROR " in line else "INFO", "msg": line},
    ],
    ids=["container", "logger", "logger with level"],
)
def test_lines_that_are_json_records_are_read_as_what_they_carry(wrap: Any) -> None:
    log = failed(traceback(WORKERS[1], OOM, ("load_model",)), Stage.WEIGHTS)
    wrapped = "\n".join(json.dumps(wrap(line)) for line in log.splitlines())

    assert classify(wrapped) == classify(log)


def test_traceback_inside_a_json_record_is_evidence() -> None:
    start_up = [json.dumps({"level": "INFO", "message": line}) for line in start(Stage.WEIGHTS)]
    trace = f"Traceback (most recent call last):\n  File 'a.py', line 3, in load_model\n    x = empty(3)\n{OOM}"
    log = "\n".join([*start_up, json.dumps({"level": "error", "message": "Worker failed.", "exc_info": trace})])

    failure = classify(log)

    assert (failure.kind, failure.message) == (FailureKind.OOM_WEIGHTS, OOM)


def test_message_out_of_a_json_record_can_be_written_down() -> None:
    record = '{"level": "ERROR", "message": "OSError: [Errno 28] No space left on device \\ud83d"}'

    assert classify(record).message.encode().startswith(b"OSError: [Errno 28] No space left on device")


def test_error_that_its_process_overcame_is_not_the_cause() -> None:
    refused = CORE.error(
        "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://x"
    )
    no_cache = traceback(CORE, "ValueError: No available memory for the cache blocks.", ("_initialize_kv_caches",))

    assert classify("\n".join([refused, *start(Stage.KV_CACHE), *no_cache])).kind is FailureKind.OOM_KV_CACHE
    assert classify("\n".join([refused, *start(Stage.RUN), *DEATH_AT_RUN])).kind is FailureKind.CRASHED
    assert classify("\n".join([*start(Stage.CONFIG), refused, *AFTERMATH])).kind is FailureKind.MODEL_UNAVAILABLE


def test_progress_after_an_error_leaves_it_the_likeliest_reason_where_nothing_else_is_one() -> None:
    lines = [*start(Stage.WEIGHTS), *traceback(WORKERS[0], OOM), *start(Stage.PROFILE)[-2:], *AFTERMATH]

    assert classify("\n".join(lines)).kind is FailureKind.OOM_WEIGHTS


def test_progress_of_a_sibling_does_not_excuse_an_error() -> None:
    behind = [line for line in start(Stage.WEIGHTS) if "TP1" in line]
    ahead = [line for line in start(Stage.GRAPH_CAPTURE) if "TP0" in line]
    log = "\n".join([*behind, *traceback(WORKERS[1], OOM), *ahead, *AFTERMATH])

    assert classify(log).kind is FailureKind.OOM_WEIGHTS


def test_prompts_in_the_log_of_requests_decide_nothing() -> None:
    prompt = (
        '(APIServer pid=1) INFO 11-30 02:14:10 [logger.py:39] Received request cmpl-1: prompt: "CUDA out of memory. '
        'ValueError: No space left on device. Address already in use", params: SamplingParams(n=1)'
    )

    assert classify("\n".join([*start(Stage.RUN), prompt, *DEATH_AT_RUN])).kind is FailureKind.CRASHED


@given(st.text())
def test_any_text_gets_an_answer(text: str) -> None:
    assert classify(text).message


@given(st.binary())
def test_binary_garbage_gets_an_answer(data: bytes) -> None:
    assert classify(data.decode("utf-8", "surrogateescape")).message
    assert classify(data.decode("latin-1")).message


@given(st.lists(st.sampled_from([*NOISE, *AFTERMATH, *DEATH_AT_RUN, OOM, *(row["text"] for row in TEXTS)])))
def test_message_is_part_of_one_line_of_the_log(lines: list[str]) -> None:
    message = classify("\n".join(lines)).message

    assert not lines or any(message in re.sub(r"\x1b\[[\d;]*\w", "", line) for line in lines)


@settings(max_examples=60, deadline=None)
@given(
    row=st.sampled_from([*TERMINAL, *TEXTS]),
    before=st.lists(st.sampled_from(NOISE), max_size=8),
    after=st.lists(st.sampled_from(NOISE), max_size=8),
)
def test_benign_lines_before_and_after_change_nothing(row: dict[str, Any], before: list[str], after: list[str]) -> None:
    evidence = [*start(Stage.PROFILE), *as_worker_error(row.get("phrase") or row["text"])]

    assert classify("\n".join([*before, *evidence, *after])) == classify("\n".join(evidence))


@pytest.mark.parametrize(
    "log",
    [
        "x" * 1_000_000,
        "(" * 1_000_000,
        "out of memory " * 100_000,
        "a." * 500_000,
        "ValueError: must be greater than " * 40_000,
        "\n".join(["ERROR: ValueError: this must be supported, retrying"] * 20_000),
        "\n".join([*start(Stage.WARMUP), *["  File 'x', line 1, in run_busy_loop", "ValueError: x must be"] * 20_000]),
        "\r" * 1_000_000,
    ],
    ids=["one line", "parentheses", "one phrase", "dots", "one refusal", "benign", "tracebacks", "returns"],
)
def test_a_megabyte_takes_seconds_at_worst_whatever_is_in_it(log: str) -> None:
    began_s = time.process_time()

    classify(log)

    assert time.process_time() - began_s < 4.0


def test_a_real_megabyte_takes_well_under_a_second() -> None:
    log = "\n".join([*NOISE, *start(Stage.RUN)] * 200 + traceback(CORE, OOM))
    began_s = time.process_time()

    assert classify(log).kind is FailureKind.OOM_RUNTIME
    assert (time.process_time() - began_s) / (len(log) / 2**20) < 1.0
