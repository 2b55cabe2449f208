"""The memory model as the twin's oracle: how large the KV pool of a configuration is, or that it does not fit."""

from __future__ import annotations

from collections.abc import Callable

from objectives.measurement import Failure, FailureKind, Stage
from tuner.config import EngineConfig
from tuner.engine.twin.memory import KvPool, MemoryOracle
from tuner.memory_model import MemoryPrediction


def oracle(predict: Callable[[EngineConfig], MemoryPrediction | None]) -> MemoryOracle:
    """Return what the twin asks for the size of a pool."""

    def pool(config: EngineConfig) -> KvPool | Failure:
        prediction = predict(config)
        if prediction is None:
            return Failure(
                FailureKind.MODEL_UNAVAILABLE, Stage.CONFIG, "the model's config.json is not on this machine"
            )
        if prediction.kv_gib <= 0:
            return Failure(
                FailureKind.OOM_WEIGHTS if prediction.weights_gib > prediction.budget_gib else FailureKind.OOM_KV_CACHE,
                Stage.KV_CACHE,
                f"predicted: weights and activations of {prediction.weights_gib + prediction.activation_gib:.1f} GiB "
                f"leave nothing of {prediction.budget_gib:.1f} GiB for the KV cache",
                needed_gib=prediction.weights_gib + prediction.activation_gib + prediction.non_torch_gib,
                available_gib=prediction.budget_gib,
            )
        return KvPool(prediction.kv_tokens, prediction.kv_gib, prediction.weights_gib)

    return pool
