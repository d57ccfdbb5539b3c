"""Work for a client that is given up when the client leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

T = TypeVar("T")


async def while_present(request: Request, work: Callable[[], Awaitable[T]]) -> T | None:
    """What `work` returns or raises; None if the client left first, and then it was cancelled.

    The request's body has been read. Cancellation: cancels the work.
    """
    result: T | None = None
    error: Exception | None = None
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        try:
            result = await work()
        except Exception as raised:  # raised again below, as itself and not in a group
            error = raised
        nursery.cancel_scope.cancel()
    if error is not None:
        raise error
    return result
