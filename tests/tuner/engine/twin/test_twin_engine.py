from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from twin_samples import QWEN_32B, SMOLLM2, cpu_config, poisson

from objectives.early_end import bar
from objectives.measurement import Failure, FailureKind, Measurement, SpeedProbe, Stage
from tuner.config import EngineConfig
from tuner.engine.protocol import MeasurePlan
from tuner.engine.twin.devices import find_device
from tuner.engine.twin.engine import TwinEngine
from tuner.engine.twin.memory import GIB, KvPool
from tuner.errors import EngineUnsupportedError, UsageError
from tuner.workload.model import Request, Workload

Measure = Callable[..., Measurement]

TINY_POOL_BYTES = 48 * 2**20
"""2,184 tokens of the 135M model: one request of 2,048, but not several."""


def run(twin: TwinEngine, config: EngineConfig, workload: Workload, **plan: Any) -> Measurement | Failure:
    return twin.run(config, workload, MeasurePlan(**plan), lambda _: None)


def ttft_s(measurement: Measurement) -> float:
    return statistics.mean((r.first_token_s or 0.0) - r.scheduled_s for r in measurement.requests)


def test_every_token_of_every_request_is_produced_in_order(measure: Measure) -> None:
    workload = poisson(30, 2.0)
    measurement = measure(workload)
    assert [r.output_tokens for r in measurement.requests] == [q.output_tokens for q in workload.requests]
    assert [r.prompt_tokens for r in measurement.requests] == [q.prompt_tokens for q in workload.requests]
    for record in measurement.requests:
        assert record.queued_s is not None
        assert record.first_scheduled_s is not None
        assert record.first_token_s is not None
        assert record.scheduled_s <= record.sent_s <= record.queued_s <= record.first_scheduled_s
        assert record.first_scheduled_s < record.first_token_s
        assert all(a < b for a, b in pairwise(record.token_times_s))
        assert record.token_times_s[-1] == record.last_token_s


def test_run_that_the_front_is_certain_to_beat_is_ended_early_also_here(twin: TwinEngine) -> None:
    workload = poisson(30, 20.0)
    tight = bar(3, {"ttft_p95_s": 1e-6, "tpot_p95_s": 1e-6}, {})

    lost = run(twin, cpu_config(), workload, bars=(tight,))

    assert isinstance(lost, Failure)
    assert lost.kind is FailureKind.DOMINATED
    assert isinstance(run(twin, cpu_config(), workload, bars=(bar(3, {"ttft_p95_s": 1e6}, {}),)), Measurement)


def test_what_is_predicted_says_so(measure: Measure) -> None:
    measurement = measure(poisson(3, 2.0))
    assert measurement.predicted
    assert measurement.engine.engine == "twin"


def test_steps_account_for_every_token(measure: Measure) -> None:
    workload = poisson(30, 2.0)
    steps = measure(workload).steps
    assert sum(s.prefill_tokens for s in steps) == sum(q.prompt_tokens for q in workload.requests)
    assert sum(s.decode_tokens for s in steps) == sum(q.output_tokens - 1 for q in workload.requests)


def test_clock_never_goes_back(measure: Measure) -> None:
    steps = measure(poisson(30, 2.0)).steps
    assert all(a.start_s + a.duration_s <= b.start_s for a, b in pairwise(steps))
    assert all(s.duration_s > 0 for s in steps)


@pytest.mark.parametrize("tokens", [64, 256, 2048])
def test_no_step_exceeds_max_num_batched_tokens(measure: Measure, tokens: int) -> None:
    steps = measure(poisson(20, 5.0), max_num_batched_tokens=tokens).steps
    assert max(s.prefill_tokens + s.decode_tokens for s in steps) == tokens


@pytest.mark.parametrize("seqs", [1, 3, 8])
def test_no_more_than_max_num_seqs_run(measure: Measure, seqs: int) -> None:
    steps = measure(poisson(20, 50.0), max_num_seqs=seqs).steps
    assert max(s.running for s in steps) == seqs
    assert max(s.decode_tokens for s in steps) <= seqs


def test_shared_prefixes_hit_the_prefix_cache(measure: Measure) -> None:
    measurement = measure(poisson(10, 0.5, shared_tokens=128), enable_prefix_caching=True)
    assert [r.cached_tokens for r in measurement.requests] == [0] + [128] * 9
    assert sum(s.prefix_hits for s in measurement.steps) == 9 * 128
    assert sum(s.prefix_queries for s in measurement.steps) == sum(r.prompt_tokens for r in measurement.requests)


