"""Slots and cells: who runs, who waits, who gives way."""

from __future__ import annotations

import itertools

from erllama.backend import BackendFacts
from erllama.engine.admission import DECODE_RESERVE, Lanes
from erllama.engine.memory_ops import Cut
from erllama.engine.sequence import Sequence
from erllama.engine.stream import EventBuffer
from erllama.options import GenerationOptions
from erllama.types import Request, TokenId

_ids = itertools.count(1)


def seq(n_prompt: int = 10, *, max_tokens: int = 64, capacity: int = 64) -> Sequence:
    """A request with a prompt of that many tokens; later ones are younger."""
    return Sequence(
        request=Request(next(_ids), "m"),
        prompt=[1] * n_prompt,
        options=GenerationOptions(max_tokens=max_tokens),
        sampler=None,
        seed=0,
        n_ctx=1000,
        buffer=EventBuffer(capacity, lambda: None),
        now=0.0,
    )


def lanes(n_slots: int = 2, n_cells: int = 1000, *, separate: bool = False) -> Lanes:
    """Empty lanes."""
    return Lanes(
        BackendFacts(
            n_ctx=1000,
            n_cells=n_cells,
            n_batch=512,
            n_slots=n_slots,
            n_vocab=2,
            streams_separate=separate,
        )
    )


def admit_all(lane: Lanes, *seqs: Sequence) -> list[Sequence]:
    """Queue, then admit until the head does not fit."""
    lane.waiting.extend(seqs)
    return list(iter(lambda: lane.admit_next(0.0), None))


def test_the_lowest_free_slot_is_given_first():
    """Slots ascend, and one that is given back is the next to be given out."""
    lane = lanes(3)
    first, second, third = admit_all(lane, seq(), seq(), seq())
    assert [s.slot for s in (first, second, third)] == [0, 1, 2]
    for gone in (second, first):
        lane.release(gone.finish("stop", 1.0))
    assert lane.n_available == 2
    assert [s.slot for s in admit_all(lane, seq(), seq())] == [0, 1]


def test_a_released_slot_is_dropped_before_it_is_used():
    """Memory of the former owner is marked stale, in order of release."""
    lane = lanes(3)
    _, b, c = admit_all(lane, seq(), seq(), seq())
    lane.release(c.finish("stop", 1.0))
    lane.release(b.fail(None))
    lane.release(None)
    assert lane.take_ops() == [Cut(2, 0), Cut(1, 0)]


def test_the_queue_is_strictly_first_come_first_served():
    """A small request behind a large one that does not fit waits with it."""
    lane = lanes(3, 300)
    admit_all(lane, seq(200))
    large, small = seq(150), seq(5)
    assert admit_all(lane, large, small) == []
    assert list(lane.waiting) == [large, small]


def test_the_need_is_prompt_and_a_small_reserve_never_max_tokens():
    """Two requests of 100 with max_tokens 800 share 264 cells, and 263 are too few."""
    need = 2 * (100 + DECODE_RESERVE)
    assert len(admit_all(lanes(2, need), *(seq(100, max_tokens=800) for _ in range(2)))) == 2
    assert len(admit_all(lanes(2, need - 1), *(seq(100, max_tokens=800) for _ in range(2)))) == 1


def test_the_reserve_is_no_more_than_what_may_be_generated():
    """max_tokens 1 reserves one cell."""
    assert len(admit_all(lanes(2, 202), *(seq(100, max_tokens=1) for _ in range(2)))) == 2


def test_alone_anybody_is_admitted():
    """A request that can never fit beside a reserve still gets its try when nothing else runs."""
    assert len(admit_all(lanes(2, 50), seq(100), seq(1))) == 1


def test_separate_streams_are_limited_by_slots_only():
    """Where every sequence has its own cells, cells of others do not matter."""
    lane = lanes(2, 10, separate=True)
    assert len(admit_all(lane, seq(100), seq(100), seq(100))) == 2
    assert lane.n_free_cells is None


def test_free_cells_are_those_nobody_holds():
    """Only what is in memory counts, not what is still to be prefilled."""
    lane = lanes(2, 100)
    a, _ = admit_all(lane, seq(30), seq(5))
    a.computed(20, 0.0)
    assert lane.n_free_cells == 80


def test_the_youngest_gives_way_and_is_next_again():
    """The preempted sequence goes to the head of the queue, its slot is free and stale."""
    lane = lanes(2)
    old, young = admit_all(lane, seq(), seq())
    later = seq()
    lane.waiting.append(later)
    assert lane.preempt_youngest(0.0) is young
    assert list(lane.waiting) == [young, later]
    assert lane.running == {0: old}
    assert lane.take_ops() == [Cut(1, 0)]
    assert not young.has_slot


def test_several_preempted_wait_in_order_of_arrival():
    """Youngest first out, oldest first in."""
    lane = lanes(3)
    a, b, c = admit_all(lane, seq(), seq(), seq())
    assert [lane.preempt_youngest(0.0), lane.preempt_youngest(0.0)] == [c, b]
    assert list(lane.waiting) == [b, c]
    assert lane.running == {0: a}


def test_the_last_one_running_never_gives_way():
    """Somebody always gets on."""
    lane = lanes(2)
    admit_all(lane, seq())
    assert lane.preempt_youngest(0.0) is None


def test_nobody_is_admitted_after_a_preemption_until_a_sequence_ends():
    """Else the one that gave way would come back and be sent away again, for ever."""
    lane = lanes(3)
    old, young = admit_all(lane, seq(), seq())
    lane.preempt_youngest(0.0)
    assert lane.admit_next(0.0) is None
    lane.release(old.finish("stop", 1.0))
    assert lane.admit_next(0.0) is young


async def test_one_whose_reader_is_stalled_gives_way_first():
    """Cells held for nobody's progress are freed before a younger sequence that gets on."""
    lane = lanes(2)
    stalled, young = admit_all(lane, seq(capacity=4), seq(capacity=4))
    stalled.buffer.put_nowait(TokenId(1, stalled.request))
    assert lane.preempt_youngest(0.0) is stalled
    assert list(lane.running.values()) == [young]


def test_withdrawing_takes_out_that_request_only():
    """A cancelled request leaves the queue from any place."""
    lane = lanes(1)
    a, b, c = seq(), seq(), seq()
    lane.waiting.extend([a, b, c])
    lane.withdraw(b)
    assert list(lane.waiting) == [a, c]
    assert repr(lane) == "<Lanes 0/1 running, 2 waiting>"
