from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twin_samples import SMOLLM2, cpu_config

from objectives.measurement import Failure
from tuner.engine.twin import vllm_scheduler
from tuner.engine.twin.devices import find_device
from tuner.engine.twin.vllm_scheduler import Resolved, ScheduledStep, VirtualScheduler, resolve
from tuner.errors import EngineUnsupportedError


def resolved(**args: Any) -> Resolved:
    result = resolve(cpu_config(**args).args, SMOLLM2, find_device("cpu"))
    assert not isinstance(result, Failure), result
    return result


def play(scheduler: VirtualScheduler, requests: Sequence[tuple[int, int, int, bool]]) -> list[ScheduledStep]:
    """Add each request (step of arrival, prompt, output, shared) and step until all are done."""
    steps: list[ScheduledStep] = []
    pending = sorted(enumerate(requests), key=lambda item: (item[1][0], item[0]))
    while pending or scheduler.unfinished:
        while pending and pending[0][1][0] <= len(steps):
            index, (_, prompt, output, shared) = pending.pop(0)
            identities = [b"shared:%d" % i for i in range(prompt // 16)] if shared else []
            scheduler.add(f"r{index}", prompt, output, float(index), identities)
        steps.append(scheduler.step())
        assert len(steps) < 20_000
    return steps


REQUESTS = st.lists(
    st.tuples(st.integers(0, 120), st.integers(1, 300), st.integers(1, 120), st.booleans()), min_size=1, max_size=10
)


@given(
    requests=REQUESTS,
    blocks=st.sampled_from([33, 45, 400]),
    seqs=st.sampled_from([2, 8]),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_skipping_ahead_changes_nothing(
    requests: list[tuple[int, int, int, bool]], blocks: int, seqs: int, caching: bool, policy: str
) -> None:
    args = {
        "block_size": 16,
        "max_num_seqs": seqs,
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": caching,
        "scheduling_policy": policy,
    }
    quick = play(VirtualScheduler(resolved(**args), blocks), requests)
    whole = play(VirtualScheduler(resolved(**args), blocks, skip_ahead=False), requests)
    assert [_comparable(s) for s in quick] == [_comparable(s) for s in whole]


def _comparable(step: ScheduledStep) -> tuple[Any, ...]:
    return tuple(list(part) if isinstance(part, list | tuple) else part for part in step)


def test_contexts_of_a_chunked_prompt_add_up_to_its_triangle() -> None:
    steps = play(VirtualScheduler(resolved(max_num_batched_tokens=100), 400), [(0, 250, 3, False)])
    loads = [s.load for s in steps]
    assert [load.prefill_tokens for load in loads] == [100, 100, 50, 0, 0]
    assert sum(load.prefill_pairs for load in loads) == 250 * 251 / 2
    assert [load.decode_context for load in loads] == [0, 0, 0, 251, 252]
    assert [load.sampled for load in loads] == [0, 0, 1, 1, 1]


def test_building_a_configuration_leaves_the_environment_alone() -> None:
    before = dict(os.environ)
    resolved()
    assert dict(os.environ) == before


def test_a_vllm_that_cannot_be_driven_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.v1.core.sched.scheduler as internals

    ready = resolved()
    monkeypatch.delattr(internals, "Scheduler")
    with pytest.raises(EngineUnsupportedError, match="cannot drive the scheduler of vLLM") as caught:
        VirtualScheduler(ready, 400)
    assert vllm_scheduler.TRIED_VERSIONS[0] in str(caught.value)
