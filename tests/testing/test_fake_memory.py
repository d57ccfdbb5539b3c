"""Memory of every kind: what is restored goes on as if it had never left, and what is not right shows."""

from __future__ import annotations

import random
import struct

import pytest

from erllama.backend import Layout, MemoryKind, PartKind, Row, Step, StepStatus
from erllama.errors import InvalidOption
from erllama.testing import FakeBackend

from .test_fake import PARAMS

N_BLOCK = 16
KINDS = [MemoryKind.DENSE, MemoryKind.WINDOW, MemoryKind.HYBRID, MemoryKind.RECURRENT]
PARTS = {
    MemoryKind.DENSE: [PartKind.BASE],
    MemoryKind.WINDOW: [PartKind.BASE, PartKind.WINDOW],
    MemoryKind.HYBRID: [PartKind.BASE, PartKind.STATE],
    MemoryKind.RECURRENT: [PartKind.STATE],
}
every_kind = pytest.mark.parametrize("kind", KINDS)
Block = tuple[int, int]
Parts = dict[tuple[PartKind, Block], bytes]


def opened(kind: MemoryKind, **settings: object) -> FakeBackend:
    """A fake with four slots; windows are a block and a half long."""
    if kind is MemoryKind.WINDOW:
        settings.setdefault("window", 24)
    backend = FakeBackend(n_slots=4, memory_kind=kind, **settings)
    backend.open()
    return backend


def feed(backend: FakeBackend, slot: int, tokens: list[int]) -> None:
    """Compute tokens behind what the slot holds."""
    row = Row(slot, backend.n_kv(slot), tokens)
    assert backend.step(Step((row,))).status is StepStatus.OK


def draw(backend: FakeBackend, slot: int, pending: int = 7, n: int = 6) -> list[int]:
    """What is generated next."""
    sampler, drawn = backend.new_sampler(PARAMS), [pending]
    for _ in range(n):
        result = backend.step(Step((Row(slot, backend.n_kv(slot), drawn[-1:], sampler),)))
        drawn.append(result.sampled[0].token)
    return drawn[1:]


def exported(backend: FakeBackend, slot: int, block: Block, part: PartKind) -> bytes:
    """A part's bytes; checks that its size was foretold."""
    into = memoryview(bytearray(backend.export_bytes(slot, *block, part)))
    assert backend.export(slot, *block, into, part) == len(into)
    return bytes(into)


def filled(backend: FakeBackend, slot: int, tokens: list[int]) -> Parts:
    """Compute tokens block by block and export each block's parts while they are fresh."""
    parts: Parts = {}
    for start in range(0, len(tokens), N_BLOCK):
        feed(backend, slot, tokens[start : start + N_BLOCK])
        block = start, min(start + N_BLOCK, len(tokens))
        for part in PARTS[backend.memory_kind]:
            parts[part, block] = exported(backend, slot, block, part)
            assert parts[part, block], f"{part} of {block} is empty"
    return parts


def restored(backend: FakeBackend, slot: int, parts: Parts, end: int) -> None:
    """Bring back what is needed to go on at `end`, each kind by itself."""
    for kind in PartKind:
        mine = sorted(block for part, block in parts if part is kind and block[1] <= end)
        if kind is PartKind.WINDOW:
            mine = [block for block in mine if block[1] > end - backend.window]
        for block in mine[-1:] if kind is PartKind.STATE else mine:
            assert backend.import_(slot, block, block, memoryview(parts[kind, block]), kind)


def tokens(n: int) -> list[int]:
    """A history that repeats nothing for long."""
    return random.Random(n).choices(range(256), k=n)


def test_layouts():
    """Each kind says what its stored blocks consist of; separate streams keep nothing."""
    found = {kind: opened(kind).open().layout for kind in MemoryKind}
    assert found == {
        MemoryKind.DENSE: Layout(),
        MemoryKind.WINDOW: Layout(window=24),
        MemoryKind.RECURRENT: Layout(base=False, state=True),
        MemoryKind.HYBRID: Layout(state=True),
        MemoryKind.WHOLE: None,
        MemoryKind.NONE: None,
    }
    assert all(opened(kind, streams_separate=True).open().layout is None for kind in MemoryKind)
    assert FakeBackend(memory_kind=MemoryKind.WINDOW).open().layout == Layout(window=64)
    assert len({opened(kind).open().shape_hash for kind in MemoryKind}) == len(MemoryKind)


