"""What users call about what is kept of prompts: pins, and how much there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from erllama.engine.purpose import Purpose
from erllama.options import GenerationOptions

from .kept import Pins, cached_bytes
from .request_calls import RequestCalls
from .text_calls import token_ids

if TYPE_CHECKING:
    from erllama.types import CacheHit

    from .text_calls import Prompt


class KeptCalls(RequestCalls):
    """The part of `Model` that asks for what is kept."""

    async def pin(self, prompt: Prompt, ttl_s: float | None = None) -> int:
        """Compute and store a prompt, however short, and keep it from eviction, for `ttl_s` seconds if given.

        Returns how many of its tokens are: fewer where the tier has no room for all, 0 if they would take
        more than the share of it that may be pinned. The pins unused for longest give way to new ones.
        Raises: as `complete`, and `NotSupported` if this model's memory is not kept.
        Cancellation: nothing is pinned.
        """
        pins = Pins.of(self._live(), ttl_s)
        prompt_ids = await self._prompt_ids(prompt)
        await self._prefill(prompt_ids, GenerationOptions(), Purpose.PIN)
        return await pins.put(prompt_ids, ttl_s)

    async def unpin(self, prompt: Prompt) -> bool:
        """End a pin; False if there was none (any more)."""
        pins = Pins.of(self._live())
        return pins.remove(await self._prompt_ids(prompt))

    def cached_prefix_len(self, tokens: Prompt) -> int:
        """Bytes of text of the longest beginning that is in memory or in any tier; 0 if there is none.

        A plain read of the indexes; use `cached_prefix_len_async` for more than 64 KiB.
        """
        ids = self.tokenize(tokens) if isinstance(tokens, str) else token_ids(tokens)
        return cached_bytes(self._live(), ids)

    async def cached_prefix_len_async(self, tokens: Prompt) -> int:
        """`cached_prefix_len`; long text is tokenised in a worker thread. Cancellation: waits for it."""
        return cached_bytes(self._live(), await self._prompt_ids(tokens))

    def last_cache_hit(self) -> CacheHit | None:
        """How the latest request was admitted and how many tokens it reused; None before the first."""
        return self._live().actor.hits.last
