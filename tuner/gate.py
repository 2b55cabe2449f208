"""Can a configuration be refused without an engine? Cheapest first: duplicates, vLLM's own validation, memory.

The memory model refuses only what cannot fit even at the favourable end of its interval. A refusal is a trial like any
other and costs no engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from objectives.measurement import Failure, FailureKind, Stage
from objectives.memory import memory_violation
from tuner.config import EngineConfig
from tuner.engine.config_check import ConfigChecker, Refused
from tuner.errors import UsageError
from tuner.memory_model import MemoryPrediction

ForMemory = Callable[[EngineConfig], MemoryPrediction | None]
"""Predicts the memory of a configuration, or `None` where nothing can be said."""

_NOT_EFFECTIVE = frozenset({"seed", "served_model_name", "model", "tokenizer", "disable_log_stats", "port", "host"})
"""Effective arguments that cannot change what is measured, or that vLLM draws anew for each start."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The configuration may be started.

    Parameters
    ----------
    key:
        Equal for configurations that are the same to the engine, whatever they say.
    effective_args:
        What vLLM makes of the arguments; empty where it could not be asked.
    memory:
        The prediction, for the record.
    """

    key: str
    effective_args: Mapping[str, Any]
    memory: MemoryPrediction | None = None
    predicted_failure: Failure | None = None

    @property
    def violation(self) -> float:
        """What is known of its memory as a signed number, 0 or less: how far it is from being refused."""
        return min(0.0, self.memory.violation_interval[0]) if self.memory else 0.0

    @property
    def expected_violation(self) -> float:
        """The same as expected: above 0 where it rather does not fit, though it may. A proof is expected to run."""
        return self.violation if self.memory is None or self.predicted_failure else self.memory.violation


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    """The configuration is refused."""

    failure: Failure

    @property
    def violation(self) -> float:
        """What to tell the optimiser: a signed number > 0, the same as if an engine had shown this failure."""
        return memory_violation(self.failure)

    @property
    def expected_violation(self) -> float:
        """The same: what is refused is expected to fail."""
        return self.violation


class Gate:
    """The gate of one study.

    Parameters
    ----------
    checker:
        Asks vLLM; `None` where no vLLM is to be asked (the twin validates by itself).
    longest_tokens:
        Prompt plus output of the workload's longest request.
    memory:
        `refuse`, `verify` (admit what would be refused, saying so, until the model was proven once) or `off`.
    num_gpus:
        GPUs of one engine; 0 on the CPU, where ranks need none.
    """

    def __init__(
        self,
        checker: ConfigChecker | None,
        predict: ForMemory,
        *,
        longest_tokens: int,
        memory: Literal["refuse", "verify", "off"],
        num_gpus: int = 0,
    ) -> None:
        self._checker = checker
        self._predict = predict
        self._longest_tokens = longest_tokens
        self._memory = memory
        self._num_gpus = num_gpus

    def proven(self, *, right: bool) -> None:
        """Say what a start showed of a configuration that the memory model would have refused."""
        self._memory = "refuse" if right else "off"

    def check(self, config: EngineConfig) -> Admitted | NotAdmitted:
        """Judge one configuration."""
        if refusal := self._too_many_ranks(config.args):
            return refusal
        effective: Mapping[str, Any] = {}
        if self._checker is not None:
            answer = self._checker.check(config)
            if isinstance(answer, Refused):
                return NotAdmitted(Failure(FailureKind.INVALID_CONFIG, Stage.GATE, answer.message))
            effective = answer.effective_args
        if refusal := self._too_short(effective or config.args):
            return refusal
        key = effective_key(config, effective)
        prediction = self._prediction(config)
        if prediction is None or prediction.violation_interval[0] <= 0:
            return Admitted(key, effective, prediction)
        failure = _memory_failure(prediction)
        if self._memory == "verify":
            return Admitted(key, effective, prediction, predicted_failure=failure)
        return NotAdmitted(failure)

    def _prediction(self, config: EngineConfig) -> MemoryPrediction | None:
        """Predict the memory; what the model of it cannot read is no reason to refuse what vLLM takes."""
        if self._memory == "off":
            return None
        try:
            return self._predict(config)
        except UsageError:
            return None

    def _too_many_ranks(self, args: Mapping[str, Any]) -> NotAdmitted | None:
        ranks = int(args.get("tensor_parallel_size") or 1) * int(args.get("pipeline_parallel_size") or 1)
        if not self._num_gpus or ranks <= self._num_gpus:
            return None
        message = f"tensor_parallel_size × pipeline_parallel_size = {ranks} needs more than the {self._num_gpus} GPUs"
        return NotAdmitted(Failure(FailureKind.INVALID_CONFIG, Stage.GATE, message))

    def _too_short(self, args: Mapping[str, Any]) -> NotAdmitted | None:
        length = args.get("max_model_len")
        if not isinstance(length, int) or length >= self._longest_tokens:
            return None
        message = f"max_model_len {length} cannot hold the workload's longest request of {self._longest_tokens} tokens"
        return NotAdmitted(Failure(FailureKind.INVALID_CONFIG, Stage.GATE, message))


def effective_key(config: EngineConfig, effective_args: Mapping[str, Any]) -> str:
    """16 hex digits, equal for configurations that are the same to the engine."""
    args = {k: v for k, v in {**config.args, **effective_args}.items() if k not in _NOT_EFFECTIVE}
    piece, batched = args.get("long_prefill_token_threshold"), args.get("max_num_batched_tokens")
    if isinstance(piece, int) and isinstance(batched, int) and piece >= batched:
        args["long_prefill_token_threshold"] = 0  # no piece of a prompt is longer than the whole step
    text = json.dumps({"args": args, "env": dict(config.env)}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _memory_failure(prediction: MemoryPrediction) -> Failure:
    """Say in one line what does not fit, with the figures and what would."""
    if prediction.kv_tokens >= prediction.kv_tokens_needed:
        return _device_failure(prediction)
    needed_gib = prediction.kv_tokens_needed * prediction.kv_bytes_per_token / 2**30
    return Failure(
        FailureKind.OOM_KV_CACHE if prediction.budget_gib > prediction.weights_gib else FailureKind.OOM_WEIGHTS,
        Stage.GATE,
        f"predicted not to fit: the KV cache holds {prediction.kv_tokens} of the {prediction.kv_tokens_needed} tokens "
        f"that one request of max_model_len needs ({max(0.0, prediction.kv_gib):.2f} of {needed_gib:.2f} GiB); the "
        f"longest that fits is {prediction.longest_fitting_tokens}",
        needed_gib=needed_gib,
        available_gib=max(0.0, prediction.kv_gib),
        fitting_tokens=prediction.longest_fitting_tokens,
    )


def _device_failure(prediction: MemoryPrediction) -> Failure:
    """The KV cache is large enough, but what is allocated after it finds no room on the device."""
    total_gib = prediction.total_gib
    needed_gib = total_gib * (1 + prediction.violation)
    return Failure(
        FailureKind.OOM_GRAPH_CAPTURE,
        Stage.GATE,
        f"predicted not to fit: with graphs and temporary memory beside its KV cache the engine needs "
        f"{needed_gib:.2f} GiB of the device's {total_gib:.2f} GiB; lower gpu_memory_utilization or the batch",
        needed_gib=needed_gib,
        available_gib=total_gib,
    )