@pytest.mark.parametrize(("kind", "window"), [(MemoryKind.DENSE, 8), (MemoryKind.WINDOW, -1)])
def test_a_window_where_there_is_none_is_refused(kind: MemoryKind, window: int):
    """The option is never accepted and ignored."""
    with pytest.raises(InvalidOption, match="window"):
        FakeBackend(memory_kind=kind, window=window)


@every_kind
def test_every_kind_says_the_same(kind: MemoryKind):
    """What is right in memory decides, not how it is kept."""
    answers = []
    for each in (kind, MemoryKind.DENSE):
        backend = opened(each)
        feed(backend, 0, tokens(100))
        answers.append(draw(backend, 0, n=40))
    assert answers[0] == answers[1]


@every_kind
@pytest.mark.parametrize("end", [16, 32, 80, 90])
def test_what_is_restored_goes_on_as_if_it_had_never_left(kind: MemoryKind, end: int):
    """From any block's end, in another slot of another context: the same tokens."""
    first = opened(kind)
    parts = filled(first, 0, tokens(90)[:end])
    second = opened(kind)
    restored(second, 3, parts, end)
    assert second.is_at(3, end)
    assert not second.is_at(3, end - 1)
    again = {key: exported(second, 3, key[1], key[0]) for key in parts if key[1][1] == end}
    assert again == {key: parts[key] for key in again}, "export, import, export is equal"
    assert draw(second, 3, n=50) == draw(first, 0, n=50)


@every_kind
def test_a_resume_in_the_middle_of_a_history(kind: MemoryKind):
    """Parts saved while the history grew serve a shorter one too."""
    first = opened(kind)
    parts = filled(first, 0, tokens(96))
    second, cold = opened(kind), opened(kind)
    restored(second, 0, parts, 48)
    feed(cold, 0, tokens(96)[:48])
    assert draw(second, 0) == draw(cold, 0)


@pytest.mark.parametrize(
    ("kind", "left_out"), [(kind, part) for kind in KINDS for part in PARTS[kind] if len(PARTS[kind]) > 1]
)
def test_a_step_on_what_is_not_all_there_is_an_assertion(kind: MemoryKind, left_out: PartKind):
    """A part that was forgotten does not pass silently."""
    parts = filled(opened(kind), 0, tokens(64))
    second = opened(kind)
    for (part, block), data in sorted(parts.items()):
        if part is not left_out and (part is not PartKind.STATE or block[1] == 64):
            second.import_(0, block, block, memoryview(data), part)
    assert not second.is_at(0, 64)
    with pytest.raises(AssertionError, match=r"slot 0 (holds|lacks|has)"):
        second.step(Step((Row(0, 64, [1]),)))


def test_a_recurrent_slot_must_have_the_state_of_its_row():
    """The state says how far it is."""
    backend = opened(MemoryKind.RECURRENT)
    feed(backend, 0, tokens(5))
    with pytest.raises(AssertionError, match="holds 5 tokens, the row starts at 4"):
        backend.step(Step((Row(0, 4, [1]),)))


@every_kind
def test_other_bytes_give_another_answer(kind: MemoryKind):
    """Any token of any part that is not the one that was saved changes what is said."""
    parts = filled(opened(kind), 0, tokens(64))
    right = opened(kind)
    restored(right, 0, parts, 64)
    expected = draw(right, 0)
    needed = [key for key in parts if key[0] is not PartKind.STATE or key[1][1] == 64]
    for key in needed:
        if key[0] is PartKind.WINDOW and key[1][1] <= 64 - right.window:
            continue
        damaged = bytearray(parts[key])
        damaged[-4] ^= 1
        second = opened(kind)
        restored(second, 0, {**parts, key: bytes(damaged)}, 64)
        assert draw(second, 0) != expected, key


# --- imports that are refused ---


