"""Which cells of a shared cache a sequence holds, counted once however many sequences hold them.

A *run* is a stretch of cells that one sequence computed or restored. Sharing a prefix shares runs, so the
cells in use are, per run, the longest stretch that anybody still holds. Pure bookkeeping: llama.cpp's
`seq_cp` and `seq_rm` do the same to the real cells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Run:
    """Identity of a stretch of cells; `n` is how far it was ever filled."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class Cells:
    """The cells of one sequence, in order of position."""

    def __init__(self) -> None:
        self._held: list[tuple[Run, int]] = []
        self.n = 0

    def __repr__(self) -> str:
        return f"<Cells {self.n} in {len(self._held)} runs>"

    def grow_to(self, n: int) -> None:
        """New cells up to position `n`."""
        if n <= self.n:
            return
        if self._held and self._held[-1][0].n == self._held[-1][1]:
            run, held = self._held.pop()  # at its tip: nobody else went on from here
        else:
            run, held = Run(), 0
        run.n = held + n - self.n
        self._held.append((run, run.n))
        self.n = n

    def cut_to(self, n: int) -> None:
        """Let go of everything from position `n` on."""
        if n < self.n:
            self._held = list(_first(self._held, n))
            self.n = n

    def shared(self, n: int) -> Cells:
        """The same cells up to position `n`, held a second time."""
        other = Cells()
        other._held = list(_first(self._held, n))
        other.n = min(n, self.n)
        return other


def n_distinct(holders: Iterable[Cells]) -> int:
    """Cells in use by all of them together."""
    longest: dict[Run, int] = {}
    for cells in holders:
        for run, n in cells._held:
            longest[run] = max(n, longest.get(run, 0))
    return sum(longest.values())


def _first(held: list[tuple[Run, int]], n: int) -> Iterable[tuple[Run, int]]:
    for run, length in held:
        if n <= 0:
            return
        yield run, min(length, n)
        n -= length
