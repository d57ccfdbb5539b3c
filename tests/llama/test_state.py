"""Saving and restoring sequences: bit for bit, without disturbing anybody, and clean when refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from erllama.errors import EngineError

from .support import feed, off_by, prompt, save, step

if TYPE_CHECKING:
    from collections.abc import Callable

    from erllama.llama import Context, Model

    from .support import OpenContext

pytestmark = pytest.mark.model

KINDS = ["dense", "window", "recurrent", "hybrid"]
SCRATCH = 2


def normalised(state: bytes, seq_id: int) -> bytes:
    """A state whose bytes do not depend on the sequence it was saved from: through the scratch id."""
    return state.replace(bytes([seq_id, 0, 0, 0]), b"\0\0\0\0")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unified", [True, False])
def test_round_trip(
    tiny: Callable[[str], Model], open_context: OpenContext, kind: str, unified: bool
) -> None:
    """E1: what is restored into a fresh context is what was saved, and it computes the same bits."""
    model = tiny(kind)
    context = open_context(model, n_ctx=768, kv_unified=unified)
    fresh = open_context(model, n_ctx=768, kv_unified=unified)
    feed(context, prompt(model, 150))
    state = save(context, 0)
    assert fresh.state_set(0, state) == len(state)
    assert save(fresh, 0) == state
    assert off_by(step(fresh, 7, 150), step(context, 7, 150)) == 0


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "f16")])
@pytest.mark.parametrize("flash_attn", [True, False])
def test_round_trip_of_kv_types(
    tiny: Callable[[str], Model], open_context: OpenContext, types: tuple[str, str], flash_attn: bool
) -> None:
    """LLAMA_CPP: f16, q8_0 and q4_0, with flash attention or transposed V, come back bit-equal."""
    model, (type_k, type_v) = tiny("dense"), types
    if type_v != "f16" and not flash_attn:
        type_v = "f16"  # quantised V needs flash attention; transposed V is then f16
    shape = {"type_k": type_k, "type_v": type_v, "flash_attn": flash_attn}
    context, fresh = open_context(model, **shape), open_context(model, **shape)
    feed(context, prompt(model, 100))
    state = save(context, 0)
    assert fresh.state_set(1, state) == len(state)
    assert off_by(step(fresh, 7, 100, seq_id=1), step(context, 7, 100)) == 0


def test_real_model_round_trip(smollm2: Model, open_context: OpenContext) -> None:
    """The same with a real model's weights."""
    context, fresh = open_context(smollm2, n_seq_max=1), open_context(smollm2, n_seq_max=1)
    feed(context, prompt(smollm2, 70))
    assert fresh.state_set(0, save(context, 0)) > 0
    assert off_by(step(fresh, 7, 70), step(context, 7, 70)) == 0


