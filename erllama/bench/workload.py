"""What a workload is: a name, what it compares, and the coroutine that measures it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from .figure import Figure
    from .settings import Settings


@dataclass(slots=True)
class Found:
    """What measuring gave: lines for the table, and sentences below it."""

    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class NotMeasured(Exception):
    """This workload has nothing to measure here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`compared` says in a sentence what stands against what.

    `model` fetches the model that it needs; None: the one of the run.
    """

    id: str
    title: str
    compared: str
    measure: Callable[[Settings], Awaitable[Found]]
    model: Callable[[], Awaitable[Path]] | None = None
