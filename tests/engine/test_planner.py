"""What goes into the next step, decided without a model: laws by Hypothesis, cases by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from erllama.engine.planner import PIECE, Chunks, Limits, Share, lacks_cells, plan_step


@dataclass
class Lane:
    """All that the planner sees of a sequence."""

    slot: int
    n_kv: int
    n_tokens: int
    arrival: int

    @property
    def decodes(self) -> bool:
        return self.n_kv == self.n_tokens - 1


def limits(n_batch=512, prefill_chunk=128, n_cells=None, prefill_budget=10**9, lone_chunk=None) -> Limits:
    """Limits of a step, for a context with n_batch 512 in which all prompts are cut in the same way."""
    return Limits(
        n_batch=n_batch,
        prefill_chunk=prefill_chunk,
        lone_chunk=lone_chunk or prefill_chunk,
        n_cells=n_cells,
        prefill_budget=prefill_budget,
    )


@st.composite
def lanes(draw: st.DrawFn, most: int = 8) -> list[Lane]:
    """Sequences in mixed order of slots and arrival, about half of them decoding."""
    n = draw(st.integers(1, most))
    slots = draw(st.permutations(range(n)))
    arrivals = draw(st.permutations(range(n)))
    made = []
    for slot, arrival in zip(slots, arrivals, strict=True):
        n_tokens = draw(st.integers(1, 700))
        decodes = draw(st.booleans())
        n_kv = n_tokens - 1 if decodes else draw(st.integers(0, n_tokens - 1))
        made.append(Lane(slot, n_kv, n_tokens, arrival))
    return made


LIMITS = st.builds(
    limits,
    n_batch=st.integers(8, 600),
    prefill_chunk=st.integers(1, 600),
    n_cells=st.none() | st.integers(8, 600),
    prefill_budget=st.integers(PIECE, 2000),
    lone_chunk=st.none() | st.integers(1, 600),
)


@given(lanes(), LIMITS)
def test_a_step_stays_within_its_limits(ready: list[Lane], limit: Limits):
    """Tokens never exceed the batch or the free cells, nor a prompt's piece the chunk size."""
    shares = plan_step(ready, limit)
    total = sum(s.n for s in shares)
    assert total <= limit.n_batch
    assert limit.n_cells is None or total <= limit.n_cells
    is_lone = len(ready) == 1
    assert all(s.sampled or s.n <= (limit.lone_chunk if is_lone else limit.prefill_chunk) for s in shares)


@given(lanes(), LIMITS)
def test_shares_are_true(ready: list[Lane], limit: Limits):
    """Slots ascend without repeats; a share starts where memory ends and is sampled only as a last token."""
    shares = plan_step(ready, limit)
    slots = [s.slot for s in shares]
    assert slots == sorted(set(slots))
    by_slot = {lane.slot: lane for lane in ready}
    for share in shares:
        lane = by_slot[share.slot]
        assert share.start == lane.n_kv
        assert share.n >= 1
        end = share.start + share.n
        assert end == lane.n_tokens if share.sampled else end <= lane.n_tokens - 1


@given(lanes(), LIMITS)
def test_every_decoder_gets_its_row(ready: list[Lane], limit: Limits):
    """As long as batch and cells allow one row each, nobody who decodes is left out."""
    shares = plan_step(ready, limit)
    assert {s.slot for s in shares if s.sampled} == {lane.slot for lane in ready if lane.decodes}


def cut_pieces(ready: list[Lane], shares: list[Share]) -> list[tuple[Share, bool]]:
    """Pieces that do not reach their prompt's end, and whether they end where they should.

    That is at a multiple of 64; beside decoders it may be where the rows of the step are one.
    """
    lane_of = {lane.slot: lane for lane in ready}
    n_rows = n_decode = sum(s.sampled for s in shares)
    cut = []
    for share in sorted((s for s in shares if not s.sampled), key=lambda s: lane_of[s.slot].arrival):
        n_rows, end = n_rows + share.n, share.start + share.n
        if end != lane_of[share.slot].n_tokens - 1:
            cut.append((share, end % PIECE == 0 or (n_decode > 0 and n_rows % PIECE == 0)))
    return cut


@given(lanes(), LIMITS)
def test_pieces_end_at_multiples_of_64(ready: list[Lane], limit: Limits):
    """A piece ends at a multiple of 64, or the step's rows do, unless the limits are below one piece."""
    for share, ends_well in cut_pieces(ready, plan_step(ready, limit)):
        assert ends_well or share.n < PIECE


