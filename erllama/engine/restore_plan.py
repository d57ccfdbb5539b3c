"""What to bring back of a stored path, and how far: pure, sync, and the only place that decides it.

A sequence can go on at position `end` if memory holds
  the base of [0, end), where the layout has one;
  the window of [end - window, end), where it has one;
  the state taken at `end`, where it has one.
What the slot holds already, [0, n_kv), is such a place itself, so of base and window only what lies behind it
is brought back; a state replaces whatever was there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from erllama.types import PartKind

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from erllama.backend import Layout

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoredNode:
    """One node on the prompt's way: positions [start, end) and the parts that are stored.

    Of the last one the prompt may share only what lies before `shared`.
    """

    start: int
    end: int
    parts: Collection[PartKind]
    shared: int

    @classmethod
    def whole(cls, start: int, end: int, parts: Collection[PartKind]) -> StoredNode:
        """A node that the prompt shares wholly."""
        return cls(start, end, parts, end)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the node at `index`, and which of its positions are wanted."""

    index: int
    part: PartKind
    wanted: Range


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Bring back `small`, which is read first because without it the rest is of no use, and `base`."""

    end: int
    base: tuple[Piece, ...]
    small: tuple[Piece, ...]


def plan_restore(
    nodes: Sequence[StoredNode], layout: Layout, n_kv: int, most: int, grid: int = 1
) -> RestorePlan | None:
    """The plan that reaches furthest, at most to `most` and only to multiples of `grid`.

    None if nothing reaches beyond `n_kv`, what the slot holds already.
    """
    nodes = list(takewhile(lambda node: PartKind.BASE in node.parts, nodes))
    for end in _ends(nodes, layout, most, grid):
        if end <= n_kv:
            return None
        small = _small(nodes, layout, n_kv, end)
        if small is not None:
            return RestorePlan(end, _base(nodes, n_kv, end) if layout.base else (), small)
    return None


def _ends(nodes: Sequence[StoredNode], layout: Layout, most: int, grid: int) -> list[int]:
    """Where a sequence might go on, furthest first."""
    ends = {node.end for node in nodes if node.shared == node.end}
    if nodes and not layout.state:
        reach = min(nodes[-1].shared, most)
        ends.add(reach - reach % grid)
    return sorted((end for end in ends if 0 < end <= most and end % grid == 0), reverse=True)


def _base(nodes: Sequence[StoredNode], n_kv: int, end: int) -> tuple[Piece, ...]:
    return tuple(
        Piece(i, PartKind.BASE, (max(node.start, n_kv), min(node.end, end)))
        for i, node in enumerate(nodes)
        if node.start < end and node.end > n_kv
    )


def _small(nodes: Sequence[StoredNode], layout: Layout, n_kv: int, end: int) -> tuple[Piece, ...] | None:
    """Window parts and state for going on at `end`; None if one is missing."""
    small: list[Piece] = []
    if layout.window:
        low = max(0, end - layout.window, n_kv)
        for i, node in enumerate(nodes):
            if node.end <= low or node.start >= end:
                continue
            first = max(node.start, low)
            # A window part holds the window before its own node's end.
            if PartKind.WINDOW not in node.parts or node.end - layout.window > first:
                return None
            small.append(Piece(i, PartKind.WINDOW, (first, min(node.end, end))))
    if layout.state:
        last = next(i for i, node in enumerate(nodes) if node.end == end)
        if PartKind.STATE not in nodes[last].parts:
            return None
        small.append(Piece(last, PartKind.STATE, (nodes[last].start, end)))
    return tuple(small)
