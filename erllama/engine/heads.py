"""`prefix_checkpoint_len`: the stored path up to the end of a prompt's head outlives what is behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from erllama.kvcache.kinds import SaveReason

if TYPE_CHECKING:
    from .cache_link import CacheLink
    from .sequence import Sequence


def reason_of(seq: Sequence, start: int, end: int, reason: SaveReason) -> SaveReason:
    """Why the node [start, end) is saved; the store pins the path to the one that ends the head."""
    n_head = seq.n_head
    covers = n_head is not None and start < n_head <= end
    return SaveReason.AGENT_PREFIX if covers else reason


def pin_head(cache: CacheLink, seq: Sequence) -> None:
    """Pin the head's path if it is stored already; a pin that is there counts as used."""
    n_head = seq.n_head
    if n_head is None:
        return
    name = next((name for name, end in seq.path.nodes if end >= n_head), None)
    if name is not None and cache.store.has(name):
        pin_prefix(cache, name)


def pin_prefix(cache: CacheLink, name: bytes) -> None:
    """Pin a stored node as a head, within the share that the model's policy allows to pins."""
    cache.store.pin(name, key=("prefix", name), fraction=cache.policy.pin_fraction)