@every_kind
def test_a_wrong_import_changes_nothing(kind: MemoryKind):
    """Other positions, other lengths, other places: refused, and the slot goes on as before."""
    parts = filled(opened(kind), 0, tokens(64))
    untouched, backend = opened(kind), opened(kind)
    for each in (untouched, backend):
        restored(each, 0, parts, 32)
    for part in PARTS[kind]:
        data, earlier = (memoryview(parts[part, block]) for block in ((32, 48), (0, 16)))
        wrong = [
            ((32, 48), (32, 48), data[:-1]),
            ((32, 48), (32, 48), data[:-8]),
            ((32, 48), (32, 48), data[:0]),
            ((32, 48), (32, 48), earlier),
            ((32, 48), (31, 48), data),
            ((32, 48), (32, 49), data),
            ((48, 64), (48, 64), data),
            ((0, 16), (0, 16), earlier),
            ((32, 48), (32, 48), memoryview(b"\xff" * len(data))),
        ]
        for block, wanted, bytes_ in wrong:
            assert not backend.import_(0, block, wanted, bytes_, part), (part, block, wanted)
        assert not backend.import_(0, (32, 48), (32, 48), data, PartKind.WHOLE)
    assert backend.is_at(0, 32)
    assert draw(backend, 0) == draw(untouched, 0)


@every_kind
def test_parts_that_a_kind_does_not_have(kind: MemoryKind):
    """They are of no size and cannot be imported; an empty base only holds the path."""
    backend = opened(kind)
    feed(backend, 0, tokens(16))
    for part in set(PartKind) - set(PARTS[kind]):
        assert exported(backend, 0, (0, 16), part) == b""
        assert not backend.import_(1, (0, 16), (0, 16), memoryview(b"x" * 24), part)
    assert backend.import_(1, (0, 16), (0, 16), memoryview(b"")) is (kind is MemoryKind.RECURRENT)
    assert backend.is_at(1, 0)


def test_a_range_that_is_not_held_exports_nothing():
    """Never less than was asked for."""
    backend = opened(MemoryKind.DENSE)
    feed(backend, 0, tokens(16))
    assert backend.export_bytes(0, 0, 17) == 0
    assert backend.export_bytes(2, 0, 1) == 0
    assert backend.export_bytes(0, 3, 16) == 13 * 8


# --- windows ---


def test_a_window_is_forgotten_when_a_step_has_been_computed():
    """A part is whole until a token is computed that looks back less far."""
    backend = opened(MemoryKind.WINDOW, window=8)
    feed(backend, 0, tokens(32)[:30])
    assert sorted(backend.slots[0].recent) == list(range(23, 30))
    assert backend.export_bytes(0, 16, 30, PartKind.WINDOW) == 7 * 8
    assert backend.export_bytes(0, 26, 29, PartKind.WINDOW) == 3 * 8  # 22 to 25 are another block's
    assert backend.export_bytes(0, 16, 29, PartKind.WINDOW) == 0
    assert backend.export_bytes(0, 16, 30) == 14 * 8
    feed(backend, 0, [1])
    assert backend.export_bytes(0, 16, 30, PartKind.WINDOW) == 0


@pytest.mark.parametrize("n_kv", [1, 7, 8, 9, 30])
def test_a_window_is_cut_where_the_layout_says(n_kv: int):
    """Exactly while nothing is gone yet; what is refused stays as it was."""
    for n in range(n_kv + 2):
        backend = opened(MemoryKind.WINDOW, window=8)
        feed(backend, 0, tokens(n_kv))
        layout = backend.open().layout
        assert backend.cut(0, n) is (n <= n_kv and layout.cut(n_kv, n) == n)
        held = n if n <= n_kv and layout.cut(n_kv, n) == n else n_kv
        assert backend.is_at(0, held)
        expected = opened(MemoryKind.DENSE)
        if held:
            feed(expected, 0, tokens(n_kv)[:held])
        assert draw(backend, 0) == draw(expected, 0)


def test_a_window_that_is_only_partly_wanted():
    """What lies behind the wanted end is not taken, so going on there needs what is gone."""
    backend = opened(MemoryKind.WINDOW, window=8)
    parts = filled(backend, 0, tokens(16))
    second = opened(MemoryKind.WINDOW, window=8)
    assert second.import_(0, (0, 16), (0, 12), memoryview(parts[PartKind.BASE, (0, 16)]))
    assert second.import_(0, (0, 16), (0, 12), memoryview(parts[PartKind.WINDOW, (0, 16)]), PartKind.WINDOW)
    assert sorted(second.slots[0].recent) == [9, 10, 11]
    assert not second.is_at(0, 12)


# --- states ---


