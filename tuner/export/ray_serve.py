"""Ray Serve LLM: the file of `serve deploy`, one application with one model behind OpenAI's API."""

from __future__ import annotations

import re
from typing import Any

from tuner.export.deployment import Deployment
from tuner.export.text import comment, header, yaml_text

_RAY_TYPES = (
    ("V100", r"\bV100"),
    ("T4", r"\bT4\b"),
    ("A10G", r"\bA10G?\b"),
    ("L4", r"\bL4\b"),
    ("L40S", r"\bL40S\b"),
    ("A100", r"\bA100"),
    ("H100", r"\bH100"),
    ("H200", r"\bH200"),
    ("B200", r"\bB200"),
)
"""Accelerators by Ray's name and how NVML names them. Ray Serve LLM accepts no others (Ray 2.60), so the RTX cards
are left to the cluster."""


def render(deployed: Deployment) -> dict[str, str]:
    """`ray-serve.yaml`."""
    usage = [
        f"Every node needs {deployed.package}.",
        *(f"Every node needs {name} in its environment: it is not written here." for name in deployed.secrets),
        "Start with: serve deploy ray-serve.yaml",
    ]
    application = {
        "name": deployed.name,
        "route_prefix": "/",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [_llm_config(deployed)]},
    }
    return {"ray-serve.yaml": comment([*header(deployed), *usage]) + yaml_text({"applications": [application]})}


def _llm_config(deployed: Deployment) -> dict[str, Any]:
    engine = {name: value for name, value in deployed.args.items() if name != "served_model_name"}
    config: dict[str, Any] = {
        "model_loading_config": {"model_id": deployed.served_name, "model_source": deployed.model},
        "engine_kwargs": engine,
        "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
    }
    if deployed.env:
        config["runtime_env"] = {"env_vars": dict(deployed.env)}
    if deployed.on_cpu:
        config["accelerator_config"] = {"kind": "cpu"}
    elif accelerator := _accelerator_type(deployed.device_name):
        config["accelerator_type"] = accelerator
    return config


def _accelerator_type(device_name: str) -> str | None:
    return next((ray_name for ray_name, pattern in _RAY_TYPES if re.search(pattern, device_name)), None)
