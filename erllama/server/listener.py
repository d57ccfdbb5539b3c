"""Hypercorn's connections on our own listener.

What a stream writes for every token goes to the socket at once where the socket takes it: Hypercorn's way takes
a lock, two turns of trio's scheduler and a scope, which is more than everything else that a token costs.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.events import RawData
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import repr_socket_addr

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hypercorn.config import Config
    from hypercorn.events import Event
    from starlette.types import ASGIApp

log = logging.getLogger("erllama.server")


class Connection(TCPServer):
    """One client's connection."""

    async def protocol_send(self, event: Event) -> None:
        """See Hypercorn. Cancellation: as there, only what does not fit into the socket's buffer waits."""
        if type(event) is RawData and event.data and not self.send_lock.locked():
            rest = self._written_at_once(event.data)
            if not rest:
                return
            event = RawData(rest)
        await super().protocol_send(event)

    def _written_at_once(self, data: bytes) -> bytes:
        """What the socket did not take. Whatever is wrong with it is found by who waits for it."""
        try:
            return data[os.write(self.stream.socket.fileno(), data) :]
        except OSError:
            return data


async def listen(
    app: ASGIApp,
    config: Config,
    *,
    stop: Callable[[], Awaitable[None]],
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `stop` returns; connections then have `config.graceful_timeout` to end.

    `task_status` gets the addresses. Raises: OSError where it cannot listen.
    Cancellation: connections end at once.
    """
    context = WorkerContext(None)
    wrapped: Any = ASGIWrapper(app)  # type: ignore[arg-type]  # ASGI as Starlette types it
    sockets = config.create_sockets().insecure_sockets
    for socket in sockets:
        socket.listen(config.backlog)
    listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(socket)) for socket in sockets]

    async def connected(stream: trio.SocketStream) -> None:
        try:
            await Connection(wrapped, config, context, ConnectionState({}), stream)  # type: ignore[arg-type]  # no TLS here
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
