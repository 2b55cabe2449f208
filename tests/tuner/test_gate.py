from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import pytest

from objectives.measurement import FailureKind, Stage
from objectives.memory import UNKNOWN_SHORTAGE
from tuner.config import EngineConfig
from tuner.engine.config_check import Refused, Resolved
from tuner.errors import UsageError
from tuner.gate import Admitted, Gate, NotAdmitted, effective_key
from tuner.memory_model import MemoryPrediction

ROOMY = MemoryPrediction(
    total_gib=48.0, budget_gib=43.2, weights_gib=15.0, activation_gib=1.0, non_torch_gib=0.3, graphs_gib=0.5,
    kv_gib=26.4, kv_tokens=26_400, kv_tokens_needed=4000, kv_bytes_per_token=2**20, longest_fitting_tokens=8000,
    fits=True, violation=-0.5, violation_interval=(-0.6, -0.4), intervals={}, exact=frozenset(), measured=frozenset(),
    graphs_charged=True,
)  # fmt: skip
TIGHT = dataclasses.replace(
    ROOMY, kv_gib=1.0, kv_tokens=1000, longest_fitting_tokens=1000, fits=False, violation=0.07,
    violation_interval=(0.05, 0.09),
)  # fmt: skip


class Checker:
    """Stands for vLLM: fills in defaults, refuses a dtype that it does not know."""

    def __init__(self) -> None:
        self.asked: list[EngineConfig] = []

    def check(self, config: EngineConfig) -> Resolved | Refused:
        self.asked.append(config)
        if config.args.get("dtype") == "float7":
            return Refused("Unknown dtype: float7")
        defaults = {"max_num_seqs": 128, "max_model_len": 4096, "seed": len(self.asked), "enable_lora": None}
        return Resolved({**defaults, **{k: v for k, v in config.args.items() if v is not None}})


def gate(
    prediction: MemoryPrediction | None = ROOMY,
    memory: Literal["refuse", "verify", "off"] = "refuse",
    checker: Any = None,
    predict: Callable[[EngineConfig], MemoryPrediction | None] | None = None,
) -> Gate:
    return Gate(checker or Checker(), predict or (lambda _: prediction), longest_tokens=512, memory=memory)


def config(**args: Any) -> EngineConfig:
    return EngineConfig({"model": "m", **args})


def admitted(verdict: Admitted | NotAdmitted) -> Admitted:
    assert isinstance(verdict, Admitted)
    return verdict


def refused(verdict: Admitted | NotAdmitted) -> NotAdmitted:
    assert isinstance(verdict, NotAdmitted)
    return verdict


def test_configuration_that_fits_is_admitted_with_what_vllm_makes_of_it() -> None:
    verdict = admitted(gate().check(config(max_num_seqs=4)))

    assert verdict.effective_args["max_num_seqs"] == 4
    assert verdict.effective_args["max_model_len"] == 4096
    assert verdict.memory == ROOMY
    assert verdict.predicted_failure is None


def test_spelling_out_a_default_is_the_same_configuration_to_the_engine() -> None:
    same = gate()

    assert admitted(same.check(config())).key == admitted(same.check(config(max_num_seqs=128))).key
    assert admitted(same.check(config())).key != admitted(same.check(config(max_num_seqs=64))).key


def test_limit_of_a_piece_that_no_step_reaches_is_the_same_configuration_as_none() -> None:
    def key(piece: int, batched: int) -> str:
        args = {"long_prefill_token_threshold": piece, "max_num_batched_tokens": batched}
        return effective_key(EngineConfig(args), {})

    assert key(1024, 512) == key(512, 512) == key(0, 512)
    assert len({key(256, 512), key(0, 512), key(0, 1024)}) == 3


def test_environment_makes_another_configuration_and_order_does_not() -> None:
    a = EngineConfig({"x": 1, "y": 2}, {"A": "1", "B": "2"})

    assert effective_key(a, {}) == effective_key(EngineConfig({"y": 2, "x": 1}, {"B": "2", "A": "1"}), {})
    assert effective_key(a, {}) != effective_key(EngineConfig(a.args, {"A": "1"}), {})


def test_what_vllm_refuses_is_refused_with_its_words_and_predicts_nothing() -> None:
    def never(_: EngineConfig) -> MemoryPrediction:
        raise AssertionError("the memory of a configuration that cannot be was predicted")

    verdict = refused(gate(predict=never).check(config(dtype="float7")))

    assert verdict.failure.kind is FailureKind.INVALID_CONFIG
    assert (verdict.failure.stage, verdict.failure.message) == (Stage.GATE, "Unknown dtype: float7")
    assert verdict.violation == UNKNOWN_SHORTAGE


