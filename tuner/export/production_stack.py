"""Values for the Helm chart of vLLM's production stack (chart `vllm-stack`, tried with 0.1.12)."""

from __future__ import annotations

from typing import Any

from tuner.export.arguments import command_line
from tuner.export.deployment import Deployment
from tuner.export.kubernetes import environment, resources, secret_usage
from tuner.export.text import (
    MODEL_MOUNT,
    cache_gib,
    comment,
    container_model,
    doubled_dollars,
    header,
    shared_memory_gib,
    startup_budget_s,
    yaml_text,
)

_STARTUP_PERIOD_S = 10


def render(deployed: Deployment) -> dict[str, str]:
    """`values.yaml`."""
    usage = [
        *secret_usage(deployed),
        "Start with: helm install vllm vllm/vllm-stack -f values.yaml",
    ]
    document = {
        "servingEngineSpec": {
            "strategy": {"type": "Recreate"},
            "startupProbe": {
                "initialDelaySeconds": _STARTUP_PERIOD_S,
                "periodSeconds": _STARTUP_PERIOD_S,
                "failureThreshold": -(-startup_budget_s(deployed) // _STARTUP_PERIOD_S),
                "httpGet": {"path": "/health", "port": 8000},
            },
            "modelSpec": [_model_spec(deployed)],
        }
    }
    return {"values.yaml": comment([*header(deployed), *usage]) + yaml_text(document)}


def _model_spec(deployed: Deployment) -> dict[str, Any]:
    model, args = container_model(deployed)
    repository, _, tag = deployed.image.partition(":")
    prefix_caching = args.pop("enable_prefix_caching", deployed.prefix_caching)
    tensor_parallel = args.pop("tensor_parallel_size", 1)
    asked = resources(deployed)
    spec: dict[str, Any] = {
        "name": deployed.name,
        "repository": repository,
        "tag": tag,
        "modelURL": doubled_dollars(model),
        "replicaCount": 1,
        "requestCPU": int(asked["requests"]["cpu"]),
        "requestMemory": asked["requests"]["memory"],
        "requestGPU": deployed.device_count,
        "pvcStorage": f"{cache_gib(deployed)}Gi",
        "shmSize": f"{shared_memory_gib(deployed)}Gi",
        "vllmConfig": {
            # The chart switches prefix caching off where it is not named, and mounts /dev/shm where the degree of
            # tensor parallelism is.
            "enablePrefixCaching": prefix_caching is not False,
            "tensorParallelSize": tensor_parallel,
            "extraArgs": [doubled_dollars(word) for word in command_line(args)],
        },
    }
    if env := environment(deployed):
        spec["env"] = env
    if deployed.model_is_folder:
        spec["extraVolumes"] = [{"name": "model", "hostPath": {"path": deployed.model, "type": "Directory"}}]
        spec["extraVolumeMounts"] = [{"name": "model", "mountPath": MODEL_MOUNT, "readOnly": True}]
    return spec
