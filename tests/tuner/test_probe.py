from __future__ import annotations

import pytest

from tuner.config import EngineConfig
from tuner.probe import is_felt_in, probes_alike
from tuner.space import Parameter

REFERENCE = EngineConfig({"model": "org/model", "tensor_parallel_size": 2})


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 4, "gpu_memory_utilization": 0.7},
        {"max_num_batched_tokens": 512},
        {"long_prefill_token_threshold": 0},
        {"enable_prefix_caching": False, "max_model_len": 4096},
    ],
)
def test_batching_and_memory_leave_the_probe_as_it_is(changes: dict[str, object]) -> None:
    assert probes_alike(REFERENCE, REFERENCE.with_args(changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_parallel_size": 4},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 64},
        {"long_prefill_token_threshold": 256},
        {"env.OMP_NUM_THREADS": 1},
    ],
)
def test_what_changes_the_probe_itself_is_not_taken_for_the_machine(changes: dict[str, object]) -> None:
    other = REFERENCE.with_args(changes)

    assert not probes_alike(REFERENCE, other)
    assert not probes_alike(other, REFERENCE)
    assert probes_alike(other, other)


@pytest.mark.parametrize(
    ("name", "parameter", "felt"),
    [
        ("max_num_batched_tokens", Parameter(low=64, high=8192, log=True), True),
        ("max_num_batched_tokens", Parameter(low=512, high=8192, log=True), False),
        ("long_prefill_token_threshold", Parameter(choices=(0, 1024)), False),
        ("long_prefill_token_threshold", Parameter(choices=(0, 128)), True),
        ("max_num_seqs", Parameter(choices=(1, 2)), False),
        ("async_scheduling", Parameter(choices=(True, False)), True),
    ],
)
def test_range_is_felt_where_one_of_its_values_is(name: str, parameter: Parameter, felt: bool) -> None:
    assert is_felt_in(name, parameter) is felt
