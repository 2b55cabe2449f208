from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from fake_vllm import chunk

from tuner.engine.http import HttpSource, RequestFailedError, client_session
from tuner.engine.protocol import EngineDiedError, TokenDelta
from tuner.workload.model import Request

ASK = Request(arrival_s=0.0, prompt_token_ids=(5, 6, 7), output_tokens=4)
USAGE_ONLY = (
    b'data: {"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}}\n\n'
)
DONE = b"data: [DONE]\n\n"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(handler: Handler, is_alive: Callable[[], bool] = lambda: True) -> AsyncIterator[HttpSource]:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    async with TestServer(app) as server, client_session() as session:
        yield HttpSource(session, str(server.make_url("")).rstrip("/"), "name", is_alive)


def answering(*pieces: bytes) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.001)
        return response

    return handler


async def deltas(source: HttpSource) -> list[TokenDelta]:
    return [delta async for delta in source.generate(ASK, "id-1")]


async def test_tokens_are_counted_not_chunks() -> None:
    async with served(answering(chunk(1), chunk(1), chunk(3), chunk(4, "length"), USAGE_ONLY, DONE)) as source:
        found = await deltas(source)

    assert [d.token_count for d in found] == [1, 2, 1, 0]
    assert found[-1] == TokenDelta(0, finish_reason="length", cached_tokens=2)
    assert all(d.finish_reason is None for d in found[:-1])


async def test_pieces_may_break_anywhere() -> None:
    whole = chunk(1) + chunk(2, "stop") + DONE
    async with served(answering(*(whole[i : i + 7] for i in range(0, len(whole), 7)))) as source:
        found = await deltas(source)

    assert [d.token_count for d in found] == [1, 1, 0]


async def test_the_request_asks_for_its_exact_tokens_and_carries_its_id() -> None:
    seen: dict[str, Any] = {}

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.update(await request.json(), id=request.headers["X-Request-Id"])
        return await answering(chunk(4, "length"), DONE)(request)

    async with served(handler) as source:
        await deltas(source)

    assert seen["prompt"] == [5, 6, 7]
    assert seen["id"] == "id-1"
    assert (seen["model"], seen["max_tokens"], seen["min_tokens"], seen["ignore_eos"]) == ("name", 4, 4, True)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ((b'data: {"error": {"message": "no blocks"}}\n\n',), "no blocks"),
        ((b"data: not json\n\n",), "no JSON"),
        ((b'data: {"choices": [{"text": "x"}]}\n\n',), "does not count tokens"),
    ],
)
async def test_an_answer_that_is_none_fails_the_request(pieces: tuple[bytes, ...], reason: str) -> None:
    async with served(answering(*pieces)) as source:
        with pytest.raises(RequestFailedError, match=reason):
            await deltas(source)


async def test_a_refusal_fails_the_request_with_the_servers_words() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=400, text="prompt too long")

    async with served(refuse) as source:
        with pytest.raises(RequestFailedError, match="400: prompt too long"):
            await deltas(source)


async def test_a_stream_that_ends_early_has_no_finish_reason() -> None:
    async with served(answering(chunk(1))) as source:
        found = await deltas(source)

    assert [d.finish_reason for d in found] == [None]


async def test_a_lost_connection_is_the_engines_death_only_when_its_process_is_gone() -> None:
    async def drop(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(chunk(1))
        assert request.transport is not None
        request.transport.abort()
        return response

    async with served(drop) as source:
        with pytest.raises(RequestFailedError, match="connection was lost"):
            await deltas(source)
    async with served(drop, is_alive=lambda: False) as source:
        with pytest.raises(EngineDiedError, match="server is gone"):
            await deltas(source)


async def test_closing_the_stream_early_closes_the_connection() -> None:
    ended = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for total in range(1, 10_000):
                await response.write(chunk(total))
                await asyncio.sleep(0.01)
        finally:
            ended.set()
        return response

    async with served(endless) as source:
        stream = source.generate(ASK, "id-1")
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]  # an async generator
        await asyncio.wait_for(ended.wait(), 5)
