"""`CoefficientSets`: what calibration found, and which of it holds for a configuration.

A set holds for a model, a device and the arguments that change kernels; its key names them. A configuration whose
kernels nothing was measured with is predicted with the set that all measured trials share, so that every prediction of
a study rests on the same machine and none on the catalogue while others do not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.config import EngineConfig
from tuner.engine.twin.devices import DeviceKind, DeviceSpec
from tuner.engine.twin.steptime import Coefficients
from tuner.errors import StoreError

_KERNEL_ARGS = (
    "attention_backend",
    "compilation_config",
    "dtype",
    "kv_cache_dtype",
    "moe_backend",
    "optimization_level",
    "quantization",
)
_KERNEL_VARIABLES = ("VLLM_ATTENTION_BACKEND",)


def calibration_key(config_json: Mapping[str, Any], device: DeviceSpec, config: EngineConfig) -> str:
    """Name what a set of coefficients holds for: model, device, and the arguments that change kernels.

    On a GPU, `enforce_eager` changes how kernels are launched, which the cost model has a component for. On a CPU it
    changes the kernels: the compiler fuses what moves activations.
    """
    model = hashlib.sha256(json.dumps(dict(config_json), sort_keys=True).encode()).hexdigest()[:8]
    args = config.args
    kernels = [f"{n}={args[n]}" for n in _KERNEL_ARGS if args.get(n) not in (None, "auto")]
    kernels += [f"{n}={config.env[n]}" for n in _KERNEL_VARIABLES if config.env.get(n)]
    if (devices := int(args.get("tensor_parallel_size") or 1)) > 1:
        kernels.append(f"tensor_parallel_size={devices}")
    if device.kind is DeviceKind.CPU and args.get("enforce_eager"):
        kernels.append("eager")
    return f"{model}/{device.name}/{','.join(kernels) or 'default'}"


@dataclass(frozen=True, slots=True)
class CoefficientSets:
    """Sets of coefficients by key.

    Parameters
    ----------
    shared:
        Fitted to all measured trials together; for configurations whose key has no set of its own.
    """

    shared: Coefficients = field(default_factory=Coefficients)
    by_key: Mapping[str, Coefficients] = field(default_factory=dict)

    def of(self, key: str) -> Coefficients:
        """Return the set for a key."""
        return self.by_key.get(key, self.shared)

    def scaled(self, speed: float) -> CoefficientSets:
        """Return the sets for a machine on which everything takes `speed` times as long."""
        return CoefficientSets(self.shared.scaled(speed), {k: c.scaled(speed) for k, c in self.by_key.items()})

    def document(self) -> dict[str, Any]:
        """Return the sets as a JSON document."""
        return {
            "shared": self.shared.document(),
            "by_key": {key: coefficients.document() for key, coefficients in self.by_key.items()},
        }

    @staticmethod
    def from_document(document: Any) -> CoefficientSets:
        """Read what `document` returned.

        Raises
        ------
        StoreError
            It is no such document, or names a component that this version does not know.
        """
        try:
            shared, by_key = document["shared"], document["by_key"].items()
        except (KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"These are not the twin's coefficients ({error}); calibrate again.") from error
        return CoefficientSets(
            Coefficients.from_document(shared), {str(key): Coefficients.from_document(c) for key, c in by_key}
        )
