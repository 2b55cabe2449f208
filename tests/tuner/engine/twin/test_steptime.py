from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twin_samples import QWEN_32B, SMOLLM2

from tuner.engine.twin.devices import DEVICES, find_device
from tuner.engine.twin.shape import ModelShape, model_shape, read_model_config
from tuner.engine.twin.steptime import COMPONENTS, Coefficients, KernelChoice, StepCost, StepLoad
from tuner.errors import EngineUnsupportedError, StoreError, UsageError


def shape(folder: Path = QWEN_32B, **changes: object) -> ModelShape:
    return model_shape({**read_model_config(folder), **changes})


def cost(**kernels: int) -> StepCost:
    return StepCost(shape(), find_device("A6000"), KernelChoice(tensor_parallel=4, **kernels))


def decode(requests: int, context: int) -> StepLoad:
    return StepLoad(0, 0.0, 0, requests, requests * context, requests)


def prefill(tokens: int, before: int = 0) -> StepLoad:
    return StepLoad(tokens, tokens * (before + (tokens + 1) / 2), before + tokens, 0, 0, 1)


def test_sizes_of_a_32b_model_are_read_from_its_config() -> None:
    qwen = shape()
    assert (qwen.layers, qwen.head_dim, qwen.kv_bytes_per_token()) == (64, 128, 262_144)
    total = qwen.active_params + 2 * qwen.head_params
    assert total == pytest.approx(32.76e9, rel=0.01)  # Qwen2.5-32B's model card: 32.5 B, biases and norms left out here


def test_tied_small_model_has_its_published_size() -> None:
    small = shape(SMOLLM2)
    assert small.active_params + small.head_params == pytest.approx(134.5e6, rel=0.01)


def test_latent_attention_is_refused_by_name() -> None:
    with pytest.raises(EngineUnsupportedError, match="kv_lora_rank"):
        shape(kv_lora_rank=512)


def test_a_small_batch_of_experts_reads_fewer_weights_than_a_large_one() -> None:
    moe = shape(num_experts=64, num_experts_per_tok=4, moe_intermediate_size=1024)
    step = StepCost(moe, find_device("H200"), KernelChoice())
    one, many = step.components(decode(1, 10))[2], step.components(decode(64, 10))[2]
    assert one < many / 5


@given(requests=st.integers(1, 256), context=st.integers(1, 30_000), more=st.integers(1, 5_000))
def test_more_work_never_takes_less_time(requests: int, context: int, more: int) -> None:
    step = cost()
    assert step(decode(requests, context)) <= step(decode(requests + more, context))
    assert step(decode(requests, context)) <= step(decode(requests, context + more))
    assert step(prefill(requests, context)) <= step(prefill(requests + more, context))
    assert step(prefill(requests, context)) <= step(prefill(requests, context + more))


def test_reading_hides_behind_arithmetic_on_a_gpu_and_adds_to_it_on_a_cpu() -> None:
    linear = COMPONENTS.index("linear")
    cpu = StepCost(shape(SMOLLM2), find_device("CPU"), KernelChoice())
    one, two, three = (cpu.components(prefill(tokens))[linear] for tokens in (64, 128, 192))
    assert two - one == pytest.approx(three - two)
    assert one > 0.55 * two  # the weights are read once, for however many tokens
    gpu = cost()
    few, many, more = (gpu.components(prefill(tokens))[linear] for tokens in (8, 2048, 4096))
    assert few == pytest.approx(gpu.components(prefill(16))[linear])
    assert more == pytest.approx(2 * many, rel=0.01)


def test_decoding_a_32b_model_on_four_a6000_is_bound_by_its_weights() -> None:
    weights_s = 65.5e9 / 4 / 768e9
    assert 1.0 < cost()(decode(1, 1000)) / weights_s < 2.0


def test_a_step_without_graphs_costs_more() -> None:
    graphs, eager = cost(captured_tokens=512)(decode(8, 1000)), cost(captured_tokens=0)(decode(8, 1000))
    assert 1.05 < eager / graphs < 1.3


def test_one_device_has_nothing_to_reduce() -> None:
    alone = StepCost(shape(), find_device("H200"), KernelChoice())
    assert alone.components(prefill(1000))[COMPONENTS.index("communication")] == 0.0


def test_nvlink_helps_prefill_of_tensor_parallel() -> None:
    kernels = KernelChoice(tensor_parallel=2)
    plain = StepCost(shape(), find_device("A6000"), kernels)(prefill(2048))
    bridged = StepCost(shape(), find_device("A6000-NVLink"), kernels)(prefill(2048))
    assert bridged < plain


def test_coefficients_scale_what_they_are_named_after() -> None:
    plain, slow = cost(), StepCost(shape(), find_device("A6000"), KernelChoice(4), Coefficients().scaled(1.5))
    assert slow(prefill(700)) == pytest.approx(1.5 * plain(prefill(700)))


def test_coefficients_survive_json() -> None:
    written = Coefficients({"step": 1.5, "linear": 0.0}, (0.9, 1.2), ("step",), "key", 321)
    assert Coefficients.from_document(json.loads(json.dumps(written.document()))) == written


@pytest.mark.parametrize(
    "document",
    [{}, [], None, {**Coefficients().document(), "values": {"stop": 1.0}}],
    ids=["empty", "list", "null", "stop"],
)
def test_what_are_not_coefficients_is_refused(document: object) -> None:
    with pytest.raises(StoreError, match="calibrate again"):
        Coefficients.from_document(document)


def test_devices_are_found_by_the_names_that_nvml_gives() -> None:
    assert find_device("NVIDIA RTX A6000").name == "A6000"
    assert find_device("nvidia geforce rtx 4090").name == "RTX 4090"
    assert find_device("NVIDIA H100 80GB HBM3").name == "H100-SXM"


def test_an_unknown_device_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="H200"):
        find_device("TPU v5")


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
def test_every_device_states_its_source_and_plausible_peaks(device: object) -> None:
    spec = find_device(getattr(device, "name", ""))
    assert spec is device
    assert spec.source
    assert 10 <= spec.bandwidth_gb_s <= 8000
    assert spec.fp8_tflops is None or spec.fp8_tflops > spec.bf16_tflops
