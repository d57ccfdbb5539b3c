"""What the steps of one model did and how long they took."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .pace import Pace
from .prefill_meter import PrefillMeter

if TYPE_CHECKING:
    from erllama.backend import StepResult

    from .cache_link import CacheLink
    from .planner import Share


class Tally:
    """Counters since the model was loaded, and what is learned from steps. Owned by one actor."""

    def __init__(self, cache: CacheLink | None) -> None:
        self.pace = Pace()
        self._meter = None if cache is None else PrefillMeter()
        self._cache = cache
        self.n_steps = self.n_prefill_tokens = self.n_decode_rows = 0
        self.n_preempted = self.n_parked = self.n_refused_steps = self.n_aborted_steps = 0
        self.compute_s = self.sample_s = 0.0

    def add_lost(self, result: StepResult) -> None:
        """A step ended without doing what was asked."""
        self.compute_s += result.compute_s
        self.sample_s += result.sample_s

    def add_step(self, shares: list[Share], n_decode: int, n_prefill: int, result: StepResult) -> None:
        """A step did what was asked. The store is told now and then what prefill costs."""
        self.compute_s += result.compute_s
        self.sample_s += result.sample_s
        self.n_steps += 1
        self.n_decode_rows += n_decode
        self.n_prefill_tokens += n_prefill
        prefill_s = self.pace.observe(n_decode, n_prefill, result.compute_s)
        if prefill_s is None or self._meter is None or self._cache is None:
            return
        self._meter.observe(shares, prefill_s)
        if (cost := self._meter.take()) is not None:
            self._cache.measured(cost)