def test_range_through_scratch(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """D6: any token range is saved through the scratch id and restored block by block, bit for bit."""
    model = tiny("dense")
    context, fresh = open_context(model), open_context(model)
    tokens = prompt(model, 192)
    feed(context, tokens)
    for p0 in range(0, 192, 64):
        context.memory.cp(0, SCRATCH, p0, p0 + 64)
        block = save(context, SCRATCH)
        context.memory.rm(SCRATCH)
        assert fresh.state_set(SCRATCH, block) == len(block)
        assert (fresh.memory.pos_min(SCRATCH), fresh.memory.pos_max(SCRATCH)) == (p0, p0 + 63)
        fresh.memory.cp(SCRATCH, 0)
        fresh.memory.rm(SCRATCH)
    assert (fresh.memory.pos_min(0), fresh.memory.pos_max(0)) == (0, 191)
    assert off_by(step(fresh, 7, 192), step(context, 7, 192)) == 0


def test_saving_disturbs_nobody(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """LLAMA_CPP: cp → get_data → rm leaves running sequences bit for bit as they were."""
    model = tiny("dense")
    context, reference = open_context(model), open_context(model)
    for each in (context, reference):
        feed(each, prompt(model, 100))
        feed(each, prompt(model, 60, seed=1), seq_id=1)
    for p0 in (0, 20, 40):
        context.memory.cp(0, SCRATCH, p0, p0 + 20)
        save(context, SCRATCH)
        context.memory.rm(SCRATCH)
    for seq_id, pos in ((0, 100), (1, 60)):
        assert off_by(step(context, 7, pos, seq_id=seq_id), step(reference, 7, pos, seq_id=seq_id)) == 0


def test_restoring_into_scattered_cells(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """LLAMA_CPP: set_data needs no contiguous cells; with too few it answers 0 and touches nothing."""
    model = tiny("dense")
    source, context = open_context(model, n_ctx=256), open_context(model, n_ctx=256)
    feed(source, prompt(model, 100))
    state = save(source, 0)
    feed(context, prompt(model, 200), seq_id=1)
    for p0 in range(10, 190, 20):  # holes of ten cells
        context.memory.rm(1, p0, p0 + 10)
    assert context.state_set(0, state) == len(state)
    assert (context.memory.pos_min(0), context.memory.pos_max(0)) == (0, 99)
    assert context.state_set(2, state) == 0
    assert context.memory.pos_max(2) == -1
    assert context.memory.pos_max(0) == 99


def test_blob_differs_by_sequence_id_only(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """LLAMA_CPP: the blob holds the sequence id in its header and with each cell; the rest is equal."""
    context = open_context(tiny("dense"))
    feed(context, prompt(context.model, 50))
    context.memory.cp(0, 1)
    first, second = save(context, 0), save(context, 1)
    different = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    assert len(different) <= 51
    assert all((first[i], second[i]) == (0, 1) for i in different)


@pytest.mark.parametrize("kind", ["window", "hybrid"])
def test_partial_state_is_the_small_part(
    tiny: Callable[[str], Model], open_context: OpenContext, kind: str
) -> None:
    """LLAMA_CPP: PARTIAL_ONLY yields just the window or the recurrent part."""
    context = open_context(tiny(kind))
    feed(context, prompt(context.model, 250))
    whole, part = save(context, 0), save(context, 0, partial=True)
    assert len(part) == context.state_size(0, partial=True)
    assert 0 < len(part) < len(whole) / 3


def test_blocks_and_partial_state_restore_a_hybrid(
    tiny: Callable[[str], Model], open_context: OpenContext
) -> None:
    """LLAMA_CPP: attention blocks by range plus the partial part restore a hybrid bit-equal."""
    model = tiny("hybrid")
    context, fresh = open_context(model), open_context(model)
    feed(context, prompt(model, 128))
    part = save(context, 0, partial=True)
    for p0 in (0, 64):
        context.memory.cp(0, SCRATCH, p0, p0 + 64)
        block = save(context, SCRATCH)
        context.memory.rm(SCRATCH)
        assert fresh.state_set(SCRATCH, block) == len(block)
        fresh.memory.cp(SCRATCH, 0, p0, p0 + 64)
        fresh.memory.rm(SCRATCH)
    assert fresh.state_set(0, part, partial=True) == len(part)
    assert fresh.memory.pos_max(0) == 127
    assert off_by(step(fresh, 7, 128), step(context, 7, 128)) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [0, 1, 4, 40, 0.5, -1])
def test_damaged_states_leave_nothing(
    tiny: Callable[[str], Model], open_context: OpenContext, kind: str, cut: float
) -> None:
    """A truncated state answers 0, and the next cold prompt there is right (window memory would not be)."""
    model = tiny(kind)
    context, fresh = open_context(model), open_context(model)
    feed(context, prompt(model, 150))
    state = save(context, 0)
    context.memory.rm(0)
    n = int(len(state) * cut) if isinstance(cut, float) else cut if cut >= 0 else len(state) + cut
    assert context.state_set(SCRATCH, state[:n]) == 0
    assert context.memory.pos_max(SCRATCH) == -1
    cold = prompt(model, 90, seed=5)
    assert off_by(feed(context, cold, seq_id=SCRATCH), feed(fresh, cold, seq_id=SCRATCH)) == 0


def test_window_residue_is_real(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """LLAMA_CPP: raw set_data of a damaged window state answers 0, looks empty, and spoils what follows."""
    model = tiny("window")
    context, fresh = open_context(model), open_context(model)
    feed(context, prompt(model, 150))
    state = save(context, 0)
    context.memory.rm(0)
    with context.handle as ptr:
        buffer = context.lib.ffi.from_buffer("uint8_t[]", state[:-1])
        assert context.lib.state_seq_set_data_ext(ptr, buffer, len(buffer), 0, 0) == 0
    assert context.memory.pos_max(0) == -1
    cold = prompt(model, 90, seed=5)
    spoilt, right = feed(context, cold), feed(fresh, cold)
    assert off_by(spoilt, right) > 0.01


def test_foreign_state_is_refused(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """The state of another shape of cache answers 0."""
    context = open_context(tiny("dense"))
    feed(context, prompt(context.model, 50))
    state = save(context, 0)
    other = open_context(tiny("dense"), type_k="q8_0")
    assert other.state_set(0, state) == 0
    assert open_context(tiny("recurrent")).state_set(0, state) == 0


def test_too_small_a_buffer(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """A buffer that does not hold the state is an error, and nothing is written past it."""
    context = open_context(tiny("dense"))
    feed(context, prompt(context.model, 50))
    n = context.state_size(0)
    into = bytearray(n)
    with pytest.raises(EngineError, match="does not fit"):
        context.state_get(0, memoryview(into)[: n - 1])
    assert context.state_get(0, into) == n


def test_only_writable_buffers_are_written(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """Immutable bytes are never a destination."""
    context = open_context(tiny("dense"))
    with pytest.raises(BufferError):
        context.state_get(0, bytes(1000))


def test_an_empty_sequence_has_a_state(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """Saving nothing and restoring it leaves nothing."""
    context: Context = open_context(tiny("dense"))
    state = save(context, 0)
    assert len(state) < 200
    context.state_set(1, state)
    assert context.memory.pos_max(1) == -1
