"""Docker Compose: one service with its devices, a health check and a volume for what is downloaded."""

from __future__ import annotations

from typing import Any

from tuner.export.arguments import command_line
from tuner.export.deployment import Deployment
from tuner.export.text import (
    CACHE,
    MODEL_MOUNT,
    PORT,
    comment,
    container_model,
    doubled_dollars,
    header,
    shared_memory_gib,
    startup_budget_s,
    yaml_text,
)

_CACHE_VOLUME = "huggingface"
_HEALTH = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{PORT}/health', timeout=5)"


def render(deployed: Deployment) -> dict[str, str]:
    """`compose.yaml`."""
    document = {
        "name": deployed.name,
        "services": {"vllm": _service(deployed)},
        "volumes": {_CACHE_VOLUME: {}},
    }
    usage = "Start with: docker compose up --detach --wait"
    return {"compose.yaml": comment([*header(deployed), usage]) + yaml_text(document)}


def _service(deployed: Deployment) -> dict[str, Any]:
    model, args = container_model(deployed)
    service: dict[str, Any] = {
        "image": deployed.image,
        "entrypoint": ["vllm", "serve"],
        "command": [doubled_dollars(word) for word in (model, *command_line(args))],
        "ports": [f"{PORT}:{PORT}"],
        "volumes": _volumes(deployed),
        "shm_size": f"{shared_memory_gib(deployed)}gb",
        "restart": "unless-stopped",
        "stop_grace_period": "2m",
        "healthcheck": {
            "test": ["CMD", "python3", "-c", _HEALTH],
            "interval": "10s",
            "timeout": "10s",
            "retries": 6,
            "start_period": f"{startup_budget_s(deployed)}s",
        },
    }
    environment = {name: doubled_dollars(value) for name, value in deployed.env.items()}
    environment |= {name: f"${{{name}:?set {name} first}}" for name in deployed.secrets}
    if environment:
        service["environment"] = environment
    if not deployed.on_cpu:
        device = {"driver": "nvidia", "count": deployed.device_count, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return service


def _volumes(deployed: Deployment) -> list[Any]:
    volumes: list[Any] = [{"type": "volume", "source": _CACHE_VOLUME, "target": CACHE}]
    if deployed.model_is_folder:
        folder = doubled_dollars(deployed.model)
        volumes.append({"type": "bind", "source": folder, "target": MODEL_MOUNT, "read_only": True})
    return volumes
