"""The bench's own little HTTP client: events, in whatever pieces they come."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.lowlevel

from erllama.bench import http
from erllama.errors import EngineError

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKS = (b"data: one\n\n", b"data: tw", b"o\n\n: a comment\n\ndata: three\n\ndata: [DONE]\n\n")
BODY = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in CHUNKS)
END = b"0\r\n\r\n"
EVENTS = [b"one", b"two", b"three", b"[DONE]"]


async def events_of(reply: bytes, n_at_once: int) -> tuple[list[bytes], bytes]:
    """What a client makes of a server's bytes, so many at once."""
    seen: list[bytes] = []

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            for at in range(0, len(reply), n_at_once):
                await stream.send_all(reply[at : at + n_at_once])
                await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        listeners: Any = await nursery.start(trio.serve_tcp, serve, 0)
        port = listeners[0].socket.getsockname()[1]
        try:
            last = await http.stream_events(port, "/", {}, seen.append)
        finally:
            nursery.cancel_scope.cancel()
    return seen, last


@pytest.mark.parametrize("n_at_once", [1, 7, 1000])
async def test_events_in_pieces(n_at_once: int) -> None:
    """Chunks and events are cut anywhere."""
    assert await events_of(HEAD + BODY + END, n_at_once) == (EVENTS, b"[DONE]")


@pytest.mark.parametrize("reply", [HEAD + BODY, HEAD + BODY[:-4], HEAD, b"HTTP/1.1 500 \r\n\r\nwhy"])
async def test_what_breaks_off_is_an_error(reply: bytes) -> None:
    """Also one that ends after a whole event."""
    with pytest.raises(BaseExceptionGroup) as raised:
        await events_of(reply, 1000)
    assert raised.group_contains(EngineError)


def test_what_was_read_is_not_read_again() -> None:
    """Whatever the cut, each event comes once."""
    whole = BODY + END
    for cut in range(len(whole)):
        events = http._Events()
        found = events.feed(whole[:cut])
        assert not events.is_over
        assert found + events.feed(whole[cut:]) == EVENTS
        assert events.is_over
