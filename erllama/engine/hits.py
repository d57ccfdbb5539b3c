"""How requests were admitted, and why not more was reused: what users read of it afterwards."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from erllama.kvcache.kinds import ROOT_NAME
from erllama.types import CacheHit

from .miss import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from erllama.backend import Layout

    from .cache_link import CacheLink
    from .saved_names import SavedNames
    from .sequence import Sequence

log = logging.getLogger("erllama.engine")


class HitBook:
    """The latest admission of one model, and the explanation of each miss."""

    def __init__(
        self,
        cache: CacheLink | None,
        saved: SavedNames | None,
        piece: Callable[[int], bytes],
        *,
        layout: Layout | None,
    ) -> None:
        self._cache = cache
        self._saved = saved
        self._piece = piece
        self._layout = layout
        self._arrival = 0
        self.last: CacheHit | None = None

    def admitted(self, seq: Sequence) -> None:
        """Whatever could be reused is in memory."""
        if self._saved is not None and self._cache is not None and seq.options.cache != "off":
            seq.evidence.evicted_to = self._saved.gone_to(
                self._cache.identity_of(seq),
                seq.path.tip or ROOT_NAME,
                seq.path.end,
                seq.ledger,
                self._cache.store.has,
            )
        if seq.arrival >= self._arrival:
            self._arrival = seq.arrival
            self._note(seq)

    def ending(self, seq: Sequence) -> None:
        """It is about to end, its slot still its own."""
        self._note(seq)  # it may have got more from others since it was admitted
        min_tokens = self._cache.policy.min_tokens if self._cache is not None else math.inf
        seq.miss = explain(seq, min_tokens=min_tokens, layout=self._layout, text=self._text)
        log.debug(
            "%s: %s, %d of %d reused: %s", seq.request, seq.hit_kind, seq.n_cached, seq.n_prompt, seq.miss
        )

    def _note(self, seq: Sequence) -> None:
        if seq.arrival == self._arrival:
            self.last = CacheHit(kind=seq.hit_kind, n_tokens=seq.n_cached)

    def _text(self, tokens: Iterable[int]) -> str:
        return b"".join(map(self._piece, tokens)).decode(errors="replace")
