"""What admission and look-up saw of a request's beginning: the facts from which a miss is explained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

AROUND = 8  # tokens before and behind the first one that differs


@dataclass(slots=True)
class Evidence:
    """`reach`: the longest beginning seen anywhere, in memory or stored.

    `whole`: the same in whole stored nodes. `kept`: tokens around `reach` as they are kept; empty where
    nothing is kept behind it. `evicted_to`: a stored history would have reached this far, had it not made
    room. `failed`: a restore ended early.
    """

    reach: int = 0
    whole: int = 0
    kept: tuple[int, ...] = ()
    evicted_to: int = 0
    failed: bool = False

    def saw(self, n: int, kept: Sequence[int] | NDArray[np.int32], n_kept: int) -> None:
        """The first `n` tokens are those of `kept`, of which `n_kept` count. Shorter ones are not noted."""
        if n <= 0 or n < self.reach:
            return
        if n > self.reach or not self.kept:
            around = kept[max(0, n - AROUND) : min(n + AROUND, n_kept)] if n < n_kept else ()
            self.kept = tuple(int(token) for token in around)
        self.reach = n
