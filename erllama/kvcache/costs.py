"""What prefill costs, model by model: as engines measured it.

A model that nobody measured (files of an earlier life, one that has computed nothing yet) is taken to cost
what the measured ones cost on the mean, so it is worth neither more nor less than they; before any is
measured, all cost what the store's options say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .score import PrefillCost, prefill_seconds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .score import Number


class PrefillCosts:
    """Costs by the number that the tree gives a model's shape hash."""

    def __init__(self, guess: PrefillCost | None = None) -> None:
        self._measured: dict[int, PrefillCost] = {}
        # Seconds per token and per pair, a column for each number; the last one for all without their own.
        self._columns = _column(guess or PrefillCost())[:, None]

    def __repr__(self) -> str:
        return f"<PrefillCosts of {len(self._measured)} models>"

    def set(self, shape: int, cost: PrefillCost) -> None:
        """A model was measured."""
        self._measured[shape] = cost
        known = list(self._measured)
        measured = np.stack([_column(each) for each in self._measured.values()], axis=1)
        self._columns = np.repeat(measured.mean(axis=1, keepdims=True), max(known) + 2, axis=1)
        self._columns[:, known] = measured

    def seconds(self, shape: int | NDArray[np.uint32], start: Number, n_tokens: Number) -> Number:
        """Time to compute `n_tokens` behind `start` others; for one part, or for each of many."""
        per_token_s, per_pair_s = self._columns[:, np.minimum(shape, self._columns.shape[1] - 1)]
        return prefill_seconds(per_token_s, per_pair_s, start, n_tokens)


def _column(cost: PrefillCost) -> NDArray[np.float64]:
    return np.array([cost.per_token_s, cost.per_pair_s])
