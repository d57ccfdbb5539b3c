"""How long steps take on this machine, learned from those that ran.

Two moving averages are enough: seconds of a step that only decodes, and seconds per prefilled
token on top. They bound how much prefill may ride along with running streams (`step_target_s`),
and how long a step may take before something must be wrong (`decode_budget_s`).
"""

from __future__ import annotations

import sys

from .planner import PIECE

WEIGHT = 0.2  # of the newest observation
MIN_BUDGET_S = 30.0  # API: decode_budget_s=None is max(30, 20 × predicted step)
BUDGET_FACTOR = 20.0


class Pace:
    """Predicts step times. Sync, owned by one actor."""

    def __init__(self) -> None:
        self._decode_s = 0.0
        self._token_s = 0.0

    def __repr__(self) -> str:
        return f"<Pace decode {self._decode_s * 1e3:.1f} ms, prefill {self._token_s * 1e3:.3f} ms/token>"

    def observe(self, n_decode: int, n_prefill: int, seconds: float) -> float | None:
        """Learn from a finished step; returns what its prefill took, if there was enough of it to tell."""
        if n_prefill == 0:
            self._decode_s = _blend(self._decode_s, seconds)
        elif n_prefill >= PIECE:
            own = max(seconds - (self._decode_s if n_decode else 0.0), 0.0)
            self._token_s = _blend(self._token_s, own / n_prefill)
            return own
        return None

    def predict_s(self, n_decode: int, n_prefill: int) -> float:
        """Expected seconds of a step."""
        return (self._decode_s if n_decode else 0.0) + self._token_s * n_prefill

    def prefill_budget(self, target_s: float) -> int:
        """Prefill tokens that keep a step within `target_s`, in whole pieces, at least one."""
        if self._token_s == 0.0:
            return sys.maxsize  # nothing is known yet
        n = min((target_s - self._decode_s) / self._token_s, sys.maxsize)  # a huge target divides to infinity
        return max(PIECE, int(n) // PIECE * PIECE)

    def budget_s(self, configured: float | None, n_decode: int, n_prefill: int) -> float | None:
        """Wall clock to allow a step: configured (0: no limit), else well above the prediction."""
        if configured is None:
            return max(MIN_BUDGET_S, BUDGET_FACTOR * self.predict_s(n_decode, n_prefill))
        return configured or None


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else old + WEIGHT * (new - old)
