"""`vllm serve` itself: the YAML file of `--config`, and the same as one shell line that also sets the environment."""

from __future__ import annotations

import shlex

from tuner.export.arguments import command_line, config_file
from tuner.export.deployment import Deployment
from tuner.export.text import comment, header, yaml_text


def render(deployed: Deployment) -> dict[str, str]:
    """`NAME.yaml` and `NAME.sh`."""
    name = deployed.name
    return {f"{name}.yaml": _config(deployed), f"{name}.sh": _script(deployed)}


def _config(deployed: Deployment) -> str:
    needed = [f"export {variable}=..." for variable in deployed.secrets]
    needed += [f"export {n}={shlex.quote(v)}" for n, v in deployed.env.items()]
    usage = [f"Start with: vllm serve --config {deployed.name}.yaml"]
    if needed:
        usage = ["The file cannot set the environment. Before the start:", *needed, *usage]
    return comment([*header(deployed), *usage]) + yaml_text(config_file({"model": deployed.model, **deployed.args}))


def _script(deployed: Deployment) -> str:
    lines = ["#!/bin/sh", comment(header(deployed)).rstrip(), "set -eu"]
    lines += [f': "${{{variable}:?set {variable} first}}"' for variable in deployed.secrets]
    setting = [f"{name}={value}" for name, value in deployed.env.items()]
    words = [*(["env", *setting] if setting else []), "vllm", "serve", deployed.model, *command_line(deployed.args)]
    lines.append(f'exec {shlex.join(words)} "$@"')
    return "\n".join(lines) + "\n"
