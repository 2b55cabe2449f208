"""Kubernetes: a Deployment, its Service and the claim for what is downloaded. `pod_parts` also serves KServe."""

from __future__ import annotations

import math
from typing import Any

from tuner.export.arguments import command_line
from tuner.export.deployment import Deployment
from tuner.export.text import (
    CACHE,
    MODEL_MOUNT,
    PORT,
    cache_gib,
    comment,
    container_model,
    doubled_dollars,
    header,
    host_memory_gib,
    shared_memory_gib,
    startup_budget_s,
    yaml_text,
)

_PROBE_PERIOD_S = 10


def render(deployed: Deployment) -> dict[str, str]:
    """`kubernetes.yaml`."""
    usage = [*secret_usage(deployed), "Start with: kubectl apply -f kubernetes.yaml"]
    documents = (_claim(deployed), _deployment(deployed), _service(deployed))
    return {"kubernetes.yaml": comment([*header(deployed), *usage]) + yaml_text(*documents)}


def secret_name(deployed: Deployment) -> str:
    """Name of the Kubernetes secret that holds the variables that must not be written down."""
    return f"{deployed.name}-secrets"


def secret_usage(deployed: Deployment) -> list[str]:
    """Comment lines that say how to make the secret; none where there is nothing secret."""
    if not deployed.secrets:
        return []
    literals = " ".join(f"--from-literal={name}=..." for name in deployed.secrets)
    return [f"Before: kubectl create secret generic {secret_name(deployed)} {literals}"]


def words(deployed: Deployment) -> list[str]:
    """Model and arguments of `vllm serve` in a container, safe from Kubernetes' own `$(NAME)`."""
    model, args = container_model(deployed)
    return [doubled_dollars(word) for word in (model, *command_line(args))]


def environment(deployed: Deployment) -> list[dict[str, Any]]:
    """Environment of the container; secrets are references."""
    plain = [{"name": name, "value": doubled_dollars(value)} for name, value in deployed.env.items()]
    return plain + [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name(deployed), "key": name}}}
        for name in deployed.secrets
    ]


def resources(deployed: Deployment) -> dict[str, Any]:
    """Say what one replica requests, and its limits."""
    asked = {"cpu": str(2 * max(deployed.device_count, 1)), "memory": f"{host_memory_gib(deployed)}Gi"}
    if deployed.on_cpu:
        return {"requests": asked}
    gpus = {"nvidia.com/gpu": str(deployed.device_count)}
    return {"requests": asked | gpus, "limits": gpus}


def volumes(deployed: Deployment, cache: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes of the pod and where the container mounts them: shared memory, the cache, and a model's folder."""
    shared = {"medium": "Memory", "sizeLimit": f"{shared_memory_gib(deployed)}Gi"}
    there: list[dict[str, Any]] = [{"name": "shm", "emptyDir": shared}, {"name": "cache", **cache}]
    mounts: list[dict[str, Any]] = [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "cache", "mountPath": CACHE},
    ]
    if deployed.model_is_folder:
        there.append({"name": "model", "hostPath": {"path": deployed.model, "type": "Directory"}})
        mounts.append({"name": "model", "mountPath": MODEL_MOUNT, "readOnly": True})
    return there, mounts


def probes(deployed: Deployment) -> dict[str, Any]:
    """Probes of `/health`: the start has its own budget, so that a slow one is not taken for a dead one."""
    check = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": _PROBE_PERIOD_S, "timeoutSeconds": 5}
    attempts = math.ceil(startup_budget_s(deployed) / _PROBE_PERIOD_S)
    return {
        "startupProbe": {**check, "failureThreshold": attempts},
        "readinessProbe": {**check, "failureThreshold": 3},
        "livenessProbe": {**check, "failureThreshold": 6},
    }


def _claim(deployed: Deployment) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(deployed),
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": f"{cache_gib(deployed)}Gi"}},
        },
    }


def _deployment(deployed: Deployment) -> dict[str, Any]:
    there, mounts = volumes(deployed, {"persistentVolumeClaim": {"claimName": deployed.name}})
    container: dict[str, Any] = {
        "name": "vllm",
        "image": deployed.image,
        "command": ["vllm", "serve"],
        "args": words(deployed),
        "ports": [{"name": "http", "containerPort": PORT}],
        **({"env": env} if (env := environment(deployed)) else {}),
        "resources": resources(deployed),
        **probes(deployed),
        "volumeMounts": mounts,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(deployed),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": _selector(deployed)},
            "template": {
                "metadata": {"labels": _selector(deployed)},
                "spec": {"terminationGracePeriodSeconds": 120, "containers": [container], "volumes": there},
            },
        },
    }


def _service(deployed: Deployment) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(deployed),
        "spec": {
            "selector": _selector(deployed),
            "ports": [{"name": "http", "port": PORT, "targetPort": "http"}],
        },
    }


def _metadata(deployed: Deployment) -> dict[str, Any]:
    return {"name": deployed.name, "labels": _selector(deployed)}


def _selector(deployed: Deployment) -> dict[str, str]:
    return {"app.kubernetes.io/name": "vllm", "app.kubernetes.io/instance": deployed.name}
