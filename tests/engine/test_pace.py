"""Step times learned, and the two decisions made from them."""

from __future__ import annotations

import sys

import pytest

from erllama.engine.pace import MIN_BUDGET_S, Pace
from erllama.engine.planner import PIECE


def learned(decode_s: float = 0.1, token_s: float = 0.001) -> Pace:
    """A pace that has seen one step of each kind."""
    pace = Pace()
    pace.observe(1, 0, decode_s)
    pace.observe(0, 1000, token_s * 1000)
    return pace


def test_nothing_is_limited_before_anything_was_seen():
    """The first prompt is not throttled by a guess."""
    assert Pace().prefill_budget(0.001) == sys.maxsize


def test_a_first_observation_is_taken_as_it_is():
    """Prediction of a step equals the only step of its kind so far."""
    assert learned().predict_s(3, 0) == pytest.approx(0.1)
    assert learned().predict_s(0, 100) == pytest.approx(0.1)
    assert learned().predict_s(1, 100) == pytest.approx(0.2)


def test_a_mixed_step_teaches_only_its_prefill_part():
    """Seconds of the decode rows in a mixed step are not charged to its prefill tokens."""
    pace = learned()
    for _ in range(50):
        pace.observe(2, 100, 0.1 + 100 * 0.003)
    assert pace.predict_s(0, 1) == pytest.approx(0.003, rel=1e-3)
    assert pace.predict_s(1, 0) == pytest.approx(0.1)


def test_small_prefills_teach_nothing():
    """A step with a handful of prefill tokens says nothing about the time per token."""
    pace = learned()
    pace.observe(0, PIECE - 1, 60.0)
    assert pace.predict_s(0, 1) == pytest.approx(0.001)


def test_newer_steps_weigh_more():
    """After a change of pace the prediction follows it within some twenty steps."""
    pace = learned()
    for _ in range(20):
        pace.observe(1, 0, 0.5)
    assert 0.45 < pace.predict_s(1, 0) < 0.5


def test_the_prefill_budget_keeps_the_target_in_whole_pieces():
    """0.4 s are left of the target, a token takes 1 ms: 400 tokens, cut to 384."""
    assert learned().prefill_budget(0.5) == 384


@pytest.mark.parametrize("target_s", [0.1, 0.0001, 0.12])
def test_the_prefill_budget_is_at_least_a_piece(target_s: float):
    """However slow the machine, a prompt gets on by one piece a step."""
    assert learned().prefill_budget(target_s) == PIECE


def test_a_target_beyond_all_bounds_is_no_overflow():
    """The largest target that options accept does not fall over."""
    assert learned(token_s=1e-6).prefill_budget(sys.float_info.max) >= 2**31


def test_the_step_budget():
    """None: 20 times the prediction, at least 30 s. 0: no limit. Else what was configured."""
    assert learned().budget_s(None, 1, 0) == MIN_BUDGET_S == 30.0
    assert learned(token_s=0.01).budget_s(None, 1, 1000) == pytest.approx(20 * 10.1)
    assert learned().budget_s(0.0, 1, 1000) is None
    assert learned().budget_s(0.25, 1, 1000) == 0.25


def test_its_repr_tells_what_it_learned():
    """A pace shows both averages."""
    assert repr(learned()) == "<Pace decode 100.0 ms, prefill 1.000 ms/token>"
