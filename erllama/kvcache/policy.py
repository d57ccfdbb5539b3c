"""When something is saved: the per-model policy, where blocks are cut, second sightings, write rates."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from erllama.options import Rejected, boolean, integer, number, option, optional, options

from .kinds import Refusal, SaveReason

if TYPE_CHECKING:
    from collections.abc import Callable


def _gate(value: object) -> int | float:
    """A whole number of tokens, or infinity for never."""
    if value == math.inf:
        return math.inf
    try:
        return integer(0)(value)  # type: ignore[return-value]  # the check returns an int
    except Rejected as why:
        raise Rejected(f"{why}, or math.inf for never") from None


@options
class SavePolicy:
    """What of a model's requests is kept.

    `min_tokens`: shorter histories are not saved (`math.inf`: nothing ever). `cold_min_tokens`: the same
    for saves right after prefill. `cold_max_tokens` holds only where a model's state must be kept
    whole. `second_sighting`: a node is stored when it is seen for the second time. `ttl_s`: nodes expire.
    `pin_fraction`: at most this much of a tier may be pinned.
    """

    min_tokens: int | float = option(default=512, check=_gate)
    cold_min_tokens: int | float = option(default=512, check=_gate)
    cold_max_tokens: int | float = option(default=30_000, check=_gate)
    continued_interval: int = option(default=2048, check=integer(1))
    block_tokens: int = option(default=256, check=integer(1, 2**16))
    session_resume_wait_s: float = option(default=0.5, check=number(0))
    match_bytes: bool = option(default=True, check=boolean)
    second_sighting: bool = option(default=False, check=boolean)
    ttl_s: float | None = option(default=None, check=optional(number(0, above_low=True)))
    pin_fraction: float = option(default=0.25, check=number(0, 1))

    def gate(self, reason: SaveReason, n_tokens: int, *, whole: bool = False) -> Refusal | None:
        """Whether a history of `n_tokens` may be saved for `reason`; `whole`: its state cannot be cut."""
        low = max(self.min_tokens, self.cold_min_tokens) if reason is SaveReason.COLD else self.min_tokens
        if n_tokens < low or (whole and reason is SaveReason.COLD and n_tokens > self.cold_max_tokens):
            return Refusal.BELOW_GATE
        return None


def cut_blocks(start: int, end: int, block_tokens: int, *, tail: bool) -> list[tuple[int, int]]:
    """How tokens [start, end) become nodes: cut at multiples of `block_tokens`.

    `tail`: also the last, unfinished piece; a prompt in flight leaves it out and saves it once, at the end.
    """
    cuts = [start, *range((start // block_tokens + 1) * block_tokens, end + 1, block_tokens)]
    if tail and cuts[-1] < end:
        cuts.append(end)
    return list(itertools.pairwise(cuts))


def legal_cut(position: int, block_tokens: int) -> int:
    """A boundary rounded down to where nodes are cut."""
    return position - position % block_tokens


class SecondSighting:
    """Remembers names seen once, the latest `capacity` of them."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity: Final = capacity
        self._seen: OrderedDict[int, None] = OrderedDict()

    def seen_before(self, name: bytes) -> bool:
        """Whether this name came before; remembers it."""
        key = int.from_bytes(name[:8], "little")
        if key in self._seen:
            self._seen.move_to_end(key)
            return True
        self._seen[key] = None
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
        return False


class TokenBucket:
    """At most `rate` units per second on average, `burst` at once."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._level, self._at = burst, clock()

    def try_take(self, n: float) -> bool:
        """Take n units if the rate allows; a single amount above the burst passes when the bucket is full."""
        if math.isinf(self._rate):
            return True
        now = self._clock()
        self._level = min(self._burst, self._level + max(0.0, now - self._at) * self._rate)
        self._at = now
        if self._level < min(n, self._burst):
            return False
        self._level -= n
        return True
