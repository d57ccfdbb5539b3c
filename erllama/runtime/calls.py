"""The calls of one model on their way through the middleware."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from erllama.errors import InvalidOption
from erllama.middleware import Call, run
from erllama.options import Rejected, functions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from erllama.middleware import Middleware


class Calls:
    """`middleware`: the engine's, around that of each request."""

    def __init__(self, model_id: str, middleware: Sequence[Middleware] = ()) -> None:
        self._model_id = model_id
        self._middleware = tuple(middleware)

    def pass_through(self, arguments: Mapping[str, Any]) -> bool:
        """Whether there is no middleware for a call with these arguments."""
        return not self._middleware and not arguments.get("middleware")

    async def run(self, name: str, arguments: Mapping[str, Any], last: Callable[..., Awaitable[Any]]) -> Any:
        """What the call gives; `last` is called with its arguments by name. Raises: what they raise."""
        if self.pass_through(arguments):
            return await last(**arguments)
        call = Call(name=name, model_id=self._model_id, arguments=arguments)
        chain = (*self._middleware, *_checked(arguments.get("middleware", ())))
        return await run(chain, call, lambda call: last(**call.arguments))

    @asynccontextmanager
    async def enter(
        self,
        name: str,
        arguments: Mapping[str, Any],
        make: Callable[..., AbstractAsyncContextManager[Any]],
    ) -> AsyncIterator[Any]:
        """As `run` for a block: the call is its beginning, and gives what the block gives."""
        async with AsyncExitStack() as entered:

            async def begin(**arguments: Any) -> Any:
                return await entered.enter_async_context(make(**arguments))

            yield await self.run(name, arguments, begin)


def _checked(given: Any) -> tuple[Middleware, ...]:
    try:
        return functions(given)
    except Rejected as why:
        raise InvalidOption(
            f"middleware={given!r}: expected {why}", detail={"key": "middleware", "value": given}
        ) from None
