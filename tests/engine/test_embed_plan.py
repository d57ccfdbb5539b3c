"""Planning what is embedded in one call."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from erllama.engine.embed_plan import Portion, plan_portions
from erllama.types import EmbeddingFacts


def facts(n_rows: int = 8, n_lanes: int = 3, *, whole: bool = False, n_ctx: int = 100) -> EmbeddingFacts:
    return EmbeddingFacts(n_embd=4, pooling="mean", n_ctx=n_ctx, n_rows=n_rows, n_lanes=n_lanes, whole=whole)


def test_as_many_inputs_as_fit() -> None:
    """Rows and lanes bound a call; order is kept, nobody overtakes."""
    assert plan_portions([(3, 0), (4, 0), (2, 0), (1, 0)], facts(), 8) == [Portion(0, 0, 3), Portion(1, 0, 4)]
    assert plan_portions([(1, 0)] * 5, facts(), 8) == [Portion(i, 0, 1) for i in range(3)]


def test_a_long_input_is_computed_in_pieces() -> None:
    """Alone, and gone on with before another begins."""
    assert plan_portions([(20, 0), (1, 0)], facts(), 8) == [Portion(0, 0, 8)]
    assert plan_portions([(20, 16), (1, 0)], facts(), 8) == [Portion(0, 16, 4)]


def test_one_that_must_be_whole_is_not_cut() -> None:
    """Those who generate wait a little longer then."""
    assert plan_portions([(8, 0), (1, 0)], facts(whole=True), 2) == [Portion(0, 0, 8)]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    n_rows=st.integers(1, 40),
    n_lanes=st.integers(1, 8),
    n_most=st.integers(1, 60),
    whole=st.booleans(),
)
def test_everything_is_computed_once(
    lengths: list[int], n_rows: int, n_lanes: int, n_most: int, whole: bool
) -> None:
    """Each token of each input is in exactly one portion, and no call is larger than the model takes."""
    shape = facts(n_rows, n_lanes, whole=whole)
    waiting = [[n, 0] for n in lengths if not whole or n <= n_rows]
    n_left = sum(n for n, _ in waiting)
    while waiting:
        portions = plan_portions([(n, done) for n, done in waiting], shape, n_most)
        assert sum(p.n for p in portions) <= n_rows
        assert len(portions) <= n_lanes
        assert [p.place for p in portions] == list(range(len(portions)))
        for p in portions:
            assert p.start == waiting[p.place][1]
            assert p.n > 0
            waiting[p.place][1] += p.n
            n_left -= p.n
        waiting = [w for w in waiting if w[1] < w[0]]
    assert n_left == 0
