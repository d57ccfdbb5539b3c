"""Results that are kept for the next time, as many as go into a number of bytes."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
ENTRY_BYTES = 300  # of one result, besides its text


class Remembered(Generic[T]):
    """A function of text whose results are kept by the text's hash; the longest unused go first. Any thread.

    `size` gives a result's bytes, roughly. A failure is not kept. Two threads may compute the same result.
    """

    def __init__(self, make: Callable[[str], T], size: Callable[[T], int], *, max_bytes: int) -> None:
        self._make = make
        self._size = size
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[T, int]] = OrderedDict()
        self.n_bytes = 0
        self.n_hits = 0
        self.n_misses = 0

    def __call__(self, text: str) -> T:
        """The result. Raises: what the function does."""
        key = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                self.n_hits += 1
                return found[0]
            self.n_misses += 1
        made = self._make(text)
        with self._lock:
            self._keep(key, made)
        return made

    def _keep(self, key: bytes, made: T) -> None:
        n_bytes = ENTRY_BYTES + self._size(made)
        if key in self._kept or n_bytes > self._max_bytes:
            return
        self._kept[key] = (made, n_bytes)
        self.n_bytes += n_bytes
        while self.n_bytes > self._max_bytes:
            _, (_, gone) = self._kept.popitem(last=False)
            self.n_bytes -= gone
