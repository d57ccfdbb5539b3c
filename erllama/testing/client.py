"""A client that does as it is told: reads so many events, sleeps, cancels, leaves.

    log = await scripted_client(model, "hello", [Read(3), Pause(10), Read()], max_tokens=20)

For tests of what slow, sleeping and vanishing readers do to others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Unpack

import trio

from erllama.errors import ErllamaError
from erllama.types import Completion, Done, Event

if TYPE_CHECKING:
    from collections.abc import Iterable

    from erllama.engine.request import EventStream
    from erllama.runtime.generation import Generation
    from erllama.runtime.model import Model
    from erllama.runtime.text_calls import Prompt


@dataclass(frozen=True, slots=True)
class Read:
    """Take so many events; None: all that come."""

    n: int | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Read nothing for a while."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """Call `events.cancel()`."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the stream's block now."""


Move = Read | Pause | Cancel | Leave


@dataclass(slots=True)
class ClientLog:
    """What the client saw. `error`: what its stream raised."""

    events: list[Event] = field(default_factory=list)
    error: ErllamaError | None = None

    @property
    def completion(self) -> Completion | None:
        """The completion, if `Done` arrived."""
        last = self.events[-1] if self.events else None
        return last.completion if isinstance(last, Done) else None


async def scripted_client(
    model: Model, prompt: Prompt, script: Iterable[Move], **generation: Unpack[Generation]
) -> ClientLog:
    """Open a stream and follow the script, then leave. Errors of the stream end up in the log.

    Cancellation: the stream is left.
    """
    log = ClientLog()
    try:
        async with model.stream(prompt, **generation) as events:
            for move in script:
                match move:
                    case Read(n):
                        await _read(events, n, log)
                    case Pause(seconds):
                        await trio.sleep(seconds)
                    case Cancel():
                        events.cancel()
                    case Leave():
                        break
    except ErllamaError as error:
        log.error = error
    return log


async def _read(events: EventStream, n: int | None, log: ClientLog) -> None:
    left = n
    while left is None or left > 0:
        try:
            log.events.append(await anext(events))
        except StopAsyncIteration:
            return
        left = None if left is None else left - 1
