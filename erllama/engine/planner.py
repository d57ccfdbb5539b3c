"""Which tokens go into the next step: pure, sync, and the only place that decides it.

Interval map of one sequence: [0, n_kv) in memory | [n_kv, n_tokens - 1) to prefill | the last
token, a row of its own. The last token of a prompt is therefore computed exactly like a sampled
one, in cold and warm runs alike, and a sequence that is decoding is one that lacks only that row.

Rule 1: everybody who decodes gets a row in every step, before any prefill.
Rule 2: prefill shares what is left, oldest first, at most `prefill_chunk` tokens a sequence, or `lone_chunk`
where nothing else is to be computed. A step may have `prefill_budget` for each prompt, up to `MOST_BUDGETS`:
what streams wait longer for one step, all who are behind it wait less, and larger steps are faster. Where
nobody decodes it may have `lone_chunk` in any case: no stream waits.
Rule 3: a step never needs more cells than are free, nor more tokens than `n_batch`.
Rule 4: no piece reaches across a multiple of `boundary`, where memory has something that only exists there.
Rule 5: pieces end at multiples of `PIECE` where they can, because pieces of at least 64 rows use the
same attention kernel: the same cuts give the same bits. Beside rows that decode, and without a `boundary`,
it is the step that has a multiple of `PIECE` rows: attention works in tiles of so many, and a tile with one
row reads all of the context, as a full one does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

BY_ARRIVAL, BY_SLOT = attrgetter("arrival"), attrgetter("slot")
PIECE = 64  # rows; ggml's CPU flash attention changes kernels below this
MOST_BUDGETS = 4  # so a step takes at most this many times its target


class Plannable(Protocol):
    """What the planner looks at."""

    @property
    def slot(self) -> int:
        """The lane it owns."""

    @property
    def n_kv(self) -> int:
        """Tokens in memory."""

    @property
    def n_tokens(self) -> int:
        """Tokens known: prompt and generated."""

    @property
    def arrival(self) -> int:
        """Order of submission; lower is older."""


class Share(NamedTuple):
    """`n` tokens of `slot` from `start` on; `sampled` when they include the sequence's last token."""

    slot: int
    start: int
    n: int
    sampled: bool


class Chunks(NamedTuple):
    """Most prompt tokens of one sequence in a step."""

    beside: int  # where others decode
    alone: int

    @classmethod
    def of(cls, configured: float | None, n_batch: int) -> Chunks:
        """From `ContextOptions.prefill_chunk_size`: None leaves it to us, infinity means `n_batch`."""
        if configured is None:
            return cls(*(max(PIECE, n_batch // parts // PIECE * PIECE) for parts in (4, 2)))
        chunk = n_batch if configured == math.inf else int(configured)
        return cls(chunk, chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one step may use. `n_cells` is None where each sequence has cells of its own."""

    n_batch: int
    prefill_chunk: int
    lone_chunk: int
    n_cells: int | None
    prefill_budget: int  # tokens of prefill that keep the step within its time target, for each prompt
    boundary: int | None = None

    @classmethod
    def alone(cls, n_batch: int, piece: int) -> Limits:
        """For a sequence that runs alone, its prompt cut at multiples of `piece`."""
        return cls(
            n_batch=n_batch,
            prefill_chunk=piece,
            lone_chunk=piece,
            n_cells=None,
            prefill_budget=piece,
            boundary=piece,
        )


def plan_step(ready: Sequence[Plannable], limits: Limits) -> list[Share]:
    """Shares of the next step, in ascending slot order; empty when nothing can run.

    `ready` are the sequences with a slot whose reader keeps up. A decoding sequence that finds no
    cell is left out: `lacks_cells` tells the caller to make room first.
    """
    decoding: list[Plannable] = []
    filling: list[Plannable] = []
    for s in ready:
        n_missing = s.n_tokens - s.n_kv
        if n_missing:
            (decoding if n_missing == 1 else filling).append(s)
    room = limits.n_batch if limits.n_cells is None else min(limits.n_batch, limits.n_cells)

    if len(decoding) > room:
        decoding = sorted(decoding, key=BY_ARRIVAL)[:room]
    shares = [Share(s.slot, s.n_kv, 1, True) for s in decoding]
    room -= len(shares)
    filling.sort(key=BY_ARRIVAL)
    chunk = limits.prefill_chunk
    budget = max(PIECE, limits.prefill_budget) * min(len(filling), MOST_BUDGETS)
    if not shares:
        budget = max(budget, limits.lone_chunk)
        if len(filling) == 1:
            chunk = limits.lone_chunk
    budget = min(room, budget)
    can_be_whole = min(limits.n_batch - len(shares), chunk) >= PIECE
    n_rows = len(shares)  # that decode, and what comes beside them
    for s in filling:
        most = min(chunk, budget)
        end = s.n_tokens - 1
        if limits.boundary is not None:
            end = min(end, s.n_kv - s.n_kv % limits.boundary + limits.boundary)
        whole_only, n = can_be_whole and bool(shares), 0
        if n_rows and limits.boundary is None:
            n = _piece(n_rows, n_rows + end - s.n_kv, most, whole_only=whole_only)
        if n <= most // 2:  # too little for the sake of one tile
            n = _piece(s.n_kv, end, most, whole_only=whole_only)
        if n:
            shares.append(Share(s.slot, s.n_kv, n, False))
            budget -= n
            n_rows += n if n_rows else 0
    return sorted(shares, key=BY_SLOT)


def lacks_cells(ready: Sequence[Plannable], n_free: int | None) -> bool:
    """Whether the running sequences need more cells for one token each than are free."""
    return n_free is not None and len(ready) > n_free


def _piece(start: int, end: int, most: int, *, whole_only: bool) -> int:
    """How much of [start, end) to take: up to `most`, ending at a multiple of PIECE unless it is the rest.

    `whole_only`: rather nothing than a piece below PIECE. Without it the step would be empty, or no step
    could ever hold a whole piece beside this many decoders.
    """
    n = min(end - start, most)
    if n == end - start or (most < PIECE and not whole_only):
        return n
    return max(0, (start + n) // PIECE * PIECE - start)