@pytest.mark.parametrize("checker", [Checker(), None], ids=["vllm asked", "vllm not asked"])
def test_length_that_cannot_hold_the_workload_is_refused_with_both_lengths(checker: Checker | None) -> None:
    asked = Gate(checker, lambda _: ROOMY, longest_tokens=512, memory="off")  # type: ignore[arg-type]  # a stand-in

    verdict = refused(asked.check(config(max_model_len=256)))

    assert verdict.failure.message == "max_model_len 256 cannot hold the workload's longest request of 512 tokens"
    assert verdict.violation == UNKNOWN_SHORTAGE
    assert isinstance(asked.check(config(max_model_len=512)), Admitted)


def test_refusal_for_memory_names_the_figures_and_the_length_that_fits() -> None:
    verdict = refused(gate(TIGHT).check(config()))

    failure = verdict.failure
    assert (failure.kind, failure.stage) == (FailureKind.OOM_KV_CACHE, Stage.GATE)
    assert (failure.needed_gib, failure.available_gib, failure.fitting_tokens) == (pytest.approx(3.90625), 1.0, 1000)
    assert "holds 1000 of the 4000 tokens" in failure.message
    assert "the longest that fits is 1000" in failure.message
    assert verdict.violation == pytest.approx(2.90625)


def test_weights_beyond_the_budget_are_told_apart() -> None:
    large = dataclasses.replace(TIGHT, weights_gib=60.0, kv_gib=-17.0, kv_tokens=0, longest_fitting_tokens=0)

    failure = refused(gate(large).check(config())).failure

    assert failure.kind is FailureKind.OOM_WEIGHTS
    assert failure.available_gib == 0.0


def test_cache_that_would_fit_and_graphs_that_would_not_are_told_as_such() -> None:
    full = dataclasses.replace(ROOMY, violation=0.02, violation_interval=(0.01, 0.03), fits=False)

    verdict = refused(gate(full).check(config()))

    assert verdict.failure.kind is FailureKind.OOM_GRAPH_CAPTURE
    assert "needs 48.96 GiB of the device's 48.00 GiB" in verdict.failure.message
    assert verdict.violation == pytest.approx(0.02)


def test_only_what_cannot_fit_at_the_favourable_end_is_refused() -> None:
    unsure = dataclasses.replace(TIGHT, violation=0.07, violation_interval=(0.0, 0.2))

    verdict = admitted(gate(unsure).check(config()))

    assert verdict.violation == 0.0
    assert verdict.expected_violation == pytest.approx(0.07)
    assert admitted(gate(TIGHT, "verify").check(config())).expected_violation <= 0


def test_verify_admits_with_the_predicted_failure_until_it_was_proven() -> None:
    verifying = gate(TIGHT, "verify")

    verdict = admitted(verifying.check(config()))
    assert verdict.predicted_failure is not None
    assert verdict.predicted_failure.kind is FailureKind.OOM_KV_CACHE

    verifying.proven(right=True)
    assert isinstance(verifying.check(config()), NotAdmitted)


def test_verify_proven_wrong_predicts_nothing_any_more() -> None:
    verifying = gate(TIGHT, "verify")
    verifying.proven(right=False)

    assert admitted(verifying.check(config())).memory is None


def test_off_never_asks_the_memory_model() -> None:
    assert admitted(gate(TIGHT, "off").check(config())).memory is None


def test_model_of_which_nothing_is_known_is_admitted() -> None:
    assert admitted(gate(None).check(config())).memory is None


def test_what_the_memory_model_cannot_read_is_no_reason_to_refuse_what_vllm_takes() -> None:
    def unreadable(_: EngineConfig) -> MemoryPrediction:
        raise UsageError("engine arguments: a value has a form that vLLM does not take")

    assert admitted(gate(predict=unreadable).check(config())).memory is None


def test_more_ranks_than_gpus_are_refused_before_vllm_is_asked() -> None:
    four = Gate(None, lambda _: None, longest_tokens=512, memory="off", num_gpus=4)

    verdict = four.check(EngineConfig({"tensor_parallel_size": 4, "pipeline_parallel_size": 2}))

    assert isinstance(verdict, NotAdmitted)
    assert verdict.failure.kind is FailureKind.INVALID_CONFIG
    assert verdict.violation == UNKNOWN_SHORTAGE
    assert isinstance(four.check(EngineConfig({"tensor_parallel_size": 4})), Admitted)
