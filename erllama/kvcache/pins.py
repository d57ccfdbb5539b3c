"""Pins: paths that outrank everything else, within a byte budget, least recently used first to go.

A pin names a node and keeps its whole path. Sources: the caller (`pin`), an agent's prefix (found again after
a restart by its save reason), and the live key of a sequence, which replaces its owner's former one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Set

    from .tree import Tree


@dataclass(slots=True)
class Pin:
    """One pinned path: the name of its last node, when it ends (None: never), and its share.

    `share`: at most this part of a tier may be taken by pins of this share or a smaller one.
    """

    name: bytes
    until: float | None
    share: float = 1.0


class PinBoard:
    """All pins by key; the latest used last."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pins: OrderedDict[Hashable, Pin] = OrderedDict()
        self.n_forced = 0

    def __len__(self) -> int:
        return len(self._pins)

    def put(self, key: Hashable, name: bytes, ttl_s: float | None = None, share: float = 1.0) -> None:
        """Pin a path under `key`, replacing what that key pinned before."""
        until = None if ttl_s is None else self._clock() + ttl_s
        self._pins[key] = Pin(name, until, share)
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

    def shrink(self, fits: Callable[[list[bytes]], bool], share: float = 1.0) -> int:
        """Unpin least recently used paths until `fits(remaining names)`; returns and counts how many.

        Only pins of this `share` or a smaller one are looked at.
        """
        self.expire()
        n, keys = 0, [key for key, pin in self._pins.items() if pin.share <= share]
        while n < len(keys) and not fits([self._pins[key].name for key in keys[n:]]):
            del self._pins[keys[n]]
            n += 1
        self.n_forced += n
        return n

    def items(self) -> list[tuple[Hashable, Pin]]:
        """Keys and pins, least recently used first."""
        self.expire()
        return list(self._pins.items())


class Pins(PinBoard):
    """The pins of a store: what they keep, in nodes and in bytes of each tier."""

    def __init__(self, tree: Tree, clock: Callable[[], float], fraction: float) -> None:
        super().__init__(clock)
        self._tree, self._fraction = tree, fraction
        self.tier_max: dict[int, int] = {}  # budget of each tier slot

    def pin(
        self, key: Hashable, name: bytes, *, ttl_s: float | None = None, fraction: float | None = None
    ) -> bool:
        """Pin the path to a node; False if it alone is over the pin budget, or gone. Others give way.

        `fraction`: the share of a tier that this pin and those of a smaller share may take together, if it is
        not the store's. So who may pin little takes nothing from who may pin much.
        """
        share = self._fraction if fraction is None else fraction
        if self._tree.find(name) is None or not self._fit([name], share):
            return False
        self.put(key, name, ttl_s, share)
        for limit in sorted({pin.share for _, pin in self.items() if pin.share >= share}):
            self.shrink(partial(self._fit, share=limit), limit)
        return True

    def protected(self) -> set[int]:
        """All nodes on pinned paths."""
        return self._paths(self.names()) if len(self) else set()

    def bytes_by_slot(self) -> dict[int, int]:
        """Bytes on pinned paths, by home."""
        return self._bytes(self.protected())

    def _paths(self, names: Iterable[bytes]) -> set[int]:
        tree = self._tree
        rows: set[int] = set()
        for name in names:
            row = tree.find(name)
            while row and tree.parent[row] and row not in rows:
                rows.add(row)
                row = tree.parent[row]
        return rows

    def _bytes(self, rows: Iterable[int]) -> dict[int, int]:
        used: Counter[int] = Counter()
        for row in rows:
            for part in self._tree.part_rows(row):
                used[self._tree.parts.home[part]] += int(self._tree.parts.size[part])
        return dict(used)

    def _fit(self, names: Iterable[bytes], share: float) -> bool:
        used = self._bytes(self._paths(names))
        return all(n <= share * self.tier_max.get(slot, 0) for slot, n in used.items())
