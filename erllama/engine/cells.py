"""Which cells of a shared cache a sequence holds, counted once however many sequences hold them.

A *run* is a stretch of cells that one sequence computed or restored. Sharing shares pieces of runs, so the
cells in use are, per run, the union of the pieces that anybody holds. Pure bookkeeping: llama.cpp's `seq_cp`
and `seq_rm` do the same to the real cells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Run:
    """Identity of a stretch of cells; `n` is how far it was ever filled."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


Piece = tuple[Run, int, int]  # cells [low, high) of a run


class Cells:
    """The cells of one sequence, in order of position."""

    def __init__(self) -> None:
        self._held: list[Piece] = []
        self.n = 0

    def __repr__(self) -> str:
        return f"<Cells {self.n} in {len(self._held)} pieces>"

    def grow_to(self, n: int) -> None:
        """New cells up to position `n`."""
        if n <= self.n:
            return
        if self._held and self._held[-1][0].n == self._held[-1][2]:
            run, low, _ = self._held.pop()  # at its tip: nobody else went on from here
        else:
            run, low = Run(), 0
        run.n += n - self.n
        self._held.append((run, low, run.n))
        self.n = n

    def cut_to(self, n: int) -> None:
        """Let go of everything from position `n` on."""
        if n < self.n:
            self._held = list(self._pieces(0, n))
            self.n = n

    def adopt(self, other: Cells, n: int) -> None:
        """Hold what `other` holds from here up to position `n` as well."""
        self._held.extend(other._pieces(self.n, n))
        self.n = n

    def _pieces(self, start: int, end: int) -> Iterator[Piece]:
        """What is held of positions [start, end)."""
        at = 0
        for run, low, high in self._held:
            first, last = max(start - at, 0), min(end - at, high - low)
            if first < last:
                yield run, low + first, low + last
            at += high - low


def n_distinct(holders: Iterable[Cells]) -> int:
    """Cells in use by all of them together."""
    held: dict[Run, list[tuple[int, int]]] = {}
    for cells in holders:
        for run, low, high in cells._held:
            held.setdefault(run, []).append((low, high))
    return sum(
        [_union(pieces) if len(pieces) > 1 else pieces[0][1] - pieces[0][0] for pieces in held.values()]
    )


def _union(pieces: list[tuple[int, int]]) -> int:
    n = reached = 0
    for low, high in sorted(pieces):
        n += max(0, high - max(low, reached))
        reached = max(reached, high)
    return n
