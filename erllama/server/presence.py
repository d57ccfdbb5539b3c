"""Work for a client that is given up when the client leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from starlette.responses import Response

from .record import CLIENT_LEFT, record_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request


async def while_present(request: Request, work: Callable[[], Awaitable[Response]]) -> Response:
    """What `work` returns or raises; if the client leaves first, it is cancelled, and nobody reads the reply.

    The request's body has been read. Cancellation: cancels the work.
    """
    reply: Response = Response()
    error: Exception | None = None
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                await trio.lowlevel.checkpoint()
            record_of(request.scope).error = CLIENT_LEFT
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        try:
            reply = await work()
        except Exception as raised:  # raised again below, as itself and not in a group
            error = raised
        nursery.cancel_scope.cancel()
    if error is not None:
        raise error
    return reply