@given(lanes(), LIMITS)
def test_mixed_steps_hold_no_small_pieces(ready: list[Lane], limit: Limits):
    """Beside others a prompt gets no less than what reaches a multiple of 64, where limits ever allow it."""
    shares = plan_step(ready, limit)
    n_decode = sum(s.sampled for s in shares)
    if len(shares) < 2 or min(limit.n_batch - n_decode, limit.prefill_chunk) < PIECE:
        return
    if not n_decode:
        shares = [s for s in shares if s.slot != min(ready, key=lambda lane: lane.arrival).slot]
    assert all(ends_well for _, ends_well in cut_pieces(ready, shares))


@given(lanes(most=5), LIMITS)
def test_nobody_starves(ready: list[Lane], limit: Limits):
    """Endless decoders beside prompts: every prompt is in memory after a bounded number of steps."""
    if limit.n_cells is not None:
        limit = replace(limit, n_cells=None)
    n_fill = sum(lane.n_tokens - 1 - lane.n_kv for lane in ready)
    for _ in range(n_fill + 1):
        if all(lane.decodes for lane in ready):
            return
        for share in plan_step(ready, limit):
            lane = next(lane for lane in ready if lane.slot == share.slot)
            lane.n_kv += share.n
            lane.n_tokens += share.sampled  # it samples one and goes on
    raise AssertionError(f"still not in memory after {n_fill + 1} steps: {ready}")


def prefill(n_prompt: int, limit: Limits, beside: Lane | None = None) -> list[int]:
    """Piece sizes of one prompt, planned to its end; `beside` decodes in every step."""
    lane = Lane(1, 0, n_prompt, 1)
    pieces = []
    while not lane.decodes:
        shares = plan_step([lane, beside] if beside else [lane], limit)
        if beside:
            assert shares[0] == Share(0, beside.n_kv, 1, True)
            beside.n_kv += 1
            beside.n_tokens += 1
        (n,) = [s.n for s in shares if s.slot == 1]
        pieces.append(n)
        lane.n_kv += n
    return pieces


def test_a_thousand_tokens_go_in_pieces_of_128():
    """G16: n_batch 512, default chunk 128; the last token stays for a row of its own."""
    assert prefill(1000, limits()) == [128] * 7 + [103]


def test_without_a_chunk_limit_the_first_piece_is_the_batch():
    """G16: infinity leaves only n_batch."""
    assert prefill(1000, limits(prefill_chunk=512)) == [512, 487]


def test_a_decoder_yields_in_every_step_of_a_long_prefill():
    """G16: 8,000 tokens beside a decoder that gets a row in each step; the prompt uses what is left."""
    assert prefill(8000, limits(), Lane(0, 9, 10, 0)) == [127] * 62 + [125]
    assert prefill(1000, limits(prefill_chunk=512), Lane(0, 9, 10, 0)) == [511, 488]


def test_a_step_beside_streams_has_whole_tiles_of_rows():
    """Attention reads the whole context for a tile of 64 rows, full or not: with 65 rows, twice."""
    for n_streams in (1, 5, 30, 70):
        ready = [Lane(i, 4, 5, i) for i in range(n_streams)]
        ready += [Lane(100, 0, 3000, 100), Lane(101, 17, 3000, 101)]
        for budget in (PIECE, 128, 1000):
            shares = plan_step(ready, limits(prefill_budget=budget))
            assert sum(s.n for s in shares) % PIECE == 0
            assert sum(s.n for s in shares) > n_streams
    ready = [*(Lane(i, 4, 5, i) for i in range(63)), Lane(100, 0, 3000, 100)]
    assert plan_step(ready, limits(prefill_budget=PIECE))[-1].n == PIECE  # rather than one


def test_where_pieces_must_end_at_blocks_they_do_beside_streams_too():
    """With a `boundary`, many odd pieces before it would leave small ones."""
    limit = replace(limits(prefill_budget=128), boundary=256)
    assert prefill(520, limit, Lane(0, 9, 10, 0)) == [128, 128, 128, 128, 7]


def test_a_batch_below_one_piece_still_lets_a_prompt_in():
    """With n_batch 32 and a decoder at work, a prompt goes in by what is left."""
    assert prefill(100, limits(n_batch=32), Lane(0, 9, 10, 0)) == [31, 31, 31, 6]


def test_a_chunk_below_one_piece_is_obeyed_beside_decoders():
    """prefill_chunk_size 16 gives pieces of 16, not none."""
    assert prefill(40, limits(prefill_chunk=16), Lane(0, 9, 10, 0)) == [16, 16, 7]


def test_an_odd_start_is_brought_to_a_multiple_of_64():
    """After a rewind to 37 the next piece ends at 128, not at 165."""
    assert plan_step([Lane(0, 37, 500, 0)], limits()) == [Share(0, 37, 91, False)]


def test_the_older_prompt_goes_first():
    """Two prompts share a budget of one piece: the older one gets it, whatever its slot."""
    ready = [Lane(0, 0, 300, 2), Lane(1, 0, 300, 1)]
    assert plan_step(ready, limits(n_batch=64, prefill_chunk=64)) == [Share(1, 0, 64, False)]


