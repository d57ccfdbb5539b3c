"""Parts of every kind of memory: out, in, out again; exact, undisturbed, and clean when refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from erllama.backend import MemoryKind, PartKind, Row, Step, StepStatus
from erllama.engine import llama_parts
from erllama.engine.llama_backend import LlamaBackend
from erllama.engine.window_places import ring_size
from erllama.errors import EngineError, NotSupported
from erllama.machine import usable_cpus
from erllama.options import ContextOptions, ModelOptions

from .parts_scenes import KINDS, equal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .parts_scenes import Apart, OpenApart

pytestmark = pytest.mark.model

W = 64  # make_tiny_gguf.WINDOW


def check_round_trip(source: Apart, target: Apart, n: int, block: int, *, slot: int = 0) -> None:
    """Block by block from one context to the other: same bytes again, same logits from there on."""
    tokens = source.tokens(n)
    saved = source.compute(0, tokens, block)
    assert target.restore(slot, saved, n)
    assert target.backend.is_at(slot, n)
    for (start, end, part), data in target.needed(saved, n).items():
        assert target.export(slot, start, end, part) == data
    assert equal(target.go_on(slot, n), source.go_on(0, n))


def test_layouts(open_apart: OpenApart) -> None:
    """What is kept of each kind."""
    kept = {kind: open_apart(kind).layout for kind in KINDS}
    assert {kind: (layout.base, layout.window, layout.state) for kind, layout in kept.items()} == {
        "dense": (True, 0, False),
        "window": (True, W, False),
        "hybrid": (True, 0, True),
        "hybrid_window": (True, 0, True),
        "recurrent": (False, 0, True),
    }


@pytest.mark.parametrize("n", [1, W - 1, W, W + 1, 2 * W, W + 188])
@pytest.mark.parametrize("block", [48, 256])
def test_round_trip(open_apart: OpenApart, kind: str, n: int, block: int) -> None:
    """E1, X4: what comes out again is what went in, and the next tokens have the same logits."""
    check_round_trip(open_apart(kind), open_apart(kind), n, block, slot=2)


@pytest.mark.parametrize("n", [256, 300, 700])
def test_round_trip_of_whole_blocks(open_apart: OpenApart, kind: str, n: int) -> None:
    """The same across several blocks of 256 tokens and a tail."""
    check_round_trip(open_apart(kind), open_apart(kind), n, 256)


@pytest.mark.parametrize("shape", [{"flash_attn": False}, {"type_k": "q8_0", "type_v": "q8_0"}], ids=str)
def test_round_trip_of_other_shapes(open_apart: OpenApart, kind: str, shape: dict[str, object]) -> None:
    """Transposed V and quantised KV."""
    check_round_trip(open_apart(kind, **shape), open_apart(kind, **shape), W + 7, 48)


@pytest.mark.parametrize("n", [513, 700])
def test_round_trip_of_a_real_window(open_apart: OpenApart, gemma_path: Path, n: int) -> None:
    """gemma-3-270m, around its window of 512 tokens."""
    shape = {"n_seq_max": 1}
    check_round_trip(open_apart(gemma_path, **shape), open_apart(gemma_path, **shape), n, 256)


def test_round_trip_of_a_real_dense_model(open_apart: OpenApart, smollm2_path: Path) -> None:
    """SmolLM2-135M."""
    shape = {"n_seq_max": 1}
    check_round_trip(open_apart(smollm2_path, **shape), open_apart(smollm2_path, **shape), 70, 32)


def test_a_prefix_is_a_place_to_go_on_from(open_apart: OpenApart, kind: str) -> None:
    """D6: every block boundary is a resume point, also in the middle of what was saved."""
    source, target, reference = (open_apart(kind) for _ in range(3))
    saved = source.compute(0, source.tokens(200), 40)
    reference.compute(0, source.tokens(120), 40)
    assert target.restore(0, saved, 120)
    assert target.backend.is_at(0, 120)
    assert equal(target.go_on(0, 120), reference.go_on(0, 120))


def test_part_of_a_block(open_apart: OpenApart) -> None:
    """On a dense model the diverging block is restored to the token; neighbours of the range stay out."""
    source, target = open_apart("dense"), open_apart("dense")
    saved = source.compute(0, source.tokens(100), 50)
    assert target.backend.import_(0, (0, 50), (0, 50), memoryview(saved[0, 50, PartKind.BASE]))
    assert target.backend.import_(0, (50, 100), (50, 70), memoryview(saved[50, 100, PartKind.BASE]))
    assert target.backend.is_at(0, 70)
    assert source.backend.cut(0, 70)
    assert equal(target.go_on(0, 70), source.go_on(0, 70))


def test_bytes_do_not_tell_where_they_come_from(open_apart: OpenApart, kind: str) -> None:
    """K26: the same from any slot, and from a context with any number of slots."""
    few, many = open_apart(kind, n_seq_max=1), open_apart(kind, n_seq_max=7)
    tokens = few.tokens(100)
    saved = few.compute(0, tokens, 50)
    for slot in (6, 0):
        assert many.compute(slot, tokens, 50) == saved
        assert many.backend.cut(slot, 0)


def test_nobody_is_disturbed(open_apart: OpenApart, kind: str) -> None:
    """A live neighbour goes on bit for bit as if nothing had been exported or imported beside it."""
    source, target, reference = (open_apart(kind) for _ in range(3))
    saved = source.compute(0, source.tokens(100), 50)
    for apart in (target, reference):
        apart.feed(1, apart.tokens(90, seed=3), 0)
    assert target.restore(0, saved, 100)
    target.export(1, 0, 90, target.kinds()[-1])
    assert target.backend.cut(0, 0)
    assert equal(target.go_on(1, 90), reference.go_on(1, 90))


def test_sharing(open_apart: OpenApart, kind: str) -> None:
    """What is shared is at the same place, and going on in one does not show in the other."""
    apart, reference = open_apart(kind), open_apart(kind)
    for each in (apart, reference):
        each.feed(0, each.tokens(90), 0)
    apart.backend.share(0, 2, 0, 90)
    assert apart.backend.is_at(2, 90)
    apart.go_on(2, 90)
    assert apart.backend.cut(2, 0)
    assert equal(apart.go_on(0, 90), reference.go_on(0, 90))


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid", "hybrid_window"])
def test_no_room(open_apart: OpenApart, kind: str) -> None:
    """Too few free cells: refused, and nothing changed for anybody."""
    source = open_apart(kind, n_ctx=256)
    apart, reference = open_apart(kind, n_ctx=256), open_apart(kind, n_ctx=256)
    saved = source.compute(0, source.tokens(100), 100)
    for each in (apart, reference):
        each.feed(1, each.tokens(200, seed=3), 0)
        each.feed(2, each.tokens(10, seed=4), 0)
    data = memoryview(saved[0, 100, PartKind.BASE])
    assert not apart.backend.import_(2, (0, 100), (10, 100), data)
    assert not apart.backend.import_(0, (0, 100), (0, 100), data)
    assert apart.backend.is_at(2, 10)
    assert apart.backend.is_at(0, 0)
    assert equal(apart.go_on(1, 200), reference.go_on(1, 200))
    assert equal(apart.go_on(2, 10), reference.go_on(2, 10))


def test_bytes_do_not_tell_where_their_cells_lie(open_apart: OpenApart, kind: str) -> None:
    """D6: equal KV is equal bytes, also from cells between those of others."""
    whole, scattered = open_apart(kind), open_apart(kind)
    tokens = whole.tokens(60)
    for at in range(0, 60, 20):  # between another sequence's, which then leaves
        scattered.feed(1, scattered.tokens(20, seed=1), at)
        scattered.feed(0, tokens[at : at + 20], at)
    scattered.backend.cut(1, 0)
    saved = {part: scattered.export(0, 0, 60, part) for part in scattered.kinds()}
    for part, data in saved.items():
        assert scattered.backend.import_(1, (0, 60), (0, 60), memoryview(data), part)
    assert scattered.backend.is_at(1, 60)
    for part, data in saved.items():
        assert scattered.export(1, 0, 60, part) == data
    assert whole.restore(0, {(0, 60, part): data for part, data in saved.items()}, 60)
    for part, data in saved.items():
        assert whole.export(0, 0, 60, part) == data


# --- the ring of a window cache ---


RING = {"n_seq_max": 1, "n_batch": 64}  # 256 window cells


@pytest.mark.parametrize("kind", ["window", "hybrid_window"])
@pytest.mark.parametrize(
    ("n", "block"), [(256, 64), (257, 64), (300, 64), (330, 50), (513, 256), (1000, 256)]
)
def test_a_restore_starts_the_ring_where_it_was(open_apart: OpenApart, kind: str, n: int, block: int) -> None:
    """X3: the order of cells decides about bits, also when the window cache has been filled several times."""
    check_round_trip(open_apart(kind, **RING), open_apart(kind, **RING), n, block)


@pytest.mark.skipif(usable_cpus() < 2, reason="more threads than cores are cut")
@pytest.mark.parametrize("kind", ["window", "hybrid_window"])
@pytest.mark.parametrize(("n", "block"), [(768, 256), (1038, 256), (1038, 100), (1182, 64)])
def test_a_restored_ring_is_as_full_as_it_was(open_apart: OpenApart, kind: str, n: int, block: int) -> None:
    """X3: two threads share the cells of a single row, hidden ones included, up to the last one in use."""
    shape = {"n_seq_max": 1, "n_batch": 512, "n_threads": 2, "n_ctx": 2048}  # 768 window cells
    check_round_trip(open_apart(kind, **shape), open_apart(kind, **shape), n, block)


@pytest.mark.parametrize("n", [256, 300, 320, 480, 500, 530, 1000])
@pytest.mark.parametrize("block", [30, 50, 64, 256])
def test_every_place_of_a_ring_that_was_full_is_held(open_apart: OpenApart, n: int, block: int) -> None:
    """Copies of as many cells as a part has, the last ones cut: before what is restored and behind it."""
    source, target = open_apart("window", **RING), open_apart("window", **RING)
    saved = source.compute(0, source.tokens(n), block)
    assert target.restore(0, saved, n)
    assert target.backend._live_context().memory.pos_min(1) == n - 256
    assert target.backend.is_at(0, n)
    assert equal(target.go_on(0, n, 20), source.go_on(0, n, 20))


@pytest.mark.parametrize("n", [300, 330, 513])
def test_the_ring_has_no_holes_where_less_of_a_part_is_wanted(open_apart: OpenApart, n: int) -> None:
    """X3: of the first window part only what the next token sees is asked for; the bits are the same."""
    source, target = open_apart("window", **RING), open_apart("window", **RING)
    saved = source.compute(0, source.tokens(n), 50)
    for (start, end, part), data in target.needed(saved, n).items():
        wanted = (max(start, n - W), end) if part is PartKind.WINDOW else (start, end)
        assert target.backend.import_(0, (start, end), wanted, memoryview(data), part)
    assert target.backend.is_at(0, n)
    assert equal(target.go_on(0, n), source.go_on(0, n))


def test_the_size_of_the_ring(open_apart: OpenApart) -> None:
    """llama.cpp reuses the first cell when as many tokens were computed: pos_min then leaves 0."""
    for shape in (RING, {"n_seq_max": 3, "n_batch": 128}):
        apart = open_apart("window", **shape)
        size = ring_size(apart.backend._live_context())
        tokens = apart.tokens(size + 1)
        for pos in range(0, size, 32):
            apart.feed(0, tokens[pos : pos + 32], pos)
        assert apart.backend._live_context().memory.pos_min(1) == 0
        apart.feed(0, tokens[size:], size)
        assert apart.backend._live_context().memory.pos_min(1) == 1


def test_held_places_are_never_taken_for_a_window(open_apart: OpenApart) -> None:
    """They are counted by llama.cpp as the sequence's own cells: not exported, not cut to, not shared on."""
    source, target = (
        open_apart("window", **RING | {"n_seq_max": 2}),
        open_apart("window", **RING | {"n_seq_max": 2}),
    )
    saved = source.compute(0, source.tokens(500), 50)
    assert target.restore(0, saved, 500)
    memory = target.backend._live_context().memory
    assert memory.pos_min(1) < 400 - W
    target.backend.share(0, 1, 0, 500)
    for slot in (1, 0):
        for start, end in ((300, 350), (350, 400), (399, 450)):
            assert target.export(slot, start, end, PartKind.WINDOW) == b""
        # Who shares gets no more of a window than it needs itself.
        for start, end in ((400, 450), (450, 500))[slot:]:
            assert target.export(slot, start, end, PartKind.WINDOW) == saved[start, end, PartKind.WINDOW]
        assert not target.backend.cut(slot, 400)
        assert target.backend.is_at(slot, 500)
        assert target.backend.cut(slot, 0)
    target.feed(0, target.tokens(200)[:50], 0)  # emptied: everything is real again
    assert target.export(0, 0, 50, PartKind.WINDOW)
    assert target.backend.cut(0, 20)


