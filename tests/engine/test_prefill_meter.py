"""The cost of prefill, learned from steps."""

from __future__ import annotations

import pytest

from erllama.engine.planner import Share
from erllama.engine.prefill_meter import TELL_AFTER, PrefillMeter
from erllama.kvcache.score import PrefillCost


def learned(true: PrefillCost, starts: list[int], n: int = 512, **noise: float) -> PrefillMeter:
    """A meter that saw pieces of n tokens from these positions on, beside somebody who decodes."""
    meter = PrefillMeter()
    for start in starts:
        seconds = float(true.seconds(start, n)) + noise.get("seconds", 0.0)
        meter.observe([Share(0, start, n, False), Share(1, 7000, 1, True)], seconds)
    return meter


def test_both_parts_are_told_from_each_other() -> None:
    """Pieces at several positions: what grows with the position belongs to attention."""
    cost = learned(PrefillCost(2e-3, 5e-7), [0, 512, 1024, 4096, 0, 512]).cost()
    assert cost is not None
    assert cost.per_token_s == pytest.approx(2e-3)
    assert cost.per_pair_s == pytest.approx(5e-7)


def test_pieces_that_are_all_alike_still_give_their_time() -> None:
    """At one position only, the sum is known and the parts are not."""
    true = PrefillCost(2e-3, 5e-7)
    cost = learned(true, [0] * 9).cost()
    assert cost is not None
    assert cost.seconds(0, 512) == pytest.approx(true.seconds(0, 512))
    assert cost.per_pair_s == 0.0


@pytest.mark.parametrize("true", [PrefillCost(2e-3, -1e-7), PrefillCost(-1e-4, 1e-6)])
def test_neither_part_is_below_zero(true: PrefillCost) -> None:
    """A machine that grew quicker meanwhile does not make long prompts worth less than nothing."""
    cost = learned(true, [512, 1024, 2048, 4096]).cost()
    assert cost is not None
    assert min(cost.per_token_s, cost.per_pair_s) == 0.0
    assert max(cost.per_token_s, cost.per_pair_s) > 0.0


def test_old_steps_fade() -> None:
    """A model that others slow down is soon known to be slow."""
    meter = learned(PrefillCost(1e-3, 0.0), [0, 512, 1024] * 3)
    for start in [0, 512, 1024] * 60:
        meter.observe([Share(0, start, 512, False)], 512 * 3e-3)
    cost = meter.cost()
    assert cost is not None
    assert cost.seconds(0, 1000) == pytest.approx(3.0, rel=0.01)


def test_it_is_told_now_and_then() -> None:
    """Not with every step, nor before anything was seen."""
    meter = PrefillMeter()
    assert meter.cost() is None
    assert meter.take() is None
    told = 0
    for _ in range(20):
        meter.observe([Share(0, 0, 512, False)], 1.0)
        told += meter.take() is not None
    assert told == 20 * 512 // TELL_AFTER


def test_a_backend_that_takes_no_time_teaches_nothing() -> None:
    """Or everything it computes would be worth nothing."""
    meter = PrefillMeter()
    meter.observe([Share(0, 0, 5000, False)], 0.0)
    assert meter.take() is None
