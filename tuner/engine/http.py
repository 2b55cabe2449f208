"""A token source that streams from an OpenAI-compatible server: `/v1/completions` with token ids.

Knows the protocol only, not who started the server. Tokens are counted by the running total that the server sends
with each chunk, since a chunk may hold several tokens, or none that has become text yet.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

from tuner.engine.protocol import EngineDiedError, TokenDelta
from tuner.workload.model import Request

_DEATH_S = 2.0
"""A server that is going down drops its connections before its process ends; so long is waited for the end."""


class RequestFailedError(Exception):
    """The server answered one request with an error, or with something that is no answer."""


class HttpSource:
    """A `TokenSource` over HTTP.

    Parameters
    ----------
    session:
        Must not limit its connections: a request that waits for one would be late by the client's own fault.
    base_url:
        Address of the server, without `/v1`.
    model:
        Name under which the server has the model.
    is_alive:
        Whether the server's process still runs; decides what a lost connection means.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        model: str,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._session = session
        self._url = f"{base_url}/v1/completions"
        self._model = model
        self._is_alive = is_alive

    async def generate(self, request: Request, request_id: str) -> AsyncIterator[TokenDelta]:
        """Stream one request; closing the iterator closes the connection, on which the server aborts it.

        Raises
        ------
        EngineDiedError
            When the connection is lost and the server's process is gone.
        RequestFailedError
            When the server refuses the request or does not count its tokens.
        """
        body = _body(self._model, request)
        try:
            async with self._session.post(self._url, json=body, headers={"X-Request-Id": request_id}) as response:
                if response.status != 200:
                    text = (await response.text())[:500]
                    raise RequestFailedError(f"the server answered {response.status}: {text}")
                async for delta in _deltas(response.content):
                    yield delta
        except (aiohttp.ClientError, ConnectionError) as error:
            await self._raise_if_dead(error)
            raise RequestFailedError(f"the connection was lost: {error}") from error
        except RequestFailedError as error:
            if not self._is_alive():
                raise EngineDiedError(str(error)) from error
            raise

    async def _raise_if_dead(self, error: Exception) -> None:
        for _ in range(10):
            if not self._is_alive():
                raise EngineDiedError(f"the server is gone: {error}") from error
            await asyncio.sleep(_DEATH_S / 10)


def client_session() -> aiohttp.ClientSession:
    """Make a session without limits on connections and time: the load driver and the watchdog have their own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)
    )


def _body(model: str, request: Request) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(request.prompt_token_ids),
        "max_tokens": request.output_tokens,
        "min_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


async def _deltas(content: aiohttp.StreamReader) -> AsyncIterator[TokenDelta]:
    """Deltas of one answer. The finish reason comes with the last, after the tokens that it belongs to."""
    counted, finish_reason, cached_tokens = 0, None, None
    async for event in _events(content):
        if event == b"[DONE]":
            yield TokenDelta(0, finish_reason=finish_reason, cached_tokens=cached_tokens)
            return
        chunk = _chunk(event)
        usage = chunk.get("usage")
        if usage is None:
            raise RequestFailedError("the server does not count tokens chunk by chunk (continuous_usage_stats)")
        cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", cached_tokens)
        for choice in chunk.get("choices", ()):
            finish_reason = choice.get("finish_reason") or finish_reason
        total = usage.get("completion_tokens") or 0
        if total > counted:
            yield TokenDelta(total - counted)
            counted = total


def _chunk(event: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(event)
    except ValueError as error:
        raise RequestFailedError(f"the server sent no JSON: {event[:200]!r}") from error
    if not isinstance(chunk, dict) or "error" in chunk:
        raise RequestFailedError(f"the server reports {json.dumps(chunk)[:500]}")
    return chunk


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events, one line each, whatever pieces they arrive in."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
