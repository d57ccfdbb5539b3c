"""Hypercorn's connections on our own listener.

What a stream writes for a token goes to the socket at once if the socket takes it: Hypercorn's way takes
a lock, two turns of trio's scheduler and a scope, which is more than everything else that a token costs. See
`chunks` too.
"""

from __future__ import annotations

import logging
import math
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, RawData, Updated
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import repr_socket_addr

from .chunks import framed, lend

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hypercorn.events import Event
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger("erllama.server")


class ListenerConfig(Config):
    """Hypercorn's, and how long the head of a request may take."""

    head_s = 60.0


class Connection(TCPServer):
    """One client's connection."""

    config: ListenerConfig

    _is_idle = True  # between requests, or in the head of one
    _head_ends_at = math.inf
    _is_over = False

    def __init__(
        self, app: ASGIApp, config: ListenerConfig, context: WorkerContext, stream: trio.SocketStream
    ) -> None:
        wrapped: Any = ASGIWrapper(self._with_chunks)  # type: ignore[arg-type]  # ASGI as Starlette types it
        super().__init__(wrapped, config, context, ConnectionState({}), stream)  # type: ignore[arg-type]  # no TLS here
        self._app = app

    async def protocol_send(self, event: Event) -> None:
        """See Hypercorn. Cancellation: as there, only what does not fit into the socket's buffer waits."""
        if type(event) is Updated:
            if self._is_over:
                return
            self._is_idle = event.idle
        if type(event) is RawData and event.data and not self.send_lock.locked():
            rest = self._written_at_once(event.data)
            if not rest:
                return
            event = RawData(rest)
        await super().protocol_send(event)

    async def _read_data(self) -> None:
        """As Hypercorn's, but whoever begins a request has `head_s` to send its head, however it drips.

        And when it is over nothing waits for it to be idle: Hypercorn's timer would, for half an hour.
        """
        data = b"?"
        while data:
            data = b""
            with trio.CancelScope(deadline=self._head_ends_at):
                try:
                    data = bytes(await self.stream.receive_some(MAX_RECV))
                except (trio.ClosedResourceError, trio.BrokenResourceError):
                    break
            await self.protocol.handle(RawData(data))  # b"": it has left, or has no more time
            if not self._is_idle:
                self._head_ends_at = math.inf
            elif self._head_ends_at == math.inf:
                self._head_ends_at = trio.current_time() + self.config.head_s
        self._is_over = True
        await self.protocol.handle(Closed())
        await self.idle_task.stop()

    def _written_at_once(self, data: bytes) -> bytes:
        """What the socket did not take. Whatever is wrong with it is found by who waits for it."""
        try:
            return data[os.write(self.stream.socket.fileno(), data) :]
        except OSError:
            return data

    async def _with_chunks(self, scope: Scope, receive: Receive, send: Send) -> None:
        lend(scope, self)
        await self._app(scope, receive, send)

    # --- what replies write, see `chunks.Chunks` ---

    def write_now(self, chunk: bytes) -> bytes:
        """See `Chunks.write_now`."""
        data = framed(chunk)
        return data if self.send_lock.locked() else self._written_at_once(data)

    async def write_rest(self, rest: bytes) -> None:
        """See `Chunks.write_rest`."""
        await self.protocol_send(RawData(rest))


async def listen(
    app: ASGIApp,
    config: ListenerConfig,
    *,
    stop: Callable[[], Awaitable[None]],
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `stop` returns; connections then have `config.graceful_timeout` to end.

    `task_status` gets the addresses. Raises: OSError where it cannot listen.
    Cancellation: connections end at once.
    """
    context = WorkerContext(None)
    sockets = config.create_sockets().insecure_sockets
    for socket in sockets:
        socket.listen(config.backlog)
    listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(socket)) for socket in sockets]

    async def connected(stream: trio.SocketStream) -> None:
        try:
            await Connection(app, config, context, stream)
        except Exception:
            log.exception("a connection failed")  # and no other one

    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            accept = partial(trio.serve_listeners, connected, listeners, handler_nursery=connections)
            accepting.start_soon(accept)
            task_status.started([f"http://{repr_socket_addr(s.family, s.getsockname())}" for s in sockets])
            await stop()
            accepting.cancel_scope.cancel()
        await context.terminated.set()
        connections.cancel_scope.deadline = trio.current_time() + config.graceful_timeout
