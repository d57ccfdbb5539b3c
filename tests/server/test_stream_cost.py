"""What a streamed token costs in Python, counted: the same on a busy machine and on an idle one."""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastapi
import h11
import hypercorn
import pytest
import starlette
from runtime.chat_scenes import ScriptedChat

import erllama.server
from erllama.server.app import make_app
from erllama.server.chunks import lend
from server.scenes import asgi_scope, chat_body, receiver, serving
from server.test_connection import connect, read_all

if TYPE_CHECKING:
    from types import FrameType

WEB = tuple(str(Path(package.__file__).parent) for package in (fastapi, starlette))
BELOW = tuple(str(Path(package.__file__).parent) for package in (hypercorn, h11))
OURS = str(Path(erllama.server.__file__).parent)
MAKE = partial(ScriptedChat, says="word " * 200, threaded=True, step_delay_s=0.001)
MOST = {"/v1/chat/completions": 12, "/v1/completions": 12, "/v1/messages": 14, "/api/chat": 15}
SLACK = 1.5  # a busy machine's stream takes seconds, and tasks that look after it wake up meanwhile
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
            self["below"] += file.startswith(BELOW)


class Socket:
    """Takes every chunk at once. Implements `Chunks`."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def write_now(self, chunk: bytes) -> bytes:
        """See `Chunks`."""
        self.sent.append(chunk)
        return b""

    async def write_rest(self, rest: bytes) -> None:
        """Never called: there is no rest."""


async def streamed(scene: Any, path: str, n: int, *, short: bool) -> tuple[Calls, list[bytes]]:
    """What a stream of `n` tokens without a socket calls, and what it sends. `short`: the way of chunks."""
    limit = {"options": {"num_predict": n}} if path.startswith("/api") else {"max_tokens": n}
    body = json.dumps(BODIES[path] | limit).encode()
    socket = Socket()

    async def send(message: dict[str, Any]) -> None:
        socket.sent.append(message.get("body", b""))

    calls, scope = Calls(), asgi_scope(path)
    if short:
        lend(scope, socket)
    app = make_app(scene.service)
    sys.setprofile(calls.hook)
    try:
        await app(scope, receiver(body), send)
    finally:
        sys.setprofile(None)
    return calls, socket.sent


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("path", MOST)
async def test_a_token_takes_few_calls(path: str, short: bool) -> None:
    """The difference between a long and a short stream, for each token more; and a write for each at most."""
    async with serving(MAKE) as scene:
        await streamed(scene, path, 2, short=short)
        few_calls, few = await streamed(scene, path, 20, short=short)
        calls, many = await streamed(scene, path, 220, short=short)
        assert 0 < (calls["ours"] - few_calls["ours"]) / 200 <= MOST[path] + (0 if short else 2) + SLACK
        assert (calls["web"] - few_calls["web"]) / 200 <= (0 if short else 4) + SLACK  # what sends
        assert len(many) - len(few) <= 220  # where fewer have gone together, or a ping came


async def test_nobody_but_us_is_called_for_a_token() -> None:
    """Over a socket, from the reply to the system call: neither Starlette nor Hypercorn nor h11."""

    async def calls_of(n: int) -> Calls:
        calls = Calls()
        client = await connect(scene.url, chat_body(stream=True, max_tokens=n), "Connection: close")
        sys.setprofile(calls.hook)
        try:
            await read_all(client)
        finally:
            sys.setprofile(None)
        return calls

    async with serving(MAKE) as scene:
        await calls_of(2)
        few, many = await calls_of(20), await calls_of(220)
        assert many["below"] - few["below"] <= 20
        assert many["web"] - few["web"] <= 20