def test_private_prompts_hit_nothing(measure: Measure) -> None:
    measurement = measure(poisson(10, 0.5), enable_prefix_caching=True)
    assert {r.cached_tokens for r in measurement.requests} == {0}


def test_shared_prefixes_hit_nothing_with_the_cache_off(measure: Measure) -> None:
    measurement = measure(poisson(10, 0.5, shared_tokens=128), enable_prefix_caching=False)
    assert {r.cached_tokens for r in measurement.requests} == {0}


def test_each_repeat_starts_with_an_empty_prefix_cache(measure: Measure) -> None:
    measurement = measure(poisson(4, 0.5, shared_tokens=128), repeats=2, enable_prefix_caching=True)
    assert [(r.repeat, r.cached_tokens) for r in measurement.requests] == [
        (repeat, cached) for repeat in (0, 1) for cached in (0, 128, 128, 128)
    ]
    assert len(measurement.duration_s) == 2


def test_a_tiny_pool_preempts_and_still_serves_everyone(measure: Measure) -> None:
    workload = poisson(12, 50.0, prompt_tokens=(250, 300), output_tokens=200)
    measurement = measure(workload, kv_cache_memory_bytes=TINY_POOL_BYTES)
    preemptions = sum(r.preemptions for r in measurement.requests)
    assert preemptions > 0
    assert sum(s.preemptions for s in measurement.steps) == preemptions
    assert all(r.output_tokens == 200 for r in measurement.requests)
    assert max(s.kv_usage for s in measurement.steps) > 0.9


def test_a_higher_rate_means_a_longer_wait_for_the_first_token(measure: Measure) -> None:
    waits = [ttft_s(measure(poisson(40, rate))) for rate in (0.1, 1.0, 10.0)]
    assert waits == sorted(waits)
    assert waits[-1] > 2 * waits[0]


def test_the_same_run_twice_is_the_same(measure: Measure) -> None:
    workload = poisson(20, 3.0, shared_tokens=64)
    assert measure(workload, enable_prefix_caching=True) == measure(workload, enable_prefix_caching=True)


def test_a_request_that_arrives_during_a_step_is_queued_when_it_ends(measure: Measure) -> None:
    measurement = measure(poisson(30, 5.0))
    ends = {s.start_s + s.duration_s for s in measurement.steps}
    assert all(r.queued_s == r.sent_s or r.queued_s in ends for r in measurement.requests)


def test_the_cap_on_concurrency_holds_and_its_wait_counts(measure: Measure) -> None:
    base = poisson(12, 50.0)
    capped = Workload(base.name, base.requests, base.vocabulary, base.seed, max_concurrency=2)
    measurement = measure(capped)
    assert max(s.running + s.waiting for s in measurement.steps) == 2
    held_back = [r for r in measurement.requests if r.sent_s > r.scheduled_s]
    assert len(held_back) == 10
    ends = {r.last_token_s for r in measurement.requests}
    assert all(r.sent_s in ends for r in held_back)


def test_a_closed_loop_user_thinks_after_each_answer(measure: Measure) -> None:
    turns = tuple(Request(0.0, tuple(range(100)), 10, user=user, think_s=0.5) for _ in range(3) for user in range(2))
    measurement = measure(Workload("chat", turns, (0, 1000), 1))
    for user in range(2):
        mine = measurement.requests[user::2]
        assert mine[0].scheduled_s == 0.0
        for before, after in pairwise(mine):
            assert before.last_token_s is not None
            assert after.scheduled_s == pytest.approx(before.last_token_s + 0.5)


def test_a_prompt_longer_than_max_model_len_is_a_lost_request(measure: Measure) -> None:
    requests = (Request(0.0, tuple(range(600)), 5), Request(0.1, tuple(range(100)), 5))
    measurement = measure(Workload("long", requests, (0, 1000), 1), max_model_len=512)
    assert "max_model_len 512" in str(measurement.requests[0].error)
    assert measurement.requests[1].output_tokens == 5


def test_a_pool_smaller_than_one_request_fails_as_vllm_would(twin: TwinEngine) -> None:
    failure = run(twin, cpu_config(kv_cache_memory_bytes=16 * 2**20), poisson(2, 1.0))
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.stage) == (FailureKind.OOM_KV_CACHE, Stage.KV_CACHE)
    assert failure.needed_gib is not None
    assert failure.available_gib is not None
    assert failure.needed_gib > failure.available_gib > 0
    # 16 MiB / (32 tokens x 23,040 bytes) are 22 whole blocks, one of which is vLLM's null block
    assert failure.fitting_tokens == 21 * 32


