"""`parent_key`: the caller expects a node that may still be on its way into the store.

Only a hint: the longest match wins whatever it says. It is worth a short wait for a node that is being
written and that no live sequence holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from .cache_link import CacheLink
    from .saver import Saver
    from .sequence import Sequence


class ParentHint:
    """Waits for the parents of one model's requests."""

    def __init__(self, cache: CacheLink, saver: Saver) -> None:
        self._cache = cache
        self._saver = saver

    def is_pending(self, seq: Sequence) -> bool:
        """Whether the node `seq` expects is being written, and `seq` does not hold it already."""
        name = seq.options.parent_key
        if name is None or any(name == held for held, _ in seq.path.nodes):
            return False
        return self._saver.is_saving(name) and not self._cache.store.has(name)

    async def wait(self, seq: Sequence) -> None:
        """Until it is stored, for at most `policy.session_resume_wait_s`. Cancellation: harmless."""
        name = seq.options.parent_key
        assert name is not None
        with trio.move_on_after(self._cache.policy.session_resume_wait_s):
            await self._saver.wait_saved(name)
            await self._cache.store.wait_saved(name)
