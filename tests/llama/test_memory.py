"""The table of LLAMA_CPP.md: what each kind of memory can be cut, copied and asked."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from erllama.errors import InvalidBatch, NotSupported
from erllama.llama import MemoryKind
from erllama.llama.context import Context

from .support import feed, off_by, prompt, save, step

if TYPE_CHECKING:
    from collections.abc import Callable

    from erllama.llama import Model

    from .support import OpenContext

pytestmark = pytest.mark.model

KINDS = {
    "dense": MemoryKind.DENSE,
    "window": MemoryKind.WINDOW,
    "recurrent": MemoryKind.RECURRENT,
    "hybrid": MemoryKind.HYBRID,
}
ALL = sorted(KINDS)


@pytest.fixture(params=ALL)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of tiny model."""
    return str(request.param)


@pytest.mark.parametrize("unified", [True, False])
def test_kinds_are_found(
    tiny: Callable[[str], Model], open_context: OpenContext, kind: str, unified: bool
) -> None:
    """The decision table names each kind, leaving the context empty."""
    context = open_context(tiny(kind), kv_unified=unified)
    assert context.memory_kind is KINDS[kind]
    assert [context.memory.pos_max(s) for s in range(3)] == [-1, -1, -1]


def test_embedding_models_have_none(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """llama_get_memory is NULL: embedding only."""
    context = open_context(tiny("embedding"), embeddings=True, pooling="mean", n_seq_max=1)
    assert context.memory_kind is MemoryKind.NONE


def test_a_memory_that_cannot_be_cut_is_whole(
    tiny: Callable[[str], Model], open_context: OpenContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut that the probe sees refused means: whole states only, and never a ranged copy."""
    model = tiny("dense")
    monkeypatch.setattr(model, "memory_kinds", {})
    lib = model.lib
    monkeypatch.setitem(lib.__dict__, "memory_seq_rm", lambda *_: False)
    context = open_context(model)
    assert context.memory_kind is MemoryKind.WHOLE
    with pytest.raises(NotSupported, match="whole sequences only"):
        context.memory.cp(0, 1, 0, 10)


def test_a_hybrid_that_aborts_on_ranges_is_whole(
    tiny: Callable[[str], Model], open_context: OpenContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V4 says hybrid, and its memory asserts on a ranged copy: none ever reaches it."""
    model = tiny("hybrid")
    monkeypatch.setattr(model, "facts", dataclasses.replace(model.facts, architecture="deepseek4"))
    context = open_context(model)
    assert context.memory_kind is MemoryKind.WHOLE
    with pytest.raises(NotSupported, match="whole sequences only"):
        context.memory.cp(0, 1, 0, 10)


@pytest.mark.parametrize(
    "shape",
    [
        {"n_batch": 1},
        {"embeddings": True},
        {"embeddings": True, "pooling": "mean"},
        {"n_batch": 8, "n_ubatch": 1},
    ],
    ids=str,
)
def test_every_shape_is_probed(
    tiny: Callable[[str], Model],
    open_context: OpenContext,
    monkeypatch: pytest.MonkeyPatch,
    shape: dict[str, Any],
) -> None:
    """A memory that cannot be cut is found whatever the batch, so a ranged copy never reaches it."""
    model = tiny("dense")
    monkeypatch.setattr(model, "memory_kinds", {})
    assert open_context(model, n_seq_max=1, **shape).memory_kind is MemoryKind.DENSE
    monkeypatch.setattr(model, "memory_kinds", {})
    monkeypatch.setitem(model.lib.__dict__, "memory_seq_rm", lambda *_: False)
    context = open_context(model, n_seq_max=1, **shape)
    assert context.memory_kind is MemoryKind.WHOLE
    assert context.memory.pos_max(0) == -1


@pytest.mark.parametrize("pos", [2**31, 2**40, -(2**31) - 1])
def test_positions_beyond_32_bits(tiny: Callable[[str], Model], open_context: OpenContext, pos: int) -> None:
    """What no position can be is refused by type."""
    memory = open_context(tiny("dense")).memory
    for use in (lambda: memory.rm(0, pos), lambda: memory.rm(0, 0, pos), lambda: memory.cp(0, 1, 0, pos)):
        with pytest.raises(InvalidBatch, match="32 bits"):
            use()


def test_removing_a_tail(tiny: Callable[[str], Model], open_context: OpenContext, kind: str) -> None:
    """Dense and window memory answer true and end there; states answer false and stay as they are."""
    context, reference = open_context(tiny(kind)), open_context(tiny(kind))
    tokens = prompt(context.model, 100)
    feed(context, tokens)
    feed(reference, tokens)
    can_cut = kind in ("dense", "window")
    assert context.memory.rm(0, 80) is can_cut
    assert context.memory.pos_max(0) == (79 if can_cut else 99)
    if not can_cut:
        assert off_by(step(context, 7, 100), step(reference, 7, 100)) == 0
    assert context.memory.rm(0)
    assert context.memory.pos_max(0) == -1


def test_emptying_is_counted(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """Whoever remembers something of a sequence can tell that it is another one now."""
    memory = open_context(tiny("dense")).memory
    before = [memory.n_emptied(s) for s in range(3)]
    memory.rm(0, 5)
    assert [memory.n_emptied(s) for s in range(3)] == before
    memory.rm(0)
    memory.clear(data=False)
    memory.keep(2)
    assert [memory.n_emptied(s) - before[s] for s in range(3)] == [3, 2, 1]
    with pytest.raises(InvalidBatch):
        memory.n_emptied(3)


def test_a_dense_cut_is_right(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """Going on after a cut of dense memory gives the bits of never having gone further."""
    context, reference = open_context(tiny("dense")), open_context(tiny("dense"))
    tokens = prompt(context.model, 150)
    feed(context, tokens)
    assert context.memory.can_cut(0, 70)
    assert context.memory.rm(0, 70)
    feed(reference, tokens[:70])
    assert off_by(step(context, 9, 70), step(reference, 9, 70)) == 0


def test_a_window_cut_may_be_wrong(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """LLAMA_CPP: seq_rm of a window answers true although cells are gone; `can_cut` knows better."""
    model = tiny("window")
    shape = {"n_seq_max": 1, "n_batch": 64}  # a window cache of 256 cells: reused after 256 tokens
    context, reference = open_context(model, **shape), open_context(model, **shape)
    tokens = prompt(model, 450)
    feed(context, tokens, piece=32)
    pos_min = context.memory.pos_min(0)
    assert pos_min > 0
    cut = pos_min + model.facts.n_swa // 2
    assert not context.memory.can_cut(0, cut)
    assert context.memory.can_cut(0, pos_min + model.facts.n_swa)
    assert context.memory.rm(0, cut)  # true, and wrong:
    feed(reference, tokens[:cut], piece=32)
    assert off_by(step(context, 9, cut), step(reference, 9, cut)) > 0.01


def test_states_can_only_be_cut_to_nothing(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """`can_cut` of recurrent memory: everything, or nothing to cut."""
    context = open_context(tiny("recurrent"))
    feed(context, prompt(context.model, 20))
    answers = {n: context.memory.can_cut(0, n) for n in (0, 10, 19, 20)}
    assert answers == {0: True, 10: False, 19: False, 20: True}


def test_ranged_copies(tiny: Callable[[str], Model], open_context: OpenContext, kind: str) -> None:
    """Ranges of a unified cache can be copied, except where the memory is only a state."""
    context = open_context(tiny(kind))
    feed(context, prompt(context.model, 100))
    if kind == "recurrent":
        with pytest.raises(NotSupported, match="whole sequences only"):
            context.memory.cp(0, 1, 0, 50)
    else:
        context.memory.cp(0, 1, 0, 50)
        assert context.memory.pos_max(1) == 49


def test_ranged_copies_between_streams(
    tiny: Callable[[str], Model], open_context: OpenContext, kind: str
) -> None:
    """LLAMA_CPP: a ranged copy between separate streams would abort the process; it is refused."""
    context = open_context(tiny(kind), n_ctx=768, kv_unified=False)
    feed(context, prompt(context.model, 100))
    for p0, p1 in ((0, 50), (10, -1), (1, 100)):
        with pytest.raises(NotSupported):
            context.memory.cp(0, 1, p0, p1)


@pytest.mark.parametrize("unified", [True, False])
def test_whole_copies_are_real_at_once(
    tiny: Callable[[str], Model], open_context: OpenContext, kind: str, unified: bool
) -> None:
    """A copy can be saved before any decode; llama.cpp moves data between streams only with the next one."""
    shape = {"n_ctx": 768, "kv_unified": unified}
    context = open_context(tiny(kind), **shape)
    feed(context, prompt(context.model, 100))
    feed(context, prompt(context.model, 50, seed=3), seq_id=1)
    context.memory.cp(0, 0)
    original = save(context, 0)
    context.memory.rm(1)
    context.memory.cp(0, 1)
    assert context.memory.pos_max(1) == 99
    logits = []
    for state in (original, save(context, 1)):
        fresh = open_context(tiny(kind), **shape)
        assert fresh.state_set(0, state) == len(state)
        logits.append(step(fresh, 7, 100))
    assert off_by(*logits) == 0


def test_hybrid_copy_takes_the_current_state(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """LLAMA_CPP: a ranged copy of a hybrid takes attention by range, and the state of now."""
    context = open_context(tiny("hybrid"))
    feed(context, prompt(context.model, 100))
    context.memory.cp(0, 1, 0, 50)
    # pos_min is the state's position, pos_max the smaller of both parts.
    assert (context.memory.pos_min(1), context.memory.pos_max(1)) == (99, 49)


def test_unified_copies_cost_no_room(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """In a unified cache a copy is metadata: two sequences of 200 share 256 cells, and one may leave."""
    context = open_context(tiny("dense"), n_ctx=256)
    reference = open_context(tiny("dense"), n_ctx=256)
    tokens = prompt(context.model, 200)
    feed(context, tokens)
    feed(reference, tokens)
    context.memory.cp(0, 1)
    context.memory.cp(0, 2)
    assert [context.memory.pos_max(s) for s in range(3)] == [199] * 3
    context.memory.rm(0)
    context.memory.rm(2)
    assert off_by(step(context, 8, 200, seq_id=1), step(reference, 8, 200)) == 0


def test_keep_and_clear(tiny: Callable[[str], Model], open_context: OpenContext, kind: str) -> None:
    """`keep` forgets all others, `clear` everybody."""
    context = open_context(tiny(kind))
    for seq_id in range(3):
        feed(context, prompt(context.model, 20, seed=seq_id), seq_id=seq_id)
    context.memory.keep(1)
    assert [context.memory.pos_max(s) for s in range(3)] == [-1, 19, -1]
    context.memory.clear()
    assert context.memory.pos_max(1) == -1
    feed(context, prompt(context.model, 20))


@pytest.mark.parametrize("seq_id", [-1, 3, 255, 256, 2**31])
def test_sequence_ids_are_checked(
    tiny: Callable[[str], Model], open_context: OpenContext, seq_id: int
) -> None:
    """B14: a scratch id must be below n_seq_max too; llama.cpp asserts on others."""
    context = open_context(tiny("dense"))
    memory = context.memory
    uses: list[Callable[[], object]] = [
        lambda: memory.rm(seq_id),
        lambda: memory.cp(0, seq_id),
        lambda: memory.cp(seq_id, 0),
        lambda: memory.keep(seq_id),
        lambda: memory.pos_min(seq_id),
        lambda: memory.pos_max(seq_id),
        lambda: context.state_size(seq_id),
        lambda: context.state_get(seq_id, bytearray(10)),
        lambda: context.state_set(seq_id, b"0123456789"),
    ]
    for use in uses:
        with pytest.raises(InvalidBatch, match=f"sequence {seq_id}"):
            use()


def test_memory_use_is_reported(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """Twice the cells, twice the KV bytes; compute buffers are counted apart."""
    small, large = open_context(tiny("dense"), n_ctx=512), open_context(tiny("dense"), n_ctx=1024)
    assert large.memory_bytes.kv_bytes == 2 * small.memory_bytes.kv_bytes
    assert small.memory_bytes.compute_bytes > 0
    assert small.memory_bytes.total_bytes == sum(
        (small.memory_bytes.kv_bytes, small.memory_bytes.compute_bytes)
    )
    assert isinstance(small, Context)