def test_the_stated_pool_is_sized_as_vllm_sizes_it(measure: Measure) -> None:
    facts = measure(poisson(2, 1.0)).engine
    assert facts.kv_tokens == 256 * 2**20 // (32 * 23_040) * 32
    assert facts.kv_tokens_needed == 2048


def test_model_len_left_to_the_engine_is_what_fits(measure: Measure) -> None:
    facts = measure(poisson(2, 1.0), max_model_len=-1, kv_cache_memory_bytes=64 * 2**20).engine
    assert facts.max_model_len == (64 * 2**20 // (32 * 23_040) - 1) * 32


def test_arguments_that_vllm_refuses_are_an_invalid_configuration(twin: TwinEngine) -> None:
    refused = run(twin, cpu_config(enable_chunked_prefill=False, max_num_batched_tokens=64), poisson(2, 1.0))
    unknown = run(twin, cpu_config(swap_space=4), poisson(2, 1.0))
    assert isinstance(refused, Failure)
    assert isinstance(unknown, Failure)
    assert refused.kind is unknown.kind is FailureKind.INVALID_CONFIG
    assert "swap_space" in unknown.message


def test_what_cannot_be_predicted_is_said_in_one_sentence(twin: TwinEngine) -> None:
    with pytest.raises(EngineUnsupportedError, match="speculative_config"):
        run(twin, cpu_config(speculative_config={"method": "ngram"}), poisson(2, 1.0))


def test_a_budget_that_is_spent_ends_the_run_as_hung(twin: TwinEngine) -> None:
    failure = run(twin, cpu_config(), poisson(20, 1.0), run_budget_s=2.0)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.HUNG


def test_four_a6000_are_predicted_on_a_machine_without_one() -> None:
    asked: list[EngineConfig] = []

    def memory(config: EngineConfig) -> KvPool | Failure:
        asked.append(config)
        return KvPool(300_000, 300_000 * 65_536 / GIB)

    config = EngineConfig({"tensor_parallel_size": 4, "max_model_len": 34_000, "kv_cache_dtype": "fp8"})
    workload = poisson(6, 0.2, prompt_tokens=(512, 8192, 32_768), output_tokens=64)
    measurement = run(TwinEngine(find_device("A6000"), QWEN_32B, memory), config, workload)
    assert isinstance(measurement, Measurement), measurement
    assert asked == [config]
    assert measurement.engine.device_count == 4
    assert measurement.engine.effective_args["max_num_batched_tokens"] == 2048
    assert measurement.engine.effective_args["block_size"] == 16
    assert max(s.prefill_tokens for s in measurement.steps) == 2048


def test_a_failure_of_the_memory_model_is_handed_on() -> None:
    oom = Failure(FailureKind.OOM_WEIGHTS, Stage.WEIGHTS, "does not fit", 65.0, 44.0)
    engine = TwinEngine(find_device("A6000"), QWEN_32B, lambda _: oom)
    assert run(engine, EngineConfig({"max_model_len": 4096}), poisson(1, 1.0)) is oom


def test_a_device_without_a_memory_model_needs_the_pool_stated() -> None:
    with pytest.raises(UsageError, match="kv_cache_memory_bytes"):
        run(TwinEngine(find_device("A6000"), QWEN_32B), EngineConfig({"max_model_len": 4096}), poisson(1, 1.0))


def test_a_machine_that_does_not_drift_has_the_same_speed_for_every_configuration(measure: Measure) -> None:
    probes = {measure(poisson(2, 1.0), max_num_batched_tokens=n).speed_before for n in (64, 2048)}
    assert len(probes) == 1


def test_a_small_chunk_makes_the_probe_itself_slower(twin: TwinEngine) -> None:
    small, large = (twin.probe(cpu_config(max_num_batched_tokens=n)) for n in (64, 2048))
    assert isinstance(small, SpeedProbe)
    assert isinstance(large, SpeedProbe)
    assert small.prefill_s > large.prefill_s
    assert small.decode_step_s == large.decode_step_s


def test_an_answer_cut_off_by_max_model_len_is_a_lost_request(measure: Measure) -> None:
    workload = Workload("cut", (Request(0.0, tuple(range(500)), 50),), (0, 1000), 1)
    record = measure(workload, max_model_len=512).requests[0]
    assert record.output_tokens == 12
    assert record.error == "12 of 50 tokens arrived"


def test_a_folder_without_config_json_is_named() -> None:
    with pytest.raises(UsageError, match=r"config\.json"):
        TwinEngine(find_device("cpu"), SMOLLM2.parent)