@pytest.mark.parametrize("kind", ["window", "hybrid_window"])
def test_what_was_restored_is_kept_whole_when_nothing_is_to_be_cut(open_apart: OpenApart, kind: str) -> None:
    """A session's next turn cuts its slot to what it holds, held places or not, with tokens behind or not."""
    source, target = open_apart(kind, **RING), open_apart(kind, **RING)
    saved = source.compute(0, source.tokens(300), 300)
    assert target.restore(0, saved, 300)
    assert target.backend.cut(0, 300)
    target.go_on(0, 300)
    assert target.backend.cut(0, 304)


def test_too_few_windows_are_noticed_beside_held_places(open_apart: OpenApart) -> None:
    """A resume that lacks the first of the window parts it needs is none."""
    source, target = open_apart("window", **RING), open_apart("window", **RING)
    saved = source.compute(0, source.tokens(500), 50)
    needed = target.needed(saved, 500)
    first = min(key for key in needed if key[2] is PartKind.WINDOW)
    del needed[first]
    for (start, end, part), data in needed.items():
        assert target.backend.import_(0, (start, end), (start, end), memoryview(data), part)
    assert not target.backend.is_at(0, 500)


# --- what is not, or no longer, there ---


@pytest.mark.parametrize("part", list(PartKind))
def test_nothing_to_export(open_apart: OpenApart, kind: str, part: PartKind) -> None:
    """Empty slots, empty ranges, ranges beyond the end, parts that the memory has not: 0 bytes, no crash."""
    apart = open_apart(kind)
    for start, end in ((0, 10), (0, 0), (10, 10), (-5, -1), (-1, 10), (10, 5)):
        assert apart.export(0, start, end, part) == b""
    apart.feed(0, apart.tokens(40), 0)
    for start, end in ((0, 41), (40, 50), (40, 40), (20, 10), (-3, 40)):
        assert apart.export(0, start, end, part) == b""
    assert bool(apart.export(0, 0, 40, part)) is (part in apart.kinds())
    assert apart.backend.is_at(0, 40)


