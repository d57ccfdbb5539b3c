"""Pins: paths that outrank everything else, within a byte budget, least recently used first to go.

A pin names a node and keeps its whole path. Sources: the caller (`pin`), an agent's prefix (found again after
a restart by its save reason), and the live key of a sequence, which replaces its owner's former one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Set


@dataclass(slots=True)
class Pin:
    """One pinned path: the name of its last node, and when it ends (None: never)."""

    name: bytes
    until: float | None


class PinBoard:
    """All pins by key; the latest used last."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pins: OrderedDict[Hashable, Pin] = OrderedDict()
        self.n_forced = 0

    def __len__(self) -> int:
        return len(self._pins)

    def put(self, key: Hashable, name: bytes, ttl_s: float | None = None) -> None:
        """Pin a path under `key`, replacing what that key pinned before."""
        until = None if ttl_s is None else self._clock() + ttl_s
        self._pins[key] = Pin(name, until)
        self._pins.move_to_end(key)

    def remove(self, key: Hashable) -> bool:
        """End a pin; False if there was none."""
        return self._pins.pop(key, None) is not None

    def touch(self, names: Set[bytes]) -> None:
        """Nodes were used; pins on them move to the end of the queue."""
        for key in [key for key, pin in self._pins.items() if pin.name in names]:
            self._pins.move_to_end(key)

    def expire(self) -> None:
        """Drop pins whose time is over."""
        now = self._clock()
        for key in [k for k, pin in self._pins.items() if pin.until is not None and pin.until <= now]:
            del self._pins[key]

    def names(self) -> list[bytes]:
        """Names of all pinned nodes, least recently used first."""
        self.expire()
        return [pin.name for pin in self._pins.values()]

    def forget(self, names: Iterable[bytes]) -> int:
        """Drop the pins of nodes that are gone or had to go; returns how many."""
        gone = set(names)
        keys = [key for key, pin in self._pins.items() if pin.name in gone]
        for key in keys:
            del self._pins[key]
        return len(keys)

    def shrink(self, fits: Callable[[list[bytes]], bool]) -> int:
        """Unpin least recently used paths until `fits(remaining names)`; returns and counts how many."""
        n = 0
        while self._pins and not fits(self.names()):
            self._pins.popitem(last=False)
            n += 1
        self.n_forced += n
        return n

    def items(self) -> list[tuple[Hashable, Pin]]:
        """Keys and pins, least recently used first."""
        self.expire()
        return list(self._pins.items())
