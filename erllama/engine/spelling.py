"""Looking a sequence up: by its ids, and where its prompt came as text, by what they spell as well.

Ids that a model sampled are often not those that a tokenizer makes of the same text. So a prompt given as
text is found under any ids that spell its beginning, and takes them over: they are in the store, and the text
does not change by a byte. Ids that the caller gave are never replaced.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from erllama.kvcache.key import Prompt

from .resident import n_common
from .retokenise import retokenised

if TYPE_CHECKING:
    from collections.abc import Callable

    from erllama.backend import BackendFacts, Layout
    from erllama.kvcache.match import Match

    from .admission import Lanes
    from .cache_link import CacheLink
    from .sequence import Sequence


class Spelling:
    """The look-ups of one model."""

    def __init__(self, cache: CacheLink, facts: BackendFacts, lanes: Lanes) -> None:
        assert facts.layout is not None
        self._cache = cache
        self._layout: Layout = facts.layout
        self._n_ctx = facts.n_ctx
        self._lanes = lanes

    def prompt(self, seq: Sequence) -> Prompt:
        """What is looked up: with the text of its ids where that counts and nothing was generated yet."""
        if not self._by_text(seq):
            return Prompt.of(seq.ledger)
        if seq.looked_up is None:  # for a long prompt that takes milliseconds
            seq.looked_up = Prompt.of(seq.ledger, self._cache.pieces(seq.ledger))
        return seq.looked_up

    def _by_text(self, seq: Sequence) -> bool:
        by_text = seq.is_text and self._cache.policy.match_bytes and self._cache.tokenize is not None
        return by_text and not seq.exact and not seq.n_generated

    def is_longer(self, seq: Sequence, n: int, *, or_equal: bool) -> bool:
        """Whether more of `seq` is stored than its first `n` tokens. A plain read."""
        prompt = self.prompt(seq)
        n_tokens, n_bytes = self._cache.store.peek(self._cache.identity_of(seq), prompt)
        stored, held = (n_tokens, n) if prompt.offsets is None else (n_bytes, int(prompt.offsets[n]))
        return stored > held or (or_equal and stored == held)

    def gains(self, seq: Sequence) -> bool:
        """Whether other ids that spell the same are stored further than its own. A plain read."""
        if not self._by_text(seq):
            return False
        identity = self._cache.identity_of(seq)
        by_tokens = self._cache.store.peek(identity, Prompt.of(seq.ledger))[1]
        return self._cache.store.peek(identity, self.prompt(seq))[1] > by_tokens

    async def find(self, seq: Sequence, still_wants: Callable[[], bool]) -> Match:
        """The longest match; its ids are a beginning of the sequence's own when this returns."""
        store, identity = self._cache.store, self._cache.identity_of(seq)
        match = await store.find(identity, self.prompt(seq), resume_key=seq.options.parent_key)
        if not any(node.by_bytes for node in match.nodes):
            return match
        if still_wants() and self._respell(seq, match):
            return match
        return await store.find(identity, Prompt.of(seq.ledger), resume_key=seq.options.parent_key)

    def _head_in(self, ids: list[int], seq: Sequence) -> int | None:
        """Where the prompt's head ends in other ids of the same text."""
        offsets = self.prompt(seq).offsets
        if seq.n_head is None or offsets is None:
            return seq.n_head
        n_bytes = int(offsets[min(seq.n_head, seq.n_prompt)])
        ends = accumulate(len(piece) for piece in self._cache.pieces(ids))
        return sum(end <= n_bytes for end in ends) or None

    def _respell(self, seq: Sequence, match: Match) -> bool:
        """Let `seq` take the stored ids over, if it may and gains by it."""
        assert self._cache.tokenize is not None
        ids = retokenised(
            match,
            seq.ledger,
            self._cache.pieces(seq.ledger),
            tokenize=self._cache.tokenize,
            key_pieces=self._cache.pieces,
        )
        if ids is None or len(ids) >= self._n_ctx or match.n_tokens <= seq.n_kv:
            return False
        n_same = n_common(seq.ledger, match.ids)
        if n_same < seq.n_kv:
            self._lanes.cut_back(seq, self._layout.cut(seq.n_kv, n_same))
        seq.respell(ids, self._head_in(ids, seq))
        self._lanes.sharing.respelled(seq)
        return True