@pytest.mark.parametrize("kind", [MemoryKind.HYBRID, MemoryKind.RECURRENT])
def test_a_state_is_taken_only_at_the_end(kind: MemoryKind):
    """One token later it is another state; it cannot be cut either."""
    backend = opened(kind)
    feed(backend, 0, tokens(16))
    assert backend.export_bytes(0, 0, 16, PartKind.STATE) == 24
    assert struct.unpack("<q", exported(backend, 0, (8, 16), PartKind.STATE)[:8]) == (16,)
    assert backend.export_bytes(0, 0, 15, PartKind.STATE) == 0
    feed(backend, 0, [1])
    assert backend.export_bytes(0, 0, 16, PartKind.STATE) == 0
    assert not backend.cut(0, 16)
    assert backend.cut(0, 17)
    assert backend.is_at(0, 17)


def test_a_base_makes_a_hybrid_state_stale():
    """Until a state comes the slot cannot go on, be cut or hand out a state."""
    first = opened(MemoryKind.HYBRID)
    parts = filled(first, 0, tokens(32))
    second = opened(MemoryKind.HYBRID)
    feed(second, 0, tokens(32)[:16])
    assert second.import_(0, (16, 32), (16, 32), memoryview(parts[PartKind.BASE, (16, 32)]))
    assert not second.is_at(0, 32)
    assert not second.cut(0, 32)
    assert second.export_bytes(0, 16, 32, PartKind.STATE) == 0
    data = memoryview(parts[PartKind.STATE, (16, 32)])
    assert second.import_(0, (16, 32), (16, 32), data, PartKind.STATE)
    assert draw(second, 0) == draw(first, 0)


# --- sharing ---


@every_kind
def test_a_whole_sequence_is_shared_and_both_go_on(kind: MemoryKind):
    """No cell is used twice, and neither disturbs the other."""
    backend = opened(kind)
    feed(backend, 0, tokens(40))
    n_used = backend._n_used()
    backend.share(0, 2, 0, 40)
    assert backend._n_used() == n_used
    assert backend.is_at(2, 40)
    assert draw(backend, 2) == draw(backend, 0)


@pytest.mark.parametrize("kind", [MemoryKind.WINDOW, MemoryKind.HYBRID, MemoryKind.RECURRENT])
def test_a_shared_beginning_does_not_go_on(kind: MemoryKind):
    """As in llama.cpp, the state is the current one whatever the range, and old window cells are gone."""
    backend = opened(kind, **({"window": 8} if kind is MemoryKind.WINDOW else {}))
    feed(backend, 0, tokens(40))
    backend.share(0, 1, 0, 20)
    assert not backend.is_at(1, 20)
    with pytest.raises(AssertionError, match=r"slot 1 (holds 40|lacks|has the state after 40)"):
        backend.step(Step((Row(1, 20, [1]),)))


def test_a_beginning_is_shared_while_all_of_its_window_is_there():
    """A short sequence has lost nothing yet."""
    backend, cold = opened(MemoryKind.WINDOW, window=64), opened(MemoryKind.DENSE)
    feed(backend, 0, tokens(40))
    backend.share(0, 1, 0, 20)
    feed(cold, 0, tokens(40)[:20])
    assert backend.is_at(1, 20)
    assert draw(backend, 1) == draw(cold, 0)


@every_kind
def test_what_is_shared_starts_where_the_other_ends(kind: MemoryKind):
    """A gap or an overlap is an assertion."""
    backend = opened(kind)
    feed(backend, 0, tokens(40))
    feed(backend, 1, tokens(40)[:8])
    with pytest.raises(AssertionError, match="it holds 8 tokens, the shared range starts at 9"):
        backend.share(0, 1, 9, 40)


# --- all at once ---


@every_kind
def test_a_script_reads_the_prompt_from_any_memory(kind: MemoryKind):
    """A state that was restored still tells the text that led to it."""
    backend = opened(kind, script=lambda prompt: list(prompt.upper().encode()))
    feed(backend, 0, list(b"ab"))
    feed(backend, 0, list(b"cd"))
    parts = {(part, (0, 4)): exported(backend, 0, (0, 4), part) for part in PARTS[kind]}
    restored(backend, 1, parts, 4)
    assert bytes(draw(backend, 1, pending=ord("e"), n=5)) == b"ABCDE"


@every_kind
def test_rebuilding_and_closing_forget_everything(kind: MemoryKind):
    """No part survives in any slot."""
    backend = opened(kind)
    for forget in (backend.rebuild, backend.close):
        feed(backend, 0, tokens(20))
        forget()
        assert backend.is_at(0, 0)
        assert backend.n_kv(0) == 0
