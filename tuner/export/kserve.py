"""KServe: a ServingRuntime that runs the very vLLM that was measured, and an InferenceService that uses it.

KServe's own Hugging Face runtime brings a vLLM of its own choosing, which is not the one that was measured.
"""

from __future__ import annotations

from typing import Any

from tuner.export.deployment import Deployment
from tuner.export.kubernetes import environment, probes, resources, secret_usage, volumes, words
from tuner.export.text import PORT, comment, header, yaml_text

_FORMAT = "vllm"


def render(deployed: Deployment) -> dict[str, str]:
    """`kserve.yaml`."""
    usage = [*secret_usage(deployed), "Start with: kubectl apply -f kserve.yaml"]
    return {
        "kserve.yaml": comment([*header(deployed), *usage])
        + yaml_text(_runtime(deployed), _inference_service(deployed))
    }


def _runtime(deployed: Deployment) -> dict[str, Any]:
    there, mounts = volumes(deployed, {"emptyDir": {}})
    return {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ServingRuntime",
        "metadata": {"name": f"{deployed.name}-vllm"},
        "spec": {
            "supportedModelFormats": [{"name": _FORMAT, "version": "1", "autoSelect": False}],
            "containers": [
                {
                    "name": "kserve-container",
                    "image": deployed.image,
                    "command": ["vllm", "serve"],
                    "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
                    **probes(deployed),
                    "volumeMounts": mounts,
                }
            ],
            "volumes": there,
        },
    }


def _inference_service(deployed: Deployment) -> dict[str, Any]:
    model: dict[str, Any] = {
        "modelFormat": {"name": _FORMAT},
        "runtime": f"{deployed.name}-vllm",
        "args": [_untemplated(word) for word in words(deployed)],
        "resources": resources(deployed),
    }
    if env := environment(deployed):
        model["env"] = [{**e, "value": _untemplated(e["value"])} if "value" in e else e for e in env]
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": deployed.name,
            "annotations": {"serving.kserve.io/deploymentMode": "RawDeployment"},
        },
        "spec": {"predictor": {"minReplicas": 1, "maxReplicas": 1, "model": model}},
    }


def _untemplated(text: str) -> str:
    """Text that KServe's Go template of the container gives back as it is."""
    return text.replace("{{", "{{`{{`}}")
