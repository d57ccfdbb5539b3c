"""Residents and live sharing in `Lanes`: who gets whose cells, who waits for whom, who goes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from erllama.backend import BackendFacts, Layout
from erllama.engine.admission import ASLEEP_S, Lanes
from erllama.engine.memory_ops import Cut, Share
from erllama.engine.pace import Pace
from erllama.engine.resident import Resident
from erllama.engine.state import Phase
from erllama.types import TokenId

from .warm_scenes import seq_of

if TYPE_CHECKING:
    from erllama.engine.sequence import Sequence

HEAD = list(range(1, 41))


def lanes(n_slots: int = 3, n_cells: int = 500, save=lambda _: None) -> Lanes:
    """Empty lanes over dense memory."""
    facts = BackendFacts(
        n_ctx=1000, n_cells=n_cells, n_batch=512, n_slots=n_slots, n_vocab=99, layout=Layout()
    )
    return Lanes(facts, save)


def admit(lane: Lanes, *seqs: Sequence, restored: bool = True) -> None:
    """Queue and admit all of them; what they share is theirs."""
    for seq in seqs:
        lane.waiting.append(seq)
        assert lane.admit_next(0.0) is seq
        if restored:
            seq.restored(0.0)


def finish(lane: Lanes, seq: Sequence, now: float) -> Resident:
    """End a sequence; it leaves what it has."""
    resident = Resident.of(seq, now)
    lane.release(seq.finish("stop", now), resident)
    return resident


def test_a_resident_is_taken_over_in_its_own_slot_if_there_is_no_other() -> None:
    """One slot: the next turn cuts what differs and goes on."""
    lane = lanes(1)
    first, turn = seq_of(HEAD), seq_of([*HEAD[:30], 50, 51])
    admit(lane, first)
    first.computed(39, 0.0)
    finish(lane, first, 1.0)
    assert lane.take_ops() == [Cut(0, 39)]
    generation = lane.generation[0]
    admit(lane, turn)
    assert (turn.slot, turn.n_kv, turn.n_cached, turn.source) == (0, 30, 30, "live")
    assert lane.take_ops() == [Cut(0, 30)]
    assert lane.residents == {}
    assert lane.generation[0] != generation  # saves of what was cut are void
    assert lane.n_free_cells == 500 - 30


def test_a_resident_with_room_beside_it_is_shared_and_stays() -> None:
    """Cells are counted once; the last known token of a prompt is never shared."""
    lane = lanes(2)
    first, same = seq_of(HEAD), seq_of(HEAD)
    admit(lane, first)
    first.computed(40, 0.0)
    finish(lane, first, 1.0)
    admit(lane, same)
    assert (same.slot, same.n_kv, same.phase) == (1, 39, Phase.DECODE)
    assert lane.take_ops() == [Cut(0, 40), Share(0, 1, 0, 39)]
    assert lane.n_free_cells == 500 - 40


def test_the_longest_unused_resident_gives_its_slot_first_and_the_source_last() -> None:
    """What a request is about to share is not dropped to make it a slot, while another can be."""
    lane = lanes(2)
    old, young = seq_of(HEAD), seq_of([60, 61, 62])
    admit(lane, old, young)
    old.computed(40, 0.0)
    young.computed(3, 0.0)
    finish(lane, old, 1.0)
    finish(lane, young, 2.0)
    again = seq_of([*HEAD, 41])
    admit(lane, again)
    assert (again.slot, again.n_kv) == (1, 40)
    assert list(lane.residents) == [0]


def test_a_slot_that_is_being_saved_is_not_given_away() -> None:
    """The head of the queue waits for the save, then it gets the slot."""
    lane = lanes(1)
    first, second = seq_of(HEAD), seq_of([60, 61])
    admit(lane, first)
    first.computed(40, 0.0)
    finish(lane, first, 1.0)
    lane.reading[0] += 1
    lane.waiting.append(second)
    assert lane.is_saving
    assert lane.admit_next(0.0) is None
    assert not lane.drop_resident()
    lane.reading[0] -= 1
    assert not lane.is_saving
    assert lane.admit_next(0.0) is second


def test_reclaim_drops_the_longest_unused_and_no_more_than_needed() -> None:
    """Residents go one by one; the one being saved stays, unless told otherwise."""
    lane = lanes(3, n_cells=200)
    seqs = [seq_of([i] * 30) for i in (1, 2, 3)]
    admit(lane, *seqs)
    for age, seq in enumerate(seqs):
        seq.computed(29, 0.0)
        finish(lane, seq, float(age))
    lane.reading[0] += 1
    lane.reclaim(140)
    assert sorted(lane.residents) == [0, 2]
    lane.reclaim(200)
    assert sorted(lane.residents) == [0]
    assert lane.drop_resident(unsaved=True)
    assert lane.n_free_cells == 200


def test_cells_about_to_be_filled_are_not_free() -> None:
    """A call in flight counts until its outcome is known."""
    lane = lanes(n_cells=100)
    with lane.reserving(30), lane.reserving(5):
        assert lane.n_free_cells == 65
    with pytest.raises(ZeroDivisionError), lane.reserving(30):
        _ = 1 // 0
    assert lane.n_free_cells == 100


def test_followers_take_what_the_leader_has_as_it_comes() -> None:
    """The oldest computes; the others wait and share, and go on by themselves where they differ."""
    lane = lanes()
    leader, twin, cousin = seq_of(HEAD), seq_of(HEAD), seq_of([*HEAD[:20], 70, 71])
    admit(lane, leader, twin, cousin)
    assert lane.sharing.share_running(0.0) == {twin, cousin}
    leader.computed(16, 0.0)
    assert lane.sharing.share_running(0.0) == {twin, cousin}
    assert lane.take_ops() == [Share(0, 1, 0, 16), Share(0, 2, 0, 16)]
    leader.computed(32, 0.0)
    assert lane.sharing.share_running(0.0) == {twin}
    assert (twin.n_kv, cousin.n_kv) == (32, 20)
    leader.computed(39, 0.0)
    assert lane.sharing.share_running(0.0) == set()
    assert (twin.phase, twin.n_cached, twin.source) == (Phase.DECODE, 39, "live")
    assert lane.n_free_cells == 500 - 39


def test_when_the_leader_leaves_the_next_goes_on_from_its_last_token() -> None:
    """What it computed in its last step is not lost to those who waited."""
    lane = lanes()
    leader, second, third = seq_of(HEAD), seq_of(HEAD), seq_of(HEAD)
    admit(lane, leader, second, third)
    lane.sharing.share_running(0.0)
    leader.computed(24, 0.0)
    finish(lane, leader, 1.0)
    assert lane.sharing.share_running(0.0) == {third}
    assert (second.n_kv, third.n_kv) == (24, 24)


async def test_nobody_waits_for_a_leader_whose_reader_lags() -> None:
    """It may come back never."""
    lane = lanes()
    leader, follower = seq_of(HEAD, capacity=4), seq_of(HEAD)
    admit(lane, leader, follower)
    assert lane.sharing.share_running(0.0) == {follower}
    leader.buffer.put_nowait(TokenId(1, leader.request))
    assert lane.sharing.share_running(0.0) == set()


def test_nobody_waits_for_a_leader_who_is_behind() -> None:
    """An older one that lost its memory does not hold up who has more."""
    lane = lanes()
    leader, follower = seq_of(HEAD), seq_of(HEAD)
    admit(lane, leader, follower)
    leader.computed(24, 0.0)
    lane.sharing.share_running(0.0)
    leader.rewind(0)
    assert lane.sharing.share_running(0.0) == set()
    assert follower.n_kv == 24


def test_a_leader_that_restores_is_waited_for() -> None:
    """One restore for all: the others take blocks as they arrive."""
    lane = lanes()
    leader, follower = seq_of(HEAD), seq_of(HEAD)
    admit(lane, leader, restored=False)
    admit(lane, follower)
    assert lane.sharing.share_running(0.0) == {follower}
    leader.restored_to(16, "ram")
    assert lane.sharing.share_running(0.0) == {follower}
    assert follower.n_kv == 16


@pytest.mark.parametrize("cache", ["off", "read"])
def test_only_what_may_be_kept_is_left_behind(cache: str) -> None:
    """X26: preempted or parked, a request that keeps nothing leaves no resident."""
    lane = lanes()
    old, young = seq_of(HEAD), seq_of([50, 51, 52], cache=cache)
    admit(lane, old, young)
    young.computed(2, 0.0)
    assert lane.preempt_youngest(1.0) is young
    assert lane.residents == {}


def test_nothing_is_shared_with_or_by_a_request_that_wants_no_cache() -> None:
    """X26: neither from residents, nor from who runs, nor to anybody."""
    lane = lanes()
    private, other = seq_of(HEAD, cache="off"), seq_of(HEAD)
    admit(lane, private)
    private.computed(20, 0.0)
    admit(lane, other)
    assert (other.n_kv, lane.sharing.share_running(0.0)) == (0, set())
    other.computed(39, 0.0)
    finish(lane, other, 1.0)
    late = seq_of(HEAD, cache="off")
    admit(lane, late)
    assert late.n_kv == 0


def test_the_preempted_one_is_saved_and_stays_until_its_cells_are_needed() -> None:
    """X10: it comes back to its own cells if nobody needed them."""
    saved: list[Sequence] = []
    lane = lanes(save=saved.append)
    old, young = seq_of([60, 61]), seq_of(HEAD)
    admit(lane, old, young)
    young.computed(39, 0.0)
    assert lane.preempt_youngest(1.0) is young
    assert saved == [young]
    assert list(lane.residents) == [1]
    finish(lane, old, 2.0)
    assert lane.admit_next(3.0) is young
    assert young.n_kv == 39


async def test_a_reader_that_lags_is_parked_with_what_it_has() -> None:
    """Its place goes to who waits; its cells stay as long as nobody needs them."""
    saved: list[Sequence] = []
    lane = lanes(1, save=saved.append)
    slow, next_ = seq_of(HEAD, capacity=4), seq_of([60, 61])
    admit(lane, slow)
    slow.computed(39, 0.0)
    slow.buffer.put_nowait(TokenId(1, slow.request))
    lane.waiting.append(next_)
    now, pace = trio.current_time(), Pace()
    assert lane.park_lagging(now + ASLEEP_S - 1, pace) is None
    assert lane.park_lagging(now + ASLEEP_S, pace) is slow
    assert (saved, lane.parked, list(lane.residents)) == ([slow], [slow], [0])
    assert lane.admit_next(3.0) is next_


def test_unproven_kv_stays_unproven_in_other_hands() -> None:
    """Restored nodes that no step has gone on from are remembered by residents and sharers."""
    lane = lanes()
    first = seq_of(HEAD)
    admit(lane, first, restored=False)
    follower = seq_of(HEAD)
    admit(lane, follower)
    first.restored_to(16, "ram")
    first.unproven.add(b"node")
    lane.sharing.share_running(0.0)
    first.restored(0.0)
    assert follower.unproven == {b"node"}
    finish(lane, first, 1.0)
    heir = seq_of(HEAD)
    admit(lane, heir)
    assert heir.unproven == {b"node"}
    heir.computed(20, 0.0)
    assert heir.unproven == set()
    assert follower.unproven == {b"node"}
