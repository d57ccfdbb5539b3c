"""What a workload is: a name, what it compares, and the coroutine that measures it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from .figure import Figure
    from .settings import Settings


@dataclass(slots=True)
class Found:
    """What measuring gave so far: lines for the table, and sentences below it.

    `keep` is called after each addition: what was found outlives a run that does not get to its end.
    """

    keep: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    async def add(self, *figures: Figure, notes: tuple[str, ...] = ()) -> None:
        """Add and keep."""
        self.figures += figures
        self.notes += notes
        await self.keep()


class NotMeasured(Exception):
    """This workload has nothing to measure here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`compared` says in a sentence what stands against what. `measure` adds each figure once it has it.

    `model` fetches the model that it needs; None: the one of the run.
    """

    id: str
    title: str
    compared: str
    measure: Callable[[Settings, Found], Awaitable[None]]
    model: Callable[[], Awaitable[Path]] | None = None
