"""What prefill costs with one model on this machine, learned from the steps that ran.

A step of n tokens takes a part that grows with n and one that grows with the pairs of tokens that attention
compares. Both are found by least squares over the steps, older ones fading; neither is below zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erllama.kvcache.score import PrefillCost

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .planner import Share

KEEP = 0.95  # of what was seen before, with each step
TELL_AFTER = 2048  # new tokens until the cost is worth telling (again)
ALIKE = 1e-6  # steps so much alike do not tell the two parts from each other


class PrefillMeter:
    """Sync, owned by one actor."""

    def __init__(self) -> None:
        # Sums over steps of: tokens², tokens·pairs, pairs², tokens·seconds, pairs·seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._n_untold = 0

    def __repr__(self) -> str:
        return f"<PrefillMeter {self.cost()}>"

    def observe(self, shares: Iterable[Share], seconds: float) -> None:
        """Learn from the prefill of a step; `seconds`: what it took."""
        if seconds <= 0:
            return  # a backend that does not say, or a step that took no longer than one that decodes
        pieces = [share for share in shares if not share.sampled]
        n = sum([share.n for share in pieces])
        pairs = sum([share.n * (share.start + share.n / 2) for share in pieces])
        new = (n * n, n * pairs, pairs * pairs, n * seconds, pairs * seconds)
        self._sums = tuple([KEEP * old + add for old, add in zip(self._sums, new, strict=True)])  # type: ignore[assignment]  # five of them
        self._n_untold += n

    def cost(self) -> PrefillCost | None:
        """Seconds per token and per pair; None before anything was seen."""
        nn, np, pp, ny, py = self._sums
        if not nn:
            return None
        determinant = nn * pp - np * np
        if determinant > ALIKE * nn * pp:
            per_token_s, per_pair_s = (pp * ny - np * py) / determinant, (nn * py - np * ny) / determinant
            if per_token_s >= 0 and per_pair_s >= 0:
                return PrefillCost(per_token_s, per_pair_s)
            if per_token_s < 0:
                return PrefillCost(0.0, py / pp)
        return PrefillCost(ny / nn, 0.0)

    def take(self) -> PrefillCost | None:
        """The cost, if much was seen since it was last taken."""
        if self._n_untold < TELL_AFTER:
            return None
        self._n_untold = 0
        return self.cost()