def test_a_window_exported_too_late(open_apart: OpenApart) -> None:
    """Cells that were recycled are gone: 0, not a part with holes; the base part is there for ever."""
    apart = open_apart("window", n_seq_max=1, n_batch=64)  # 256 window cells
    tokens = apart.tokens(700)
    fresh = apart.compute(0, tokens[:128], 64)
    for pos in range(128, 700, 64):
        apart.feed(0, tokens[pos : min(pos + 64, 700)], pos)
    assert apart.export(0, 64, 128, PartKind.WINDOW) == b""
    assert apart.export(0, 64, 128, PartKind.BASE) == fresh[64, 128, PartKind.BASE]
    assert apart.export(0, 640, 700, PartKind.WINDOW)


def test_a_window_reaches_as_far_as_the_next_token_looks(open_apart: OpenApart) -> None:
    """llama_hparams::is_masked_swa: 63 cells before it are all that a token of a window of 64 sees."""
    source, target = open_apart("window"), open_apart("window")
    saved = source.compute(0, source.tokens(W + 1), 1)
    for i in range(W + 1):
        assert target.backend.import_(0, (i, i + 1), (i, i + 1), memoryview(saved[i, i + 1, PartKind.BASE]))
    for i in range(3, W + 1):
        part = PartKind.WINDOW
        assert target.backend.import_(0, (i, i + 1), (i, i + 1), memoryview(saved[i, i + 1, part]), part)
    assert not target.backend.is_at(0, W + 1)
    assert target.backend.cut(0, 0)
    assert target.restore(0, saved, W + 1)
    assert target.backend.is_at(0, W + 1)
    assert equal(target.go_on(0, W + 1), source.go_on(0, W + 1))


