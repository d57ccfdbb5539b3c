"""What keeping a part is worth: seconds of prefill saved per byte, times how likely it is used again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Number = float | NDArray[np.float64]

HALF_LIFE_S: Final = 6 * 3600.0
NEWCOMER_HITS: Final = 1.0  # what is just being saved counts as used once, so that it can get in at all


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds to prefill, as the engine measured it; only ratios matter to evictions.

    Defaults: SmolLM2-135M on 2 cores, 512 / 2,048 / 6,000 tokens in 1.7 / 8.5 / 37.9 s.
    """

    per_token_s: float = 3.2e-3
    per_pair_s: float = 1.0e-6  # attention: each token looks at all before it

    def seconds(self, start: Number, n_tokens: Number) -> Number:
        """Time to compute `n_tokens` behind `start` others."""
        return prefill_seconds(self.per_token_s, self.per_pair_s, start, n_tokens)


def prefill_seconds(per_token_s: Number, per_pair_s: Number, start: Number, n_tokens: Number) -> Number:
    """What `PrefillCost.seconds` says, for costs of many models too."""
    return per_token_s * n_tokens + per_pair_s * n_tokens * (start + n_tokens / 2)


def reuse(hits: Number, age_s: Number) -> Number:
    """Expected reuse: hits halved every half-life, plus a recency that fades more slowly.

    So of two parts equally old the one with more hits is worth more, and after many half-lives only
    recency is left. A clock that went backwards makes an age of zero.
    """
    lives = np.maximum(age_s, 0.0) / HALF_LIFE_S
    worth: Number = hits * np.exp2(-lives) + 1.0 / (1.0 + lives)
    return worth


def add_hit(hits: float, age_s: float) -> float:
    """The hit count after one more use, `age_s` after the last one."""
    return float(hits * 2.0 ** (-max(age_s, 0.0) / HALF_LIFE_S)) + 1.0
