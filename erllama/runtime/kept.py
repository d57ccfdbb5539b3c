"""What a model's users ask of the store: pins by prompt, and how much of a prompt is there."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from erllama.errors import InvalidOption, NotSupported
from erllama.kvcache.key import Prompt
from erllama.options import Rejected, number, optional

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from erllama.engine.actor import Actor
    from erllama.engine.cache_link import CacheLink
    from erllama.engine.handle import Handle
    from erllama.kvcache.key import Identity

_ttl = optional(number(0, above_low=True))


class Pins:
    """The pins that callers put on prompts of one model."""

    def __init__(self, actor: Actor, cache: CacheLink, identity: Identity) -> None:
        self._actor = actor
        self._cache = cache
        self._identity = identity

    @classmethod
    def of(cls, handle: Handle, ttl_s: float | None = None) -> Pins:
        """Raises: `NotSupported`; `InvalidOption` if nothing can be kept for `ttl_s`."""
        try:
            _ttl(ttl_s)
        except Rejected as why:
            detail = {"key": "ttl_s", "value": ttl_s}
            raise InvalidOption(f"ttl_s={ttl_s!r}: expected {why}", detail=detail) from None
        if handle.actor.cache is None or handle.facts.layout is None:
            raise NotSupported(f"the memory of {handle.model_id!r} is not kept, so nothing can be pinned")
        cache = handle.actor.cache
        return cls(handle.actor, cache, cache.identity_for(exact=handle.exact == "cold"))

    async def put(self, prompt_ids: list[int], ttl_s: float | None) -> int:
        """Pin what is stored of a prompt that was just computed; returns its tokens, 0 if refused."""
        await self._actor.wait_saved()
        match = await self._cache.store.find(self._identity, Prompt.of(prompt_ids))
        key = self._key(prompt_ids)
        fraction = self._cache.policy.pin_fraction
        if not match.nodes or not self._cache.store.pin(match.tip, key=key, ttl_s=ttl_s, fraction=fraction):
            return 0
        return match.n_tokens

    def remove(self, prompt_ids: list[int]) -> bool:
        """End the pin of a prompt."""
        return self._cache.store.unpin(self._key(prompt_ids))

    def _key(self, prompt_ids: list[int]) -> Hashable:
        ids = np.asarray(prompt_ids, "<i4").tobytes()
        return "prompt", self._identity.space, hashlib.sha256(ids).digest()


def cached_bytes(handle: Handle, ids: list[int]) -> int:
    """Bytes of text of the longest beginning of `ids` that a live sequence or the store holds."""
    detokenize: Callable[[Sequence[int]], bytes] = handle.optional("detokenize")
    return len(detokenize(ids[: handle.actor.n_kept(ids, exact=handle.exact == "cold")]))
