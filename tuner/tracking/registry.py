"""A deployment as a version of a registered model in MLflow, where whoever deploys can ask for it by its alias.

The version points at a folder of the trial's run that holds the configuration, as `vllm serve` reads it and as JSON: no
weights. A trial has one version however often it is registered; the alias is at the version that was registered last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.export import json_document, vllm
from tuner.export.deployment import Deployment
from tuner.export.text import header
from tuner.tracking.store import Store

ALIAS = "champion"
"""Of the version that is to be deployed."""
FOLDER = "deployment"
"""Of the run's files that a version points at."""
FILES = "vllm"
"""What its files are called, the same for every trial: `vllm.yaml`, `vllm.sh`, `vllm.json`."""

_MODEL_NOTE = "Configurations of vLLM that studies of vllm-tuner found; the alias `champion` is the one to deploy."


@dataclass(frozen=True, slots=True)
class Registered:
    """What MLflow has now; `created` says whether the version is new."""

    name: str
    version: str
    alias: str
    created: bool

    @property
    def uri(self) -> str:
        """Address to ask MLflow for."""
        return f"models:/{self.name}@{self.alias}"


def register(store: Store, run_id: str, deployed: Deployment, staged: Path) -> Registered:
    """Make `deployed` the champion among the versions of its registered model.

    Parameters
    ----------
    run_id:
        The trial's run, which keeps the files.
    staged:
        An empty folder to gather them in.

    Raises
    ------
    StoreError
        When MLflow refuses. Registering again finishes what was begun.
    """
    name = model_name(deployed)
    for file, text in files(deployed).items():
        (staged / file).write_text(text, encoding="utf-8")
    store.add_files(run_id, staged, FOLDER)
    store.ensure_model(name, _MODEL_NOTE)
    known = store.version_of(name, run_id)
    version = known or store.create_version(name, run_id, FOLDER)
    store.describe_version(name, version, "\n\n".join(header(deployed)), version_tags(deployed))
    store.set_alias(name, ALIAS, version)
    return Registered(name, version, ALIAS, created=known is None)


def model_name(deployed: Deployment) -> str:
    """Name of the registered model: the study's and the model's, without what MLflow refuses in names."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", f"{deployed.study}-{Path(deployed.model).name}").strip("-.") or "study"


def files(deployed: Deployment) -> dict[str, str]:
    """Name -> text of everything that a version holds."""
    named = replace(deployed, name=FILES)
    return {**vllm.render(named), **json_document.render(named)}


def version_tags(deployed: Deployment) -> Mapping[str, str]:
    """Where a version comes from, and what was measured."""
    verified = deployed.verification
    tags = {
        "study": deployed.study,
        "trial": str(deployed.trial),
        "model": deployed.model,
        "vllm": deployed.vllm_version,
        "device": deployed.device_name,
        "workload": deployed.workload,
        "workload.fingerprint": deployed.workload_fingerprint,
        "verified": "true" if verified is not None and verified.found_better else "false",
    }
    for value in deployed.values:
        tags[value.name] = f"{value.value:.6g}"
        if value.reference is not None:
            tags[f"{value.name}.reference"] = f"{value.reference:.6g}"
    return tags
