"""A stand-in for the `vllm` command: reads the same config file and speaks the same protocol, with no model behind it.

What it does wrong is said by the model's name, as `right`, `never_ready`, `wrong_name`, `dies_at_start`,
`dies_on_request`, `ignores_term`, `answers_400`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import Any

import yaml
from aiohttp import web

OOM = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."


def main() -> None:
    with open(sys.argv[sys.argv.index("--config") + 1]) as file:  # noqa: PTH123  a script of its own
        config = yaml.safe_load(file)
    config |= dict(word[2:].split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word)
    kind = config["model"]
    if kind == "dies_at_start":
        sys.exit(OOM)
    if kind == "ignores_term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "300"])
    address = {"host": config["host"], "port": int(config["port"])}
    web.run_app(application(kind, config), print=None, handle_signals=kind != "ignores_term", **address)


def application(kind: str, config: dict[str, Any]) -> web.Application:
    app = web.Application()

    async def health(_: web.Request) -> web.Response:
        return web.Response(status=503 if kind == "never_ready" else 200)

    async def models(_: web.Request) -> web.Response:
        name = "another" if kind == "wrong_name" else config["served-model-name"]
        return web.json_response({"data": [{"id": name, "max_model_len": 4096}]})

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def reset(_: web.Request) -> web.Response:
        return web.Response()

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if kind == "dies_on_request":
            os._exit(17)
        if kind == "answers_400":
            return web.json_response({"error": {"message": "too long"}}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        for count in range(1, body["max_tokens"] + 1):
            await asyncio.sleep(0.001)
            await response.write(chunk(count, "length" if count == body["max_tokens"] else None))
        await response.write(b"data: [DONE]\n\n")
        return response

    app.add_routes([web.get("/health", health), web.get("/v1/models", models), web.get("/version", version)])
    app.add_routes([web.post("/reset_prefix_cache", reset), web.post("/v1/completions", completions)])
    return app


def chunk(total: int, finish_reason: str | None = None, **usage: Any) -> bytes:
    """One server-sent event as vLLM writes it, `total` tokens so far."""
    choice = {"index": 0, "text": "x", "finish_reason": finish_reason}
    document = {"choices": [choice], "usage": {"completion_tokens": total, **usage}}
    return f"data: {json.dumps(document)}\n\n".encode()


if __name__ == "__main__":
    main()
