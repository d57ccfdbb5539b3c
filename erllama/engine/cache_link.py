"""What ties one model to the store: whose KV it is, where it is kept, and under which policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from erllama.kvcache.key import Identity
    from erllama.kvcache.policy import SavePolicy
    from erllama.kvcache.store import KvStore


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLink:
    """`pieces` gives the key bytes of tokens, so that people and tools can read what a node holds."""

    store: KvStore
    identity: Identity
    policy: SavePolicy
    tier: str
    pieces: Callable[[Sequence[int]], list[bytes]]
