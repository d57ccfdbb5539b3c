"""What a FakeBackend remembers of one sequence: cells, a window, a state, as its kind has them.

Every payload names the positions and tokens it holds, so wrong bytes are noticed, or change the answer.
A window keeps exactly what the next token looks back at: older cells are gone when a step is computed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

from erllama.backend import Layout, MemoryKind, PartKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_CELL = struct.Struct("<ii")  # position, token
_STATE = struct.Struct("<q16s")  # length, hash
_PRIME = (1 << 127) - 1
_FACTOR = 0x1E3779B97F4A7C15F39CC0605CEDC835  # any large number below _PRIME

LAYOUTS = {
    MemoryKind.DENSE: Layout(),
    MemoryKind.HYBRID: Layout(state=True),
    MemoryKind.RECURRENT: Layout(base=False, state=True),
}


class Cell(int):
    """A token in memory. Equal tokens may be different cells; a shared prefix is the same ones."""


@dataclass(frozen=True, slots=True)
class State:
    """A running hash of the first `n` tokens: it goes forward only."""

    n: int = 0
    hash: int = 0

    def after(self, tokens: Iterable[int]) -> State:
        """The state when these tokens have been read as well."""
        ids = list(tokens)
        return State(self.n + len(ids), reduce(lambda h, t: (h * _FACTOR + t + 1) % _PRIME, ids, self.hash))


@dataclass(eq=False)
class FakeMemory:
    """One sequence's memory."""

    layout: Layout
    cells: dict[int, Cell] = field(default_factory=dict)
    recent: dict[int, int] = field(default_factory=dict)
    state: State | None = field(default_factory=State)

    @property
    def n(self) -> int:
        """How many tokens it holds, whether or not it could go on."""
        if self.layout.base:
            return len(self.cells)
        return self.state.n if self.state else 0

    def complaint(self, n: int) -> str | None:
        """Why no token can follow [0, n); None if one can."""
        if self.n != n:
            return f"holds {self.n} tokens"
        if missing := [pos for pos in self._looked_at(0, n) if pos not in self.recent]:
            return f"lacks window cells from {missing[0]} to {missing[-1]}"
        if self.layout.state and (self.state is None or self.state.n != n):
            return "has no state" if self.state is None else f"has the state after {self.state.n} tokens"
        return None

    def evidence(self) -> tuple[int, ...]:
        """What the next token follows from: the history's hash, and more numbers where parts disagree."""
        n, found = self.n, []
        if self.layout.base:
            found.append(State().after(self.cells[pos] for pos in range(n)).hash)
        if self.layout.state:
            found.append(self.state.hash if self.state else -1)
        looked_at = self._looked_at(0, n)
        seen = [self.recent.get(pos, -1) for pos in looked_at]
        if seen != [self.cells[pos] for pos in looked_at]:
            found += [-2, *seen]
        return tuple(dict.fromkeys(found))

    # --- what a step does ---

    def append(self, tokens: Iterable[int]) -> None:
        """Tokens behind what it holds."""
        ids = list(tokens)
        new = dict(enumerate(ids, self.n))
        if self.layout.state:
            assert self.state is not None
            self.state = self.state.after(ids)
        if self.layout.base:
            self.cells.update((pos, Cell(token)) for pos, token in new.items())
        if self.layout.window:
            self.recent.update(new)

    def forget(self) -> None:
        """A step has been computed: cells that no later token looks back at are recycled."""
        looked_at = self._looked_at(0, self.n)
        self.recent = {pos: token for pos, token in self.recent.items() if pos in looked_at}

    def cut(self, n: int) -> bool:
        """Keep [0, n); False, and nothing changes, where the next token could not be right then."""
        if self.layout.state or n >= self.n:
            return self.complaint(n) is None
        if any(pos not in self.recent for pos in self._looked_at(0, n)):
            return False
        self.cells = {pos: cell for pos, cell in self.cells.items() if pos < n}
        self.recent = {pos: token for pos, token in self.recent.items() if pos < n}
        return True

    def share(self, src: FakeMemory, start: int, end: int) -> None:
        """Hold [start, end) of `src` too; a state is copied as it is now, whatever the range."""
        assert self.n == start, f"it holds {self.n} tokens, the shared range starts at {start}"
        if self.layout.base:
            self.cells.update({pos: src.cells[pos] for pos in range(start, end)})
        self.recent.update({pos: src.recent[pos] for pos in range(start, end) if pos in src.recent})
        self.state = src.state

    # --- parts ---

    def export(self, start: int, end: int, part: PartKind) -> bytes:
        """A part of [start, end); nothing if it does not exist here, or not all of it any more."""
        match part:
            case PartKind.BASE if self.layout.base:
                return _packed(self.cells, range(start, end))
            case PartKind.WINDOW if self.layout.window:
                return _packed(self.recent, self._looked_at(start, end))
            case PartKind.STATE if self.layout.state and self.state and self.state.n == end:
                return _STATE.pack(end, self.state.hash.to_bytes(16, "little"))
        return b""

    def import_(
        self, block: tuple[int, int], wanted: tuple[int, int], data: memoryview, part: PartKind
    ) -> bool:
        """Add what is `wanted` of a part that was exported from `block`; False changes nothing."""
        if not block[0] <= wanted[0] <= wanted[1] <= block[1]:
            return False
        match part:
            case PartKind.BASE:
                return self._import_base(block, wanted, data)
            case PartKind.WINDOW if self.layout.window:
                return self._import_window(block, wanted, data)
            case PartKind.STATE if self.layout.state:
                return self._import_state(block, wanted, data)
        return False

    def _import_base(self, block: tuple[int, int], wanted: tuple[int, int], data: memoryview) -> bool:
        if not self.layout.base:
            return not data  # such a part is empty: it only holds the path
        arrived = _unpacked(data, range(*block))
        if arrived is None or self.n != wanted[0]:
            return False
        self.cells.update({pos: Cell(arrived[pos]) for pos in range(*wanted)})
        if self.layout.state:
            self.state = None
        return True

    def _import_window(self, block: tuple[int, int], wanted: tuple[int, int], data: memoryview) -> bool:
        arrived = _unpacked(data, self._looked_at(*block))
        if arrived is None or any(pos >= wanted[0] for pos in self.recent):
            return False
        self.recent.update({pos: token for pos, token in arrived.items() if wanted[0] <= pos < wanted[1]})
        return True

    def _import_state(self, block: tuple[int, int], wanted: tuple[int, int], data: memoryview) -> bool:
        if len(data) != _STATE.size or wanted[1] != block[1]:
            return False
        n, digest = _STATE.unpack(data)
        fits = self.n == n if self.layout.base else self.n < n
        if n != block[1] or not fits:
            return False
        self.state = State(n, int.from_bytes(digest, "little"))
        return True

    def _looked_at(self, start: int, end: int) -> range:
        """Positions of [start, end) that a token at `end` looks back at in sliding-window layers."""
        return range(max(start, end - self.layout.window + 1), end) if self.layout.window else range(0)


def _packed(held: Mapping[int, int], positions: range) -> bytes:
    if any(pos not in held for pos in positions):
        return b""
    return b"".join(_CELL.pack(pos, held[pos]) for pos in positions)


def _unpacked(data: memoryview, positions: range) -> dict[int, int] | None:
    """Tokens by position, if the payload has exactly these positions."""
    if len(data) != _CELL.size * len(positions):
        return None
    arrived = dict(_CELL.iter_unpack(data))
    return arrived if list(arrived) == list(positions) else None
