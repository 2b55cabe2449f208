"""A trial as a deployment, one module a format. Never starts an engine.

`FORMATS` is the registry: what `tuner export --format` accepts. A format that is not a file (a registered model in
MLflow, say) belongs to the room of its own system.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tuner.export import compose, json_document, kserve, kubernetes, production_stack, ray_serve, systemd, vllm
from tuner.export.deployment import Deployment

Render = Callable[[Deployment], dict[str, str]]
"""Names and texts of the files of one format."""

FORMATS: Mapping[str, Render] = {
    "vllm": vllm.render,
    "compose": compose.render,
    "kubernetes": kubernetes.render,
    "kserve": kserve.render,
    "production-stack": production_stack.render,
    "ray-serve": ray_serve.render,
    "systemd": systemd.render,
    "json": json_document.render,
}
