"""Sessions at the level of slots and cells: whose turn goes on where, and who makes room."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import trio

from erllama.backend import BackendFacts, Layout
from erllama.engine.admission import Lanes
from erllama.engine.memory_ops import Cut
from erllama.engine.pace import Pace
from erllama.engine.purpose import Purpose
from erllama.engine.resident import Resident
from erllama.engine.sequence import Sequence
from erllama.engine.sessions import goes_on, history_of
from erllama.engine.stream import EventBuffer
from erllama.errors import NoSession, TranscriptMismatch
from erllama.options import GenerationOptions
from erllama.types import Request, TokenId

_ids = itertools.count(1)


def seq(prompt: list[int], session_id: object = None, purpose: Purpose = Purpose.ANSWER) -> Sequence:
    """A request of that session."""
    return Sequence(
        request=Request(next(_ids), "m"),
        prompt=prompt,
        options=GenerationOptions(session_id=session_id),
        sampler=None,
        seed=0,
        n_ctx=1000,
        buffer=EventBuffer(64, lambda: None),
        now=0.0,
        purpose=purpose,
    )


def lanes(n_slots: int = 2, n_cells: int = 1000) -> Lanes:
    """Empty lanes of a memory whose ranges can be shared."""
    return Lanes(
        BackendFacts(n_ctx=1000, n_cells=n_cells, n_batch=512, n_slots=n_slots, n_vocab=9, layout=Layout())
    )


def admit(lane: Lanes, request: Sequence) -> Sequence | None:
    """Queue, then admit one."""
    lane.waiting.append(request)
    return lane.admit_next(0.0)


def leave(lane: Lanes, request: Sequence, now: float) -> Resident:
    """It has computed all but its last token and ends; what it leaves."""
    request.restored(now)
    request.computed(request.n_tokens - 1, now)
    resident = Resident.of(request, now, pinned=request.pins)
    lane.release(request.finish("stop", now), resident)
    return resident


def hold(lane: Lanes, prompt: list[int], session_id: object, now: float) -> Resident:
    """A turn of a session that is over."""
    request = admit(lane, seq(prompt, session_id))
    assert request is not None
    return leave(lane, request, now)


A, B, C = [1] * 20, [2] * 20, [3] * 20


def test_a_turn_takes_its_slot_over_and_nothing_else_changes():
    """S1: the slot, its generation (what is being saved from it stays valid) and its cells."""
    lane = lanes()
    hold(lane, A, "a", 1.0)
    lane.take_ops()
    lane.reading[0] = 1
    generation = lane.generation[0]
    request = admit(lane, seq([*A, 4], "a"))
    assert (request.slot, request.n_kv, request.n_cached) == (0, 19, 19)
    assert lane.take_ops() == [Cut(0, 19)]
    assert lane.generation[0] == generation
    assert lane.residents == {}
    assert request.hit_kind == "sticky"


def test_what_would_be_cut_off_is_saved_first():
    """A turn that parts from what is still being exported waits for that."""
    lane = lanes()
    hold(lane, A, "a", 1.0)
    lane.reading[0] = 1
    request = seq(A[:5], "a")
    assert admit(lane, request) is None
    lane.reading[0] = 0
    assert lane.admit_next(0.0) is request
    assert (request.slot, request.n_kv) == (0, 4)


def test_one_resident_per_session():
    """The newer one is the session's; the older is nobody's."""
    lane = lanes()
    first, second = admit(lane, seq(A, "a")), admit(lane, seq(B, "a"))
    old, new = leave(lane, first, 1.0), leave(lane, second, 2.0)
    assert (old.session_id, new.session_id) == (None, "a")
    assert lane.pin((b"", "a")) is new
    assert (lane.n_pinned, lane.n_pinned_idle) == (1, 1)


def test_a_stranger_takes_the_session_unused_for_longest():
    """S5: strictly in order of use, even where the stranger could share more with the older one."""
    lane = lanes()
    hold(lane, A, "a", 1.0)
    hold(lane, B, "b", 2.0)
    request = admit(lane, seq([*A[:10], 7]))
    assert request.slot == 0
    assert request.n_kv == 10
    assert [r.session_id for r in lane.residents.values()] == ["b"]


def test_nobodys_residents_go_before_sessions():
    """S5: the ordinary resident's slot is taken although it was used later."""
    lane = lanes()
    hold(lane, A, "a", 1.0)
    hold(lane, B, None, 2.0)
    assert admit(lane, seq(C)).slot == 1
    assert lane.pin((b"", "a")) is not None


def test_cells_are_taken_from_sessions_last():
    """S5: reclaim drops nobody's, then idle sessions', then those whose turn waits."""
    lane = lanes(4, 100)
    hold(lane, A, "a", 1.0)
    hold(lane, B, "b", 2.0)
    hold(lane, C, None, 3.0)
    lane.waiting.append(seq([*A, 4], "a"))
    gone = []
    for n_free in (60, 80, 100):
        before = set(lane.residents)
        lane.reclaim(n_free)
        gone.append(before - set(lane.residents))
    assert gone == [{2}, {1}, {0}]
    assert lane.admit_next(0.0).n_kv == 0  # its turn is computed again


