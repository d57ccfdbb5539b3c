"""What a streamed token costs in Python, counted: the same on a busy machine and on an idle one."""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastapi
import hypercorn
import pytest
import starlette
from runtime.chat_scenes import ScriptedChat

import erllama.server
from erllama.server.app import make_app
from server.scenes import asgi_scope, chat_body, receiver, serving
from server.test_connection import connect, read_all

if TYPE_CHECKING:
    from types import FrameType

WEB = tuple(str(Path(package.__file__).parent) for package in (fastapi, starlette))
OURS, HYPERCORN = (str(Path(package.__file__).parent) for package in (erllama.server, hypercorn))
MAKE = partial(ScriptedChat, says="word " * 200, threaded=True, step_delay_s=0.001)
MOST = {"/v1/chat/completions": 14, "/v1/completions": 14, "/v1/messages": 18, "/api/chat": 20}
BODIES = {
    "/v1/chat/completions": chat_body(stream=True),
    "/v1/completions": {"model": "fake", "prompt": "x", "stream": True},
    "/v1/messages": chat_body(stream=True),
    "/api/chat": chat_body(),
}


class Calls(Counter[str]):
    """Functions entered, by package; a coroutine counts each time it goes on."""

    def hook(self, frame: FrameType, event: str, arg: object) -> None:
        """For sys.setprofile."""
        if event == "call":
            file = frame.f_code.co_filename
            self["ours"] += file.startswith(OURS)
            self["web"] += file.startswith(WEB)
            self["hypercorn"] += file.startswith(HYPERCORN)


async def streamed(scene: Any, path: str, n: int) -> tuple[Calls, list[bytes]]:
    """What a stream of `n` tokens without a socket calls, and what it sends."""
    limit = {"options": {"num_predict": n}} if path.startswith("/api") else {"max_tokens": n}
    body = json.dumps(BODIES[path] | limit).encode()
    sent: list[bytes] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))

    calls = Calls()
    app = make_app(scene.service)
    sys.setprofile(calls.hook)
    try:
        await app(asgi_scope(path), receiver(body), send)
    finally:
        sys.setprofile(None)
    return calls, sent


@pytest.mark.parametrize("path", MOST)
async def test_a_token_takes_few_calls(path: str) -> None:
    """The difference between a long and a short stream, for each token more; and a write for each at most."""
    async with serving(MAKE) as scene:
        await streamed(scene, path, 2)
        short, few = await streamed(scene, path, 20)
        long, many = await streamed(scene, path, 220)
        assert 0 < (long["ours"] - short["ours"]) / 200 <= MOST[path]
        assert (long["web"] - short["web"]) / 200 <= 4  # what sends; who waits for a token is not within them
        assert len(many) - len(few) <= 200


async def test_hypercorn_takes_few_calls_for_a_write() -> None:
    """Over a socket, from the reply to the system call."""

    async def calls_of(n: int) -> int:
        calls = Calls()
        client = await connect(scene.url, chat_body(stream=True, max_tokens=n), "Connection: close")
        sys.setprofile(calls.hook)
        try:
            await read_all(client)
        finally:
            sys.setprofile(None)
        return calls["hypercorn"]

    async with serving(MAKE) as scene:
        await calls_of(2)
        assert 0 < (await calls_of(220) - await calls_of(20)) / 200 <= 8
