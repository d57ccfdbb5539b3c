"""The blocks of `open_engine` and `Model.stream`; used without `async with`, they say what to write."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

from erllama.errors import RequestError

if TYPE_CHECKING:
    from types import TracebackType

T = TypeVar("T")


class Block(AbstractAsyncContextManager[T], Generic[T]):
    """An async context manager that cannot be mistaken for what it gives."""

    def __init__(self, inner: AbstractAsyncContextManager[T], how: str) -> None:
        self._inner = inner
        self._how = how  # "async with open_engine() as engine"

    def __repr__(self) -> str:
        return f"<not entered; write `{self._how}:`>"

    async def __aenter__(self) -> T:
        return await self._inner.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._inner.__aexit__(kind, error, trace)

    def __getattr__(self, name: str) -> NoReturn:
        # AttributeError, because `hasattr` and the like expect it.
        raise AttributeError(f"{name!r} belongs to what this block gives; write `{self._how}:`")

    def __aiter__(self) -> NoReturn:
        raise self._misused()

    def __enter__(self) -> NoReturn:
        raise self._misused()

    def __exit__(self, *_: object) -> None:
        """Never called; without it Python says that this is no context manager, and no more."""

    def __await__(self) -> NoReturn:
        raise self._misused()

    def _misused(self) -> RequestError:
        return RequestError(f"this is a block for `async with`, and nothing else; write `{self._how}:`")
