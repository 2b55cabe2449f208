"""systemd: one service unit for a host on which vLLM is installed."""

from __future__ import annotations

import re

from tuner.export.arguments import command_line
from tuner.export.deployment import Deployment
from tuner.export.text import comment, header

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")


def render(deployed: Deployment) -> dict[str, str]:
    """`NAME.service`."""
    return {f"{deployed.name}.service": comment([*header(deployed), *_usage(deployed)]) + _unit(deployed)}


def _usage(deployed: Deployment) -> list[str]:
    lines = [f"Needs {deployed.package} in /opt/vllm, or another folder that PATH below names first."]
    if deployed.secrets:
        lines.append(
            f"Needs {_secrets_file(deployed)}, mode 600, with one NAME=VALUE a line: {' '.join(deployed.secrets)}"
        )
    return [*lines, f"Start with: systemctl enable --now ./{deployed.name}.service"]


def _unit(deployed: Deployment) -> str:
    command = ["/usr/bin/env", "vllm", "serve", deployed.model, *command_line(deployed.args)]
    lines = [
        "[Unit]",
        f"Description={_specifiers(_visible(f'vLLM, {deployed.served_name}'))}",
        "Wants=network-online.target",
        "After=network-online.target",
        "",
        "[Service]",
        "Type=exec",
        "DynamicUser=yes",
        "CacheDirectory=vllm",
        "Environment=PATH=/opt/vllm/bin:/usr/local/bin:/usr/bin:/bin",
        "Environment=HOME=/var/cache/vllm",
        *(f"Environment={quoted(f'{name}={value}')}" for name, value in deployed.env.items()),
        *([f"EnvironmentFile={_secrets_file(deployed)}"] if deployed.secrets else []),
        f"ExecStart={' '.join(quoted(word, is_command=True) for word in command)}",
        "Restart=on-failure",
        "RestartSec=10",
        "KillMode=mixed",
        "TimeoutStopSec=120",
        "LimitNOFILE=65536",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def quoted(word: str, *, is_command: bool = False) -> str:
    """One word of a unit file, as systemd.syntax(7) and systemd.service(5) read it.

    Percent signs are doubled against specifiers, dollars against variables (in commands only), quotes, backslashes
    and control characters are C escapes.
    """
    text = _specifiers(word)
    if is_command:
        text = text.replace("$", "$$")
    if _PLAIN.fullmatch(text):
        return text
    return '"' + "".join(_escaped(c) for c in text) + '"'


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    return character if character.isprintable() else "".join(f"\\x{byte:02x}" for byte in character.encode())


def _specifiers(text: str) -> str:
    return text.replace("%", "%%")


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() and c != "\\" else " " for c in text)


def _secrets_file(deployed: Deployment) -> str:
    return f"/etc/vllm/{deployed.name}.env"
