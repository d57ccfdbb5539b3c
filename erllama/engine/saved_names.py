"""The latest nodes this model stored, so that a look-up can tell "evicted" from "never seen"."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from erllama.kvcache.key import Identity


class SavedNames:
    """Names of the `capacity` latest stored nodes, and how long the ones behind each parent are."""

    def __init__(self, capacity: int = 16_384) -> None:
        self._capacity = capacity
        self._saved: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        self._lengths: dict[bytes, Counter[int]] = {}

    def __len__(self) -> int:
        return len(self._saved)

    def add(self, parent: bytes, name: bytes, n_tokens: int) -> None:
        """A node of `n_tokens` was stored behind `parent`."""
        if name in self._saved:
            self._saved.move_to_end(name)
            return
        self._saved[name] = parent, n_tokens
        self._lengths.setdefault(parent, Counter())[n_tokens] += 1
        if len(self._saved) > self._capacity:
            self._forget(*self._saved.popitem(last=False)[1])

    def _forget(self, parent: bytes, n_tokens: int) -> None:
        left = self._lengths[parent] - Counter({n_tokens: 1})
        if left:
            self._lengths[parent] = left
        else:
            del self._lengths[parent]

    def gone_to(
        self,
        identity: Identity,
        parent: bytes,
        start: int,
        tokens: Sequence[int],
        has: Callable[[bytes], bool],
    ) -> int:
        """How far a node behind `parent` held `tokens[start:]` that is not stored any more; 0 without one."""
        reached = 0
        for n in self._lengths.get(parent, ()):
            end = start + n
            if end > len(tokens):
                continue
            name = identity.node_name(parent, np.asarray(tokens[start:end], "<i4").tobytes())
            if name in self._saved and not has(name):
                reached = max(reached, end)
        return reached