@pytest.mark.parametrize("kind", ["hybrid", "hybrid_window", "recurrent"])
def test_a_state_is_there_at_its_end_only(open_apart: OpenApart, kind: str) -> None:
    """Before and after that length: 0."""
    apart = open_apart(kind)
    apart.feed(0, apart.tokens(40), 0)
    assert apart.export(0, 0, 40, PartKind.STATE)
    assert apart.export(0, 0, 39, PartKind.STATE) == b""
    assert apart.export(0, 0, 41, PartKind.STATE) == b""
    apart.feed(0, apart.tokens(1), 40)
    assert apart.export(0, 0, 40, PartKind.STATE) == b""
    assert apart.export(0, 40, 41, PartKind.STATE)


def test_a_buffer_that_is_too_small(open_apart: OpenApart, kind: str) -> None:
    """Refused, and the slot is as it was."""
    apart = open_apart(kind)
    apart.feed(0, apart.tokens(40), 0)
    for part in apart.kinds():
        n = apart.backend.export_bytes(0, 0, 40, part)
        with pytest.raises(EngineError, match="does not fit"):
            apart.backend.export(0, 0, 40, memoryview(bytearray(n - 1)), part)
        assert apart.export(0, 0, 40, part)
    assert apart.backend.is_at(0, 40)


