"""Middleware: functions around the calls of models and engines.

Rule 1: the first one given is the outermost; an engine's are around a request's.
Rule 2: whoever does not await `next` answers the call itself; whoever gives it another call changes it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call: the method's name, the model's id, and the arguments by name, as they were given.

    To change it, hand on `dataclasses.replace(call, arguments={**call.arguments, …})`.
    """

    name: str
    model_id: str
    arguments: Mapping[str, Any]


Next = Callable[[Call], Awaitable[Any]]
Middleware = Callable[[Call, Next], Awaitable[Any]]


async def run(chain: Sequence[Middleware], call: Call, last: Next) -> Any:
    """The call through every middleware of `chain`, and `last` at the end of it.

    Raises: what any of them raises. Cancellation: theirs.
    """
    if not chain:
        return await last(call)
    first, *others = chain

    async def following(call: Call) -> Any:
        return await run(others, call, last)

    return await first(call, following)
