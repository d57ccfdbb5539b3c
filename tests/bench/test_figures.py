"""What is made of measured values: medians, ratios by pair, bars, and the cells of the table."""

from __future__ import annotations

import pytest

from erllama.bench.answer import Answer, longest_gap_s, rate_together, wall_s
from erllama.bench.figure import Bar, Figure, Outcome, against, single
from erllama.bench.spread import Spread, paired, take_turns
from erllama.bench.table import print_outcome, row


def answer(began, times, ended=None, n=None):
    return Answer(
        n_prompt=4,
        n_computed=4,
        n_generated=len(times) if n is None else n,
        began=began,
        times=tuple(times),
        ended=times[-1] if ended is None else ended,
    )


def test_a_spread_is_median_and_half_the_quartiles_distance():
    """One odd value moves neither much; a single value has no spread."""
    assert Spread.of([1, 2, 3, 4, 100]) == Spread(3, 1, 5)
    assert Spread.of([7.0]) == Spread(7.0, 0.0, 1)


def test_ratios_are_taken_run_by_run():
    """A machine twice as slow in the second run does not move them."""
    assert paired([10, 5], [20, 10]) == Spread(0.5, 0.0, 2)


async def test_sides_take_turns_and_the_first_round_is_thrown_away():
    """A B, B A, A B; each is told the number of its run."""
    order = []

    def side(name):
        async def run(number):
            order.append((name, number))
            return number

        return run

    assert await take_turns(2, side("a"), side("b")) == [[1, 2], [1, 2]]
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert await take_turns(1, side("a"), warm_up=False) == [[1]]


@pytest.mark.parametrize(
    ("bar", "found", "met"),
    [
        (Bar(">=", 1.0), 1.0, True),
        (Bar(">=", 1.0), 0.99, False),
        (Bar("<=", 0.25), 0.25, True),
        (Bar("<=", 0.25), 0.3, False),
    ],
)
def test_a_bar_is_met_or_missed_by_the_ratio(bar, found, met):
    """At the limit it is met."""
    figure = against("x", "s", [found * 8], [8.0], "peer", bar)
    assert figure.met is met
    assert row(figure, judge=True)[-1] == ("met" if met else "MISSED")
    assert row(figure, judge=False)[-1] == ""


def test_a_bar_on_the_value_needs_no_other():
    """And one on the ratio says nothing when only our side ran."""
    assert single("x", "ms", [4.0], Bar("<=", 5, "value")).met is True
    alone = against("x", "tokens/s", [4.0], [], "peer", Bar(">=", 1.0))
    assert (alone.met, alone.ratio, alone.other) == (None, None, None)
    assert row(alone, judge=True) == ("x", "4 tokens/s", "", "", "≥ 1 ×", "")


def test_times_faster_is_the_other_over_ours():
    """Cold 8 s, warm 0.1 s: 80 times."""
    figure = against("x", "s", [0.1], [8.0], "cold", Bar(">=", 80), inverted=True)
    assert figure.ratio == Spread(80.0, 0.0, 1)
    assert row(figure, judge=True)[:4] == ("x", "100 ms", "8 s cold", "80")


def test_the_wall_runs_from_the_first_start_to_the_last_end():
    """Whoever began first, whoever ended last."""
    assert wall_s([answer(1, [2, 3]), answer(0.5, [2], ended=9)]) == 8.5


def test_the_rate_counts_only_while_all_decode():
    """From the last first token to the first last one."""
    first, second = answer(0, [1, 2, 3, 4, 5]), answer(0, [3, 4, 5, 6, 7])
    assert rate_together([first, second]) == 2.0  # tokens at 4 and 5 of both, in 2 s
    assert rate_together([answer(0, [1, 2]), answer(0, [3, 4])]) is None


def test_pieces_of_a_peer_count_as_the_tokens_they_hold():
    """Half characters are held back; what the peer says it generated counts."""
    assert rate_together([answer(0, [1, 3, 5], n=6)]) == 1.0


def test_a_gap_is_the_longest_time_without_a_token():
    """Its ends count, tokens outside do not."""
    assert longest_gap_s([0.5, 2, 3, 9], after=1, until=8) == 5
    assert longest_gap_s([], after=1, until=8) == 7


def test_an_outcome_prints_what_is_compared_and_what_failed(capsys):
    """A workload that could not run stays in the table, with its reason."""
    failed = Outcome(id="P9", title="stall", compared="this and that", failure="no machine")
    print_outcome(failed, judge=True)
    figures = (Figure(name="x", unit="ms", ours=Spread(2.0, 0.5, 3)),)
    print_outcome(Outcome(id="P8", title="look", compared="c", figures=figures, notes=("n.",)), judge=True)
    out = capsys.readouterr().out
    assert "P9  stall" in out
    assert "not measured: no machine" in out
    assert "2 ms ± 0.5" in out
    assert "    n." in out


def test_bars_that_are_not_judged_are_not_printed(capsys):
    """Small sizes say nothing about them."""
    figures = (single("x", "ms", [4.0], Bar("<=", 5, "value")),)
    for judge in (True, False):
        print_outcome(Outcome(id="P8", title="look", compared="c", figures=figures), judge=judge)
        assert ("bar" in (out := capsys.readouterr().out), "≤ 5" in out) == (judge, judge)