def test_half_a_restore_is_no_place_to_go_on_from(open_apart: OpenApart, kind: str) -> None:
    """X4: both halves or neither; a hole, a missing half and a wrong length are noticed."""
    source, target = open_apart(kind), open_apart(kind)
    saved = source.compute(0, source.tokens(120), 30)
    needed = target.needed(saved, 120)
    for left_out in needed:
        for (start, end, part), data in needed.items():
            if (start, end, part) != left_out:
                assert target.backend.import_(0, (start, end), (start, end), memoryview(data), part)
        assert not target.backend.is_at(0, 120), left_out
        assert target.backend.cut(0, 0)
    assert target.restore(0, saved, 120)
    assert [n for n in range(125) if target.backend.is_at(0, n)] == [120]


def test_separate_streams_are_not_taken_apart(tiny_gguf: Callable[[str], Path]) -> None:
    """No layout, a reason in the facts, and a typed error for who asks all the same."""
    options = ContextOptions(n_ctx=256, n_seq_max=2, n_threads=1, kv_unified=False).resolved()
    backend = LlamaBackend(str(tiny_gguf("dense")), ModelOptions(), options)
    facts = backend.open()
    assert facts.layout is None
    assert "kv_unified=False" in facts.details["not_kept"]
    for ask in (lambda: backend.export_bytes(0, 0, 1), lambda: backend.is_at(0, 0)):
        with pytest.raises(NotSupported, match="kv_unified=False"):
            ask()
    backend.close()


@pytest.mark.parametrize("kind", ["window", "hybrid"])
@pytest.mark.parametrize(
    ("whole", "partial"), [(b"12345678ab", b"12345678ab"), (b"12345678abc", b"12345678b")]
)
def test_an_unknown_order_of_sections_is_not_taken_apart(
    tiny_gguf: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    whole: bytes,
    partial: bytes,
) -> None:
    """llama.cpp has memories that put something behind the state, and may get others."""
    states = {False: whole, True: partial}
    monkeypatch.setattr(llama_parts, "_empty_state", lambda _, *, partial: states[partial])
    backend = LlamaBackend(str(tiny_gguf(kind)), ModelOptions(), ContextOptions(n_ctx=256).resolved())
    facts = backend.open()
    assert facts.layout is None
    assert f"{kind} memory" in facts.details["not_kept"]
    backend.close()


def test_a_rebuilt_context_has_its_parts(open_apart: OpenApart, kind: str) -> None:
    """R3: exporting and importing go on after `rebuild`."""
    apart = open_apart(kind)
    tokens = apart.tokens(60)
    saved = apart.compute(0, tokens, 30)
    apart.backend.rebuild()
    assert apart.backend.is_at(0, 0)
    assert apart.restore(1, saved, 60)
    assert apart.backend.is_at(1, 60)


def test_a_live_window_slot_in_a_crowded_cache(open_apart: OpenApart) -> None:
    """A neighbour may recycle the one cell that no later token sees; the slot can still go on and be kept."""
    apart = open_apart("window", n_ctx=512, n_seq_max=2, n_batch=64)
    apart.compute(0, apart.tokens(150), 50)
    for pos in range(0, 350, 50):
        result = apart.backend.step(Step((Row(1, pos, apart.tokens(50, seed=2)),)))
        assert result.status is StepStatus.OK
        assert apart.backend.is_at(0, 150)
        assert apart.export(0, 100, 150, PartKind.WINDOW)
    assert apart.facts.memory_kind is MemoryKind.WINDOW
