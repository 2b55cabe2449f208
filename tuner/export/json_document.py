"""JSON: everything that the other formats are made of, for a deployment tool of one's own."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from tuner.export.arguments import command_line
from tuner.export.deployment import Deployment, day
from tuner.export.text import header


def render(deployed: Deployment) -> dict[str, str]:
    """`NAME.json`."""
    return {f"{deployed.name}.json": json.dumps(_document(deployed), indent=2, ensure_ascii=False) + "\n"}


def _document(deployed: Deployment) -> dict[str, Any]:
    return {
        "model": deployed.model,
        "args": dict(deployed.args),
        "env": dict(deployed.env),
        "secrets": list(deployed.secrets),
        "command": ["vllm", "serve", deployed.model, *command_line(deployed.args)],
        "vllm_version": deployed.vllm_version,
        "package": deployed.package,
        "image": deployed.image,
        "device": {"name": deployed.device_name, "count": deployed.device_count},
        "study": deployed.study,
        "trial": deployed.trial,
        "measured_on": day(deployed),
        "workload": {"name": deployed.workload, "fingerprint": deployed.workload_fingerprint},
        "values": {v.name: dataclasses.asdict(v) for v in deployed.values},
        "verification": dataclasses.asdict(deployed.verification) if deployed.verification else None,
        "about": list(header(deployed)),
    }
