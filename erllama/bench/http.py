"""The little of HTTP/1.1 that asking a server on loopback takes, with as little of our CPU as can be.

The peer computes on the same cores, so what the client spends is taken from it: one request per connection,
and events of a stream are handed on as bytes, unparsed.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import trio

from erllama.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

LOOPBACK = "127.0.0.1"
MAX_RECV = 65536
_EVENT = b"data: "


def peer_failed(message: str) -> EngineError:
    """The peer did not start, ended, or refused a request; the message has its last words."""
    return EngineError(message, reason="peer_failed")


class _Reader:
    """Lines and counted bytes out of a connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._data = bytearray()

    async def line(self) -> bytes:
        """The next line, without its end."""
        while (at := self._data.find(b"\n")) < 0:
            await self._more()
        found = bytes(self._data[:at]).rstrip(b"\r")
        del self._data[: at + 1]
        return found

    async def exactly(self, n: int) -> bytes:
        """The next n bytes."""
        while len(self._data) < n:
            await self._more()
        found = bytes(self._data[:n])
        del self._data[:n]
        return found

    async def rest(self) -> bytes:
        """Everything until the peer closes."""
        while data := await self._stream.receive_some():
            self._data += data
        return bytes(self._data)

    def take(self) -> bytes:
        """What was read too far."""
        taken = bytes(self._data)
        self._data.clear()
        return taken

    async def _more(self) -> None:
        data = await self._stream.receive_some()
        if not data:
            raise peer_failed("the peer closed the connection in the middle of its answer")
        self._data += data


class _Events:
    """Data of server-sent events out of a chunked body, in whatever pieces it comes."""

    def __init__(self) -> None:
        self.is_over = False
        self._data = self._pending = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are whole now."""
        found: list[bytes] = []
        data, at = self._data + data, 0
        while (end := data.find(b"\r\n", at)) >= 0:
            size, begin = int(data[at:end].partition(b";")[0], 16), end + 2
            if len(data) < begin + size + 2:
                break
            if not size:
                self.is_over = True
                break
            at = begin + size + 2
            *events, self._pending = (self._pending + data[begin : begin + size]).split(b"\n\n")
            found += [event[len(_EVENT) :] for event in events if event.startswith(_EVENT)]
        self._data = data[at:]
        return found


async def _receive(stream: trio.SocketStream) -> bytes:
    """What has come: for a stream of tokens cheaper than `receive_some`, which tries before it waits."""
    while True:
        await trio.lowlevel.wait_readable(stream.socket)
        try:
            data = os.read(stream.socket.fileno(), MAX_RECV)
        except BlockingIOError:
            continue
        except OSError as why:
            raise peer_failed(f"the peer's connection broke: {why}") from None
        if not data:
            raise peer_failed("the peer closed the connection in the middle of its answer")
        return data


async def request(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and parsed JSON (None if it is no JSON). Raises: `EngineError`, OSError while nobody listens."""
    stream = await _send(port, method, path, body)
    async with stream:
        reader = _Reader(stream)
        status, headers = await _head(reader)
        data = await _body(reader, headers)
    try:
        return status, json.loads(data)
    except ValueError:
        return status, None


async def stream_events(port: int, path: str, body: Any, on_event: Callable[[bytes], None]) -> bytes:
    """POST and hand each server-sent event's data to `on_event` as it comes; returns the last one's.

    Raises: `EngineError` for any status but 200, and for a stream that breaks off.
    Cancellation: the connection is closed, which ends the request at the peer.
    """
    stream = await _send(port, "POST", path, body)
    async with stream:
        reader = _Reader(stream)
        status, headers = await _head(reader)
        if status != 200:
            data = await _body(reader, headers)
            raise peer_failed(f"the peer answered {status}: {data[:500].decode(errors='replace')}")
        events, data, last = _Events(), reader.take(), b""
        while True:
            for event in events.feed(data):
                last = event
                on_event(event)
            if events.is_over:
                return last
            data = await _receive(stream)


async def first_byte_s(port: int, path: str, body: Any) -> float:
    """Seconds from connecting to the first byte of the reply, which is then read to its end."""
    began = time.perf_counter()
    stream = await _send(port, "POST", path, body)
    async with stream:
        data = await stream.receive_some()
        took_s = time.perf_counter() - began
        if not data.startswith(b"HTTP/1.1 200"):
            raise peer_failed(f"the peer answered {data[:500].decode(errors='replace')}")
        while await stream.receive_some():
            pass
    return took_s


async def _send(port: int, method: str, path: str, body: Any) -> trio.SocketStream:
    data = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {LOOPBACK}:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    stream = await trio.open_tcp_stream(LOOPBACK, port)
    try:
        await stream.send_all(head.encode() + data)
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return stream


async def _head(reader: _Reader) -> tuple[int, dict[str, str]]:
    status_line = (await reader.line()).split()
    headers = {}
    while line := await reader.line():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    if len(status_line) < 2 or not status_line[1].isdigit():
        raise peer_failed("the peer does not speak HTTP")
    return int(status_line[1]), headers


async def _body(reader: _Reader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") == "chunked":
        data = b""
        while chunk := await _chunk(reader):
            data += chunk
        return data
    if "content-length" in headers:
        return await reader.exactly(int(headers["content-length"]))
    return await reader.rest()


async def _chunk(reader: _Reader) -> bytes:
    """RFC 9112 s7.1: the size in hex on a line, the data, an empty line; size 0 ends."""
    size = int((await reader.line()).split(b";")[0], 16)
    data = await reader.exactly(size)
    await reader.line()
    return data
