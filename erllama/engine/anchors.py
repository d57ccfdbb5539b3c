"""Which stored nodes are worth going on from: their window parts and states are evicted last.

Anchors are the end of a prompt (before its last token, which is always computed), the end of its head where
the caller names one, rounded down to where blocks are cut, and the end of what a sequence leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erllama.kvcache.policy import legal_cut

if TYPE_CHECKING:
    from erllama.backend import Layout

    from .sequence import Sequence


def anchors_of(seq: Sequence, block_tokens: int) -> tuple[int, ...]:
    """Positions at which others will want to go on from what `seq` computes."""
    n_head = seq.n_head
    heads = () if n_head is None else (legal_cut(n_head, block_tokens),)
    return (*heads, seq.n_prompt - 1)


def is_anchor(layout: Layout, start: int, end: int, anchors: tuple[int, ...], *, last: bool) -> bool:
    """Whether a node [start, end) is needed to go on at one of `anchors`; `last`: it ends a sequence."""
    if last:
        return True
    if layout.state:
        return end in anchors
    return any(start < at and end > at - layout.window for at in anchors)
