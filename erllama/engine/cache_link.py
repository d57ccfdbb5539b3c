"""What ties one model to the store: whose KV it is, where it is kept, and under which policy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Tokens

    from erllama.kvcache.key import Identity
    from erllama.kvcache.policy import SavePolicy
    from erllama.kvcache.score import PrefillCost
    from erllama.kvcache.store import KvStore

    from .retokenise import Tokenize
    from .sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLink:
    """`pieces` gives the key bytes of tokens: people and tools can read what a node holds, and prompts given
    as text are found whatever their tokens are, if there is `tokenize`, too.

    `cold_identity`: whose KV requests with `exact="cold"` share.
    """

    store: KvStore
    identity: Identity
    cold_identity: Identity
    policy: SavePolicy
    tier: str
    pieces: Callable[[Tokens[int]], list[bytes]]
    tokenize: Tokenize | None = None

    def identity_of(self, seq: Sequence) -> Identity:
        """Whose KV a request may find and leaves."""
        return self.identity_for(exact=seq.exact, salt=seq.options.salt)

    def identity_for(self, *, exact: bool, salt: bytes = b"") -> Identity:
        """The same, for requests of a kind."""
        identity = self.cold_identity if exact else self.identity
        return dataclasses.replace(identity, salt=salt) if salt else identity

    def measured(self, cost: PrefillCost) -> None:
        """Tell the store what prefill costs this model; with `exact="cold"` it is taken to cost the same."""
        for identity in (self.identity, self.cold_identity):
            self.store.set_cost(identity, cost)
