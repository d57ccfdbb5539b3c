"""What of a prompt a cache folder holds, per model, and where and why it stops: pure, over nodes read before.

A model is an identity (shape hash and salt): several may share a folder, and never share a node. What a model
needs to go on somewhere is seen from the parts that are stored for it:
  the base of all nodes up to there;
  if it has window parts: those of the nodes the window reaches (of the last one, if its width is unknown);
  if it has states, or whole sequences: the one at exactly that place, so never inside a node.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from erllama.kvcache.kinds import ROOT_NAME, PartKind

from .asked import Shared, Where

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from erllama.kvcache.key import Identity

    from .asked import Asked
    from .folder import StoredNode

AT_A_PLACE = (PartKind.STATE, PartKind.WHOLE)  # parts that exist only at a node's end


class Why(enum.StrEnum):
    """Why not more of the prompt would be reused."""

    COMPLETE = "complete"  # all of it is there
    DIFFERS_AT = "differs_at"  # what is stored goes on differently
    ENDS_AT = "ends_at"  # nothing is stored behind
    BLOCK_MISSING = "block_missing"  # more is stored, but a block before it is gone
    PART_MISSING = "part_missing"  # a window or state without which blocks cannot be used is not there
    EXPIRED = "expired"  # what follows is there, and too old
    NOTHING_STORED = "nothing_stored"  # nothing begins like it


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Where it stops: in units of what was asked; `message` is a sentence."""

    why: Why
    at: int
    message: str
    stored: str = ""
    asked: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One model's share of the folder.

    `path`: nodes that match whole, then perhaps one that matches in part, of which `n_shared` tokens are the
    prompt's (None: only bytes are known). `n_tokens`: tokens of the whole ones. `n_usable`: tokens that
    could be restored of them and of the partial one. `is_inside`: also tokens of the partial one, whose
    number is not known.
    """

    identity: Identity
    n_nodes: int
    path: tuple[StoredNode, ...] = ()
    partial: StoredNode | None = None
    n_shared: int | None = None
    n_tokens: int = 0
    n_usable: int = 0
    is_inside: bool = False
    n_matched: int = 0  # how much of what was asked is matched, in its own units
    facts: Mapping[str, Any] = field(default_factory=dict)  # what the files say of the model
    stop: Stop
    marks: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Place:
    """A way through the tree: nodes that match whole."""

    path: tuple[StoredNode, ...]
    where: Where


def explain(
    nodes: dict[bytes, StoredNode], asked: Asked, *, now: float, window: int | None = None
) -> list[Explanation]:
    """One explanation per model, the one that reuses most first. `now`: seconds since the epoch."""
    spaces: dict[tuple[bytes, bytes], list[StoredNode]] = defaultdict(list)
    for node in nodes.values():
        spaces[node.meta.identity.space].append(node)
    found = [_of_one(group, asked, now, window) for group in spaces.values()]
    return sorted(found, key=lambda e: (-e.n_usable, -e.n_matched, e.identity.shape_hash))


@dataclass(frozen=True, slots=True)
class _Walk:
    """The way that gets furthest, and of the node behind it what is shared, if any is."""

    place: _Place
    shared: Shared
    child: StoredNode | None
    expired: tuple[_Place, ...]  # ways that end with a node that is too old

    @property
    def end(self) -> int:
        """Tokens of the nodes that match whole."""
        return _end(self.place.path[-1]) if self.place.path else 0


def _walk(tops: Sequence[StoredNode], asked: Asked, now: float) -> _Walk:
    best, expired = _Place((), Where()), []
    maybe: tuple[_Place, Shared, StoredNode | None] = best, Shared(), None
    todo = [best]
    while todo:
        place = todo.pop()
        for child in place.path[-1].children if place.path else tops:
            shared = asked.compare(child.meta, place.where)
            ways = [_Place((*place.path, child), where) for where in shared.ends]
            if _is_expired(child, now):
                expired += ways
                continue
            todo += ways
            best = max([best, *ways], key=_reach)
            if shared.at > maybe[1].at and not ways:
                maybe = (place, shared, child)
    if maybe[1].at <= best.where.at:
        maybe = (best, Shared(at=best.where.at), None)
    return _Walk(*maybe, tuple(expired))


def _of_one(group: list[StoredNode], asked: Asked, now: float, window: int | None) -> Explanation:
    kinds = {kind for node in group for kind in node.files}
    walk = _walk([node for node in group if node.meta.parent == ROOT_NAME], asked, now)
    n_shared = walk.shared.n_tokens if walk.child is not None else 0
    usable = _usable(walk.place.path, walk.child, n_shared, kinds, window)
    stop = _stop(walk, asked, group)
    if usable < walk.end + _n_partial(walk.child, n_shared, kinds):
        stop = _missing_part(walk.place, usable, kinds, stop)
    return Explanation(
        identity=group[0].meta.identity,
        facts=group[0].meta.facts,
        n_nodes=len(group),
        path=walk.place.path,
        partial=walk.child,
        n_shared=n_shared,
        n_tokens=walk.end,
        n_usable=usable,
        is_inside=n_shared is None and usable == walk.end and _goes_inside(walk.child, kinds),
        n_matched=walk.shared.at,
        stop=stop,
        marks={token: mark.decode(errors="replace") for token, mark in walk.place.where.marks},
    )


def _reach(place: _Place) -> tuple[int, int]:
    return place.where.at, len(place.path)


def _is_expired(node: StoredNode, now: float) -> bool:
    return node.meta.expires_ns is not None and node.meta.expires_ns <= now * 1e9


# --- what could be restored ---------------------------------------------------------------------------


def _n_partial(child: StoredNode | None, n_shared: int | None, kinds: set[PartKind]) -> int:
    """Tokens inside the last node at which a model without states could go on."""
    return 0 if child is None or kinds & set(AT_A_PLACE) else n_shared or 0


def _goes_inside(child: StoredNode | None, kinds: set[PartKind]) -> bool:
    """Whether a part of this node, shared in part, could be restored."""
    if child is None or kinds & set(AT_A_PLACE):
        return False
    return all(kind in child.files for kind in kinds)


def _usable(
    path: Sequence[StoredNode],
    child: StoredNode | None,
    n_shared: int | None,
    kinds: set[PartKind],
    window: int | None,
) -> int:
    """The furthest position at which everything that is needed is stored."""
    chain: list[StoredNode] = []
    for node in (*path, *((child,) if child is not None else ())):
        if not {PartKind.BASE, PartKind.WHOLE} & node.files.keys():
            break
        chain.append(node)
    ends = [_end(node) for node in chain if node is not child]
    if child is not None and child in chain:
        ends.append(child.meta.start + _n_partial(child, n_shared, kinds))
    return max((end for end in ends if _can_go_on(chain, end, kinds, window)), default=0)


def _end(node: StoredNode) -> int:
    return node.meta.start + len(node.meta.tokens)


def _can_go_on(chain: Sequence[StoredNode], end: int, kinds: set[PartKind], window: int | None) -> bool:
    last = next((node for node in chain if node.meta.start < end <= _end(node)), None)
    if last is None:
        return False
    at_end = [kind for kind in AT_A_PLACE if kind in kinds]
    if at_end and (end != _end(last) or not all(kind in last.files for kind in at_end)):
        return False
    if PartKind.WINDOW not in kinds:
        return True
    low = end - 1 if window is None else max(0, end - window)
    return all(PartKind.WINDOW in node.files for node in chain if node.meta.start < end and _end(node) > low)


# --- why it stops -------------------------------------------------------------------------------------


def _stop(walk: _Walk, asked: Asked, group: Iterable[StoredNode]) -> Stop:
    place, shared, child = walk.place, walk.shared, walk.child
    at = shared.at
    here = f"{asked.unit} {at}"
    if at >= len(asked):
        return Stop(
            why=Why.COMPLETE, at=at, message="all of it is stored (the last token is computed anyway)"
        )
    if any(way.where.at > at for way in walk.expired):
        return Stop(why=Why.EXPIRED, at=at, message=f"what is stored behind {here} has expired")
    gaps = [node.meta.start for node in group if node.is_orphan and asked.may_hold(node.meta, Where(at))]
    if gaps:
        message = (
            f"more is stored from token {min(gaps)} on, but a block before it is gone: evicted, or damaged"
        )
        return Stop(why=Why.BLOCK_MISSING, at=at, message=message)
    if child is None and place.path and place.path[-1].children:
        shared = asked.compare(place.path[-1].children[0].meta, place.where)
        child = place.path[-1].children[0]
    if child is not None:
        message = f"at {here} what is stored goes on differently"
        return Stop(why=Why.DIFFERS_AT, at=at, message=message, stored=shared.stored, asked=shared.asked)
    if place.path:
        return Stop(why=Why.ENDS_AT, at=at, message=f"nothing that is stored goes on behind {here} like this")
    return Stop(why=Why.NOTHING_STORED, at=0, message="nothing that is stored begins like this")


def _missing_part(place: _Place, usable: int, kinds: set[PartKind], stop: Stop) -> Stop:
    """More matches than can be restored: say which part is not there."""
    behind = [node for node in place.path if _end(node) > usable]
    gone = sorted({kind for node in behind for kind in kinds - node.files.keys()})
    names = " and ".join(kind.name.lower() for kind in gone) or "what is needed inside a block"
    message = f"of the blocks behind token {usable} {names} is gone or was never kept; they cannot be used"
    return Stop(why=Why.PART_MISSING, at=stop.at, message=message, stored=stop.stored, asked=stop.asked)
