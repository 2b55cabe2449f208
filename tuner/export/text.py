"""What the formats share: the header of comments, YAML that every reader reads alike, escapes, and sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import yaml

from tuner.export.deployment import Deployment, MeasuredValue, day

PORT = 8000
"""`vllm serve` listens here unless told otherwise."""

CACHE = "/root/.cache/huggingface"
"""Where the vLLM images keep what they download."""

MODEL_MOUNT = "/model"
"""Where a container finds a model that is a folder of the host."""

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]+")


def header(deployed: Deployment) -> tuple[str, ...]:
    """Lines that say where the configuration comes from and what was measured. No line holds a control character."""
    hardware = "CPU" if deployed.on_cpu else f"{deployed.device_count} × {deployed.device_name}"
    lines = [
        f"Study {deployed.study}, trial {deployed.trial}, measured on {day(deployed)} (UTC).",
        f"Model {deployed.model}; {deployed.package}; {hardware}.",
        f"Workload {deployed.workload}, fingerprint {deployed.workload_fingerprint}.",
        *(_value_line(value) for value in deployed.values),
    ]
    if deployed.args.get("trust_remote_code"):
        lines.append("Runs code that comes with the model: trust_remote_code is on, as the study has it.")
    if deployed.verification is not None:
        said = ", ".join(f"{name} {verdict}" for name, verdict in deployed.verification.verdict.items())
        how = "over HTTP" if deployed.verification.over_http else "in process"
        lines.append(f"Verified {how} in {deployed.verification.rounds} rounds: {said}.")
    return tuple(_one_line(line) for line in lines)


def comment(lines: Iterable[str]) -> str:
    """Lines as `#` comments, each closed by a newline."""
    return "".join(f"# {_one_line(line)}".rstrip() + "\n" for line in lines)


def yaml_text(*documents: Any) -> str:
    """YAML of one or more documents, keys in their order.

    Any text that a reader of YAML 1.1 or 1.2 could take for a number, a boolean or null is quoted: the readers of
    Compose, Kubernetes and Helm do not agree on `1e3`, `on` or `0o17`.
    """
    return yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=math.inf
    )


class _Dumper(yaml.SafeDumper):
    """Quotes all but plain words; never writes anchors, which some readers refuse."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if _PLAIN.fullmatch(text) else '"' if "'" in text or not text.isprintable() else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def doubled_dollars(text: str) -> str:
    """Text in which Compose and Kubernetes find no variable to fill in: both read `$$` as one dollar."""
    return text.replace("$", "$$")


def container_model(deployed: Deployment) -> tuple[str, dict[str, Any]]:
    """Model as a container sees it, and the arguments that go with it: a folder is mounted and keeps its name."""
    args = dict(deployed.args)
    if not deployed.model_is_folder:
        return deployed.model, args
    args.setdefault("served_model_name", deployed.served_name)
    return MODEL_MOUNT, args


def shared_memory_gib(deployed: Deployment) -> int:
    """Size of `/dev/shm` in GiB: worker processes talk to each other through it. At least 2, and 4 a device more.

    vLLM's guide to Docker asks for host IPC or an explicit size and shows about 10 GiB.
    """
    return 2 + 4 * max(deployed.device_count, 1)


def host_memory_gib(deployed: Deployment) -> int:
    """RAM to ask for in GiB, rounded up: 8 for the processes, the weights once on their way to the device, and the
    shared memory; on the CPU the weights and the KV cache stay there.
    """
    weights = deployed.weights_gib or 0.0
    kv = (deployed.kv_gib or 4.0) if deployed.on_cpu else 0.0
    return math.ceil(8 + weights + kv) + shared_memory_gib(deployed)


def cache_gib(deployed: Deployment) -> int:
    """Disk for downloaded weights and compiled kernels in GiB: the weights once more than they need, and 20."""
    return math.ceil(20 + 2 * (deployed.weights_gib or 0.0) * max(deployed.device_count, 1))


def startup_budget_s(deployed: Deployment) -> int:
    """Seconds to wait for the first answer: three times the measured start, an hour at least for the first download."""
    return max(3600, math.ceil(3 * (deployed.start_s or 0.0)))


def _value_line(value: MeasuredValue) -> str:
    text = f"{value.name}: {_figure(value.value, value.interval)}"
    if value.reference is None:
        return text
    text += f"; vLLM's defaults {_figure(value.reference, value.reference_interval)}"
    if value.reference:
        text += f", {100 * (value.value / value.reference - 1):+.1f}%"
    return text


def _figure(value: float, interval: tuple[float, float] | None) -> str:
    return f"{value:.4g}" + (f" (95%: {interval[0]:.4g} to {interval[1]:.4g})" if interval else "")


def _one_line(text: str) -> str:
    """Text without anything that could end a comment."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