def test_a_waiting_turn_passes_who_would_have_to_rob_it():
    """S5: the head of the queue finds only slots of sessions whose turns wait: one of these goes first."""
    lane = lanes(1)
    hold(lane, A, "a", 1.0)
    stranger, turn = seq(C), seq([*A, 4], "a")
    lane.waiting.extend([stranger, turn])
    assert lane.admit_next(0.0) is turn
    assert lane.admit_next(0.0) is None
    leave(lane, turn, 2.0)
    assert lane.admit_next(0.0) is stranger


def test_a_waiting_turn_that_diverges_leaves_its_slot_to_the_head():
    """S2, S5: nothing of the pin is of use to it, so whoever came first gets the slot."""
    lane = lanes(1)
    hold(lane, A, "a", 1.0)
    stranger, turn = seq(C), seq(B, "a")
    lane.waiting.extend([stranger, turn])
    assert lane.admit_next(0.0) is stranger


@pytest.mark.parametrize(
    ("prompt", "continues"),
    [
        ([*A, 4, 5], True),  # the whole history
        ([*A[:19], 4, 5], True),  # all but the last prompt token, which is computed in any case
        (A, True),  # the same again
        (A[:5], True),  # a beginning of it
        ([*A[:18], 4, 5], False),  # another prompt
        (B, False),
        ([2, 1], False),
    ],
    ids=str,
)
def test_what_goes_on(prompt: list[int], continues: bool):
    """S1, S2: parting inside the last prompt is another conversation, parting behind it is not."""
    lane = lanes()
    first = admit(lane, seq(A, "a"))
    first.restored(0.0)
    first.computed(19, 0.0)
    first.ledger += [8, 8, 8]
    first.computed(22, 0.0)
    pin = Resident.of(first, 1.0, pinned=True)
    request = seq(prompt, "a")
    assert goes_on(pin, request, lane.sharing.n_shared(request, pin)) is continues


def test_the_history_is_what_is_in_memory_and_what_is_pending():
    """D7: a session's ledger is one token ahead of its KV."""
    lane = lanes()
    pin = hold(lane, [1, 2, 3], "a", 1.0)
    assert (pin.n_kv, pin.pending.tolist()) == (2, [3])
    assert history_of(pin, "a", None) == history_of(pin, "a", [1, 2, 3]) == [1, 2, 3]
    with pytest.raises(TranscriptMismatch, match="part at 1"):
        history_of(pin, "a", [1, 9, 3])
    with pytest.raises(NoSession):
        history_of(None, "a", [])


def test_a_continuation_goes_on_whoever_has_more():
    """S8: it takes its session's cells although another sequence holds a longer beginning."""
    lane = lanes(3)
    hold(lane, [*A, *B], None, 1.0)
    hold(lane, [*A, 2], "a", 2.0)
    request = admit(lane, seq([*A, *B, 5], "a", Purpose.CONTINUE))
    assert (request.n_kv, request.hit_kind, request.continues) == (20, "continuation", True)


async def test_a_parked_turn_holds_nothing():
    """Its place goes to who waits, so the slot is nobody's, and its session is busy all the same."""
    lane = lanes(1)
    request = admit(lane, seq(A, "a"))
    request.restored(0.0)
    request.computed(19, 0.0)
    while request.buffer.has_room:
        request.buffer.put_nowait(TokenId(1, request.request))
    lane.waiting.append(seq(B))
    assert lane.park_lagging(trio.current_time() + 10_000, Pace()) is request
    assert (lane.n_pinned, lane.pin((b"", "a"))) == (0, None)
    assert lane.admit_next(10_000.0).ledger == B


def test_forgetting_a_session():
    """S4, S12: with or without its cells; nothing for one that is not held."""
    lane = lanes()
    hold(lane, A, "a", 1.0)
    assert lane.forget_session((b"", "a"), keep_cells=True)
    assert not lane.forget_session((b"", "a"), keep_cells=True)
    assert not lane.forget_session(None, keep_cells=False)
    assert np.array_equal(lane.residents[0].ledger, A[:19])
    hold(lane, B, "b", 2.0)
    lane.take_ops()
    assert lane.forget_session((b"", "b"), keep_cells=False)
    assert lane.n_live(B) == 0
    assert lane.take_ops() == []  # a step may be running
    lane.drop_unwanted()
    assert lane.take_ops() == [Cut(1, 0)]


def test_where_nothing_is_shared_only_what_no_session_holds_is_gone_on_from():
    """Its own slot is given then, although another one is empty; a session's stays for its next turn."""
    lane = lanes(n_slots=3)
    lane.sharing.is_off = True
    plain = hold(lane, A, None, 1.0)
    again = admit(lane, seq([*A, 4]))
    assert (again.slot, again.n_kv) == (plain.slot, 19)
    pinned = hold(lane, B, "chat", 2.0)
    other = admit(lane, seq([*B, 4]))
    assert (other.slot != pinned.slot, other.n_kv) == (True, 0)
    assert lane.pin((b"", "chat")) is pinned