@pytest.mark.parametrize(("n_waiting", "rows"), [(1, 63), (2, 127), (3, 191), (4, 255), (9, 255)])
def test_each_prompt_that_waits_may_lengthen_the_step(n_waiting, rows):
    """A burst of prompts comes in by larger steps, of four targets at most; a single one by smooth ones."""
    waiting = [Lane(1 + i, 0, 301, 1 + i) for i in range(n_waiting)]
    first, *others = plan_step([Lane(0, 4, 5, 0), *waiting], limits(prefill_budget=PIECE))
    assert first == Share(0, 4, 1, True)
    assert sum(share.n for share in others) == rows
    assert others[0] == Share(1, 0, min(rows, 127), False)


def test_a_burst_of_prompts_never_takes_more_than_the_batch():
    """Twelve prompts beside four streams: the batch is full of whole tiles, and no more."""
    ready = [Lane(i, 4, 5, i) for i in range(4)] + [Lane(4 + i, 0, 301, 4 + i) for i in range(12)]
    shares = plan_step(ready, limits(prefill_budget=1000))
    assert sum(share.n for share in shares) == 512
    assert [share.slot for share in shares] == [0, 1, 2, 3, 4, 5, 6, 7]


def test_the_time_target_binds_only_who_is_not_alone():
    """A lone prompt uses the whole chunk; beside a decoder the step time target limits it."""
    limit = limits(prefill_chunk=math.inf, prefill_budget=PIECE)
    assert plan_step([Lane(1, 0, 301, 1)], limit) == [Share(1, 0, 300, False)]
    beside = [Lane(0, 4, 5, 0), Lane(1, 0, 301, 1)]
    assert plan_step(beside, limit) == [Share(0, 4, 1, True), Share(1, 0, 63, False)]


def test_pieces_are_larger_where_nobody_decodes():
    """By default half a batch where nobody streams, else a quarter of it."""
    default = Chunks.of(None, 512)
    limit = limits(prefill_chunk=default.beside, lone_chunk=default.alone, prefill_budget=PIECE)
    assert prefill(1000, limit) == [256] * 3 + [231]
    assert plan_step([Lane(1, 0, 301, 1), Lane(0, 4, 5, 0)], limit)[1] == Share(1, 0, 63, False)
    together = plan_step([Lane(1, 0, 301, 1), Lane(0, 0, 500, 0)], limit)
    assert together == [Share(0, 0, 128, False), Share(1, 0, 128, False)]


def test_a_short_prompt_is_not_shut_out_by_a_long_one():
    """A larger step where nobody decodes has room for both, so the short one's first token comes at once."""
    default = Chunks.of(None, 512)
    for budget in (128, 192, 256, 1000):
        limit = limits(prefill_chunk=default.beside, lone_chunk=default.alone, prefill_budget=budget)
        shares = plan_step([Lane(0, 0, 8000, 0), Lane(1, 0, 40, 1)], limit)
        assert shares == [Share(0, 0, 128, False), Share(1, 0, 39, False)]


@pytest.mark.parametrize(
    ("configured", "n_batch", "beside", "alone"),
    [
        (None, 512, 128, 256),
        (None, 2048, 512, 1024),
        (None, 700, 128, 320),
        (None, 300, 64, 128),
        (None, 32, 64, 64),
        (16, 512, 16, 16),
        (1000, 512, 1000, 1000),
        (math.inf, 512, 512, 512),
    ],
)
def test_a_chunk_that_is_asked_for_holds_everywhere(configured, n_batch, beside, alone):
    """G16: only what is left to us depends on who else runs."""
    assert Chunks.of(configured, n_batch) == (beside, alone)


def test_the_last_prompt_token_is_a_row_of_its_own():
    """A prompt of one token decodes at once; of two, the first is prefilled and the second sampled."""
    assert plan_step([Lane(0, 0, 1, 0)], limits()) == [Share(0, 0, 1, True)]
    assert plan_step([Lane(0, 0, 2, 0)], limits()) == [Share(0, 0, 1, False)]
    assert plan_step([Lane(0, 1, 2, 0)], limits()) == [Share(0, 1, 1, True)]


def test_nothing_ready_is_an_empty_step():
    """No sequence, no shares."""
    assert plan_step([], limits()) == []


def test_when_cells_are_lacking():
    """One token each must fit; where every sequence has its own cells, that is never the question."""
    two = [Lane(0, 4, 5, 0), Lane(1, 0, 5, 1)]
    assert [lacks_cells(two, n) for n in (None, 2, 1, 0)] == [False, False, True, True]
    assert not lacks_cells([], 0)
