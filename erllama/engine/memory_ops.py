"""What is to be done to a model's memory before its next step: decided by `Lanes`, done on its thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from erllama.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from erllama.backend import OptionalBackend


class NoWindowRoom(EngineError):
    """The cells of sliding-window layers are too few for one more sequence to have a window of its own."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Keep [0, n) of a slot; nothing with 0."""

    slot: int
    n: int


@dataclass(frozen=True, slots=True)
class Share:
    """Let `dst`, which ends at `start`, hold [start, end) of `src` as well."""

    src: int
    dst: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget everything: memory is as in a fresh context."""


MemoryOp = Cut | Share | Clear


def apply_ops(backend: OptionalBackend, ops: Iterable[MemoryOp]) -> None:
    """Do them in order. Thread: the model's. Raises: `EngineError` if memory refuses what it must allow."""
    for op in ops:
        match op:
            case Cut(slot, n):
                if not backend.cut(slot, n):
                    raise EngineError(f"slot {slot} could not be cut to {n} tokens")
            case Share(src, dst, start, end):
                backend.share(src, dst, start, end)
            case Clear():
                backend.clear()
