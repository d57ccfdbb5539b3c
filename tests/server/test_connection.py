"""Beneath HTTP: a connection is closed where it was to be, and bytes go out as they come."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from typing import Any

import httpx
import pytest
import trio
from hypercorn.events import RawData
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from runtime.chat_scenes import ScriptedChat

from erllama.server.listener import Connection
from erllama.server.serving import listener_config
from erllama.server.settings import make_settings
from server.scenes import Scene, chat_body, serving, until

CHAT = "/v1/chat/completions"


async def connect(url: str, body: dict[str, Any], *head: str, n_missing: int = 0) -> trio.SocketStream:
    """A connection on which a chat was asked for; the last bytes of the body may be missing."""
    host, _, port = url.removeprefix("http://").partition(":")
    stream = await trio.open_tcp_stream(host, int(port))
    data = json.dumps(body).encode()
    lines = [f"POST {CHAT} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}", *head, "", ""]
    await stream.send_all("\r\n".join(lines).encode() + data[: len(data) - n_missing])
    return stream


async def read_all(stream: trio.SocketStream) -> bytes:
    """Until the other side closes."""
    data = b""
    async with stream:
        while more := await stream.receive_some():
            data += more
    return data


@pytest.mark.parametrize("stream", [False, True])
async def test_a_connection_that_was_to_be_closed_is(stream: bool) -> None:
    """`Connection: close`, as proxies send it: the end of the reply is the end of the connection."""
    async with serving() as scene:
        client = await connect(scene.url, chat_body(stream=stream), "Connection: close")
        with trio.fail_after(60):
            data = await read_all(client)
        assert data.startswith(b"HTTP/1.1 200")
        assert data.rstrip().endswith(b"0" if stream else b"}")  # the last, empty chunk
        await scene.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_who_ends_its_side_has_left(stream: bool) -> None:
    """From here it looks the same as a client that is gone: the answer ends at once, its place is free."""
    slow = partial(ScriptedChat, says="word " * 400, threaded=True, step_delay_s=0.01)
    async with serving(slow) as scene:
        client = await connect(scene.url, chat_body(stream=stream, max_tokens=2000))
        await until(lambda: bool(scene.pool.all_entries()) and scene.entry().n_running == 1)
        await client.send_eof()
        with trio.fail_after(10):  # the whole answer takes 20 s
            data = await read_all(client)
            await scene.wait_idle()
        assert b"[DONE]" not in data
        assert b'"usage"' not in data


async def test_what_no_model_answers_is_told_also_to_who_ends_its_side() -> None:
    """`nc` sends a request and the end of it: facts and refusals are there by then."""
    async with serving() as scene:
        for asked, status in ((b"GET /health", 200), (b"GET /api/tags", 200), (b"GET /nowhere", 404)):
            host, _, port = scene.url.removeprefix("http://").partition(":")
            client = await trio.open_tcp_stream(host, int(port))
            await client.send_all(asked + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await client.send_eof()
            with trio.fail_after(5):
                assert (await read_all(client)).startswith(b"HTTP/1.1 %d" % status)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_wrong_with_a_request_is_told_also_to_who_ends_its_side(stream: bool) -> None:
    """What needs no model to be seen: the name of the model, and what `check` looks at in a thread."""
    async with serving() as scene:
        for wrong, status in (({"model": "nobody"}, 404), ({"tool_choice": "bogus"}, 400)):
            client = await connect(scene.url, chat_body(stream=stream) | wrong)
            await client.send_eof()
            with trio.fail_after(10):
                assert (await read_all(client)).startswith(b"HTTP/1.1 %d" % status)
        assert scene.loads == []


async def test_the_log_tells_that_a_client_left(caplog: pytest.LogCaptureFixture) -> None:
    """In the middle of an answer, and while a model is loaded for it."""
    slow = partial(ScriptedChat, says="word " * 400, threaded=True, step_delay_s=0.01)
    caplog.set_level("INFO", "erllama.access")
    async with serving(slow) as scene:
        for route, body in (
            (CHAT, chat_body(stream=True, max_tokens=2000)),
            ("/api/generate", {"model": "fake"}),
        ):
            scene.hold_load = trio.Event() if route != CHAT else None
            await scene.pool.let_go(scene.pool.resolver.resolve("fake"))
            n_loads = len(scene.loads)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(scene.client.post, route, json=body))
                await until(lambda n=n_loads: len(scene.loads) > n)
                if route == CHAT:
                    await until(lambda: scene.entry().n_running == 1)
                nursery.cancel_scope.cancel()
            await until(lambda path=route: any(path in record.getMessage() for record in caplog.records))
            assert caplog.records[-1].getMessage().endswith("error=client_left")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_computed_for_nobody_counts(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """An answer that does not end, its client gone or its time over, in the metrics and in the log."""
    slow = partial(ScriptedChat, says="word " * 400, threaded=True, step_delay_s=0.01)
    caplog.set_level("INFO", "erllama.access")
    for limits in ({}, {"total_s": 0.4}):
        caplog.clear()
        async with serving(slow, limits=limits) as scene:
            async with trio.open_nursery() as nursery:
                body = chat_body(stream=stream, max_tokens=2000)
                nursery.start_soon(partial(scene.client.post, CHAT, json=body))
                await until(lambda: n_generated(scene) > 3)
                if not limits:
                    nursery.cancel_scope.cancel()
            await until(lambda: any(CHAT in record.getMessage() for record in caplog.records))
            told = dict(part.split("=") for part in caplog.records[-1].getMessage().split() if "=" in part)
            assert told["error"] == ("timeout" if limits else "client_left")
            assert int(told["prompt"]) > 10
            assert (int(told["generated"]) > 3, told["cached"]) == (True, "0")
            text = (await scene.client.get("/metrics")).text
            for kind in ("prompt", "cached", "generated"):
                assert f'erllama_tokens_total{{kind="{kind}",model="fake"}} {told[kind]}.0' in text
            assert 'erllama_cancelled_total{model="fake"} 1.0' in text


def n_generated(scene: Scene) -> int:
    """By the requests that run now."""
    models = [entry.model for entry in scene.pool.all_entries() if entry.model is not None]
    return sum(request.n_generated for model in models for request in model.requests())


async def test_the_log_tells_what_a_server_that_ends_at_once_cut_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As a second Ctrl-C does: everything is cancelled."""
    slow = partial(ScriptedChat, says="word " * 400, threaded=True, step_delay_s=0.01)
    caplog.set_level("INFO", "erllama.access")

    async def ask(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            with contextlib.suppress(httpx.HTTPError):
                await client.post(CHAT, json=chat_body(max_tokens=2000))

    async with trio.open_nursery() as nursery, serving(slow) as scene:
        nursery.start_soon(ask, scene.url)
        await until(lambda: n_generated(scene) > 3)
    assert caplog.records[-1].getMessage().endswith("error=shutting_down")


async def test_the_log_tells_that_a_client_left_within_its_body(caplog: pytest.LogCaptureFixture) -> None:
    """It is not one that sent no JSON."""
    caplog.set_level("INFO", "erllama.access")
    async with serving() as scene:
        client = await connect(scene.url, chat_body(), n_missing=3)
        await client.aclose()
        await until(lambda: bool(caplog.records))
        assert caplog.records[-1].getMessage().endswith("error=client_left")


async def test_what_a_full_socket_does_not_take_comes_later() -> None:
    """Every byte, in order, while the other side reads slowly."""
    ours, theirs = (trio.SocketStream(s) for s in trio.socket.socketpair())
    config = listener_config(make_settings({}))
    connection = Connection(None, config, WorkerContext(None), ours)
    sent = [bytes([i]) * 300_000 for i in range(8)]
    received = b""

    async def send() -> None:
        for data in sent:
            await connection.protocol_send(RawData(data))
        await ours.aclose()

    with trio.fail_after(60):
        async with theirs, trio.open_nursery() as nursery:
            nursery.start_soon(send)
            while more := await theirs.receive_some(50_000):
                received += more
                await trio.lowlevel.checkpoint()
    assert received == b"".join(sent)


async def test_a_token_takes_no_turn_of_the_scheduler_on_its_way_out(monkeypatch: Any) -> None:
    """While the socket takes what is written, Hypercorn's slow way is not taken."""
    slow = []
    real = TCPServer.protocol_send

    async def counted(self: Connection, event: Any) -> None:
        slow.append(type(event).__name__)
        await real(self, event)

    monkeypatch.setattr(TCPServer, "protocol_send", counted)
    async with serving(partial(ScriptedChat, says="word " * 10)) as scene:
        await read_all(await connect(scene.url, chat_body(stream=True), "Connection: close"))
    assert "RawData" not in slow
    assert "Closed" in slow
