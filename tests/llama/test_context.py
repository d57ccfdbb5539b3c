"""Decoding, outputs, and every precondition that llama.cpp would assert on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from erllama.errors import HandleClosed, InvalidBatch, InvalidOption, LoadFailed, NoLogits, NotSupported
from erllama.llama import Batch, Context, ContextParams, SamplerChain, SamplerParams
from erllama.llama.ffi import library

from .support import feed, off_by, prompt, step

if TYPE_CHECKING:
    from collections.abc import Callable

    from erllama.llama import Model

    from .support import OpenContext

pytestmark = pytest.mark.model


def test_real_answer(smollm2: Model, open_context: OpenContext) -> None:
    """The real model says Paris, greedily and twice the same."""
    context = open_context(smollm2, n_ctx=256)
    ids = smollm2.vocab.tokenize("The capital of France is")
    best = int(feed(context, ids).argmax())
    assert smollm2.vocab.piece(best) == b" Paris"
    context.memory.clear()
    assert int(feed(context, ids).argmax()) == best


def test_shape(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """A context reports its real shape: n_ctx padded to 256, sequences of separate streams share it."""
    unified = open_context(tiny("dense"), n_ctx=300)
    assert (unified.n_ctx, unified.n_ctx_seq) == (512, 512)
    separate = open_context(tiny("dense"), n_ctx=1024, n_seq_max=4, kv_unified=False)
    assert (separate.n_ctx, separate.n_ctx_seq) == (1024, 256)
    assert separate.n_seq_max == 4


@pytest.mark.parametrize(
    "params",
    [
        {"n_ctx": 0},
        {"n_ctx": -1},
        {"n_ctx": 2**31 - 1},
        {"n_batch": 0},
        {"n_seq_max": 0},
        {"n_seq_max": 257},
        {"n_outputs_max": 0},
        {"n_threads": 0},
        {"n_threads": 513},
        {"n_threads_batch": -5},
        {"n_threads_batch": 0},
        {"n_threads_batch": 513},
        {"n_ubatch": -1},
        {"n_ubatch": -1, "embeddings": True},
    ],
)
def test_impossible_shapes(tiny: Callable[[str], Model], params: dict[str, Any]) -> None:
    """Zero and senseless sizes are refused by name before llama.cpp sees them (LLAMA_MAX_SEQ is 256)."""
    with pytest.raises(InvalidOption, match=next(iter(params))):
        Context.open(tiny("dense"), ContextParams(**params))


def test_fewer_outputs_than_sequences(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """One output row per sequence is always kept: llama.cpp asserts on less."""
    context = open_context(tiny("dense"), n_seq_max=8, n_outputs_max=1)
    assert context.n_outputs_max == 8


def test_kv_types_land(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """B11: element types reach the native params, and q8_0 takes less room than f32."""
    params = ContextParams(type_k="q8_0", type_v="q4_0", flash_attn=True).native(library())
    assert (params.type_k, params.type_v, params.flash_attn_type) == (8, 2, 1)
    assert ContextParams().native(library()).flash_attn_type == -1
    used = {
        kind: open_context(tiny("dense"), type_k=kind, type_v=kind).memory_bytes.kv_bytes
        for kind in ("f32", "f16", "bf16", "q8_0", "q4_0", "q5_0", "q5_1")
    }
    assert (
        used["q4_0"] < used["q5_0"] < used["q5_1"] < used["q8_0"] < used["f16"] == used["bf16"] < used["f32"]
    )


def test_quantised_v_needs_flash_attention(tiny: Callable[[str], Model]) -> None:
    """What llama.cpp refuses with a log line is said beforehand."""
    with pytest.raises(NotSupported, match="flash attention"):
        Context.open(tiny("dense"), ContextParams(type_v="q8_0", flash_attn=False))


def test_refused_context_quotes_llama_cpp(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal that only llama.cpp knows is load_failed with its words, and the model stays usable."""
    real = ContextParams.native

    def zero_batch(self: ContextParams, lib: Any) -> Any:
        params = real(self, lib)
        params.n_batch = params.n_ubatch = 0
        return params

    monkeypatch.setattr(ContextParams, "native", zero_batch)
    with pytest.raises(LoadFailed, match="n_batch and n_ubatch cannot both be zero"):
        Context.open(smollm2, ContextParams())
    assert smollm2.vocab.tokenize("still here")


# --- what decode checks -------------------------------------------------------------------------------


@pytest.fixture
def context(tiny: Callable[[str], Model], open_context: OpenContext) -> Context:
    """A dense context of 16 rows, 3 sequences, 4 outputs; sequence 0 holds 5 tokens."""
    context = open_context(tiny("dense"), n_ctx=256, n_batch=16, n_outputs_max=4)
    feed(context, [1, 2, 3, 4, 5])
    return context


def _refused(context: Context, batch: Batch, match: str) -> None:
    with pytest.raises(InvalidBatch, match=match):
        context.decode(batch)
    assert context.memory.pos_max(0) == 4  # nothing happened
    step(context, 6, 5)
    assert context.memory.pos_max(0) == 5  # and the context goes on


def test_empty_batch(context: Context) -> None:
    """B14: no rows."""
    _refused(context, Batch(4), "empty")


def test_more_rows_than_n_batch(context: Context) -> None:
    """B14: llama.cpp asserts n_tokens <= n_batch."""
    batch = Batch(17)
    batch.add(0, [1] * 17, 5)
    _refused(context, batch, "17 rows, the context takes 16")


def test_more_outputs_than_kept(context: Context) -> None:
    """B14: marking more rows than n_outputs_max asserts."""
    batch = Batch(16)
    batch.add(0, [1] * 5, 5, output="all")
    _refused(context, batch, "5 rows are marked for output, the context keeps 4")


@pytest.mark.parametrize("token", [-1, 2**31 - 1])
def test_token_outside_the_vocabulary(context: Context, token: int) -> None:
    """B14: ids that no vocabulary has."""
    batch = Batch(16)
    batch.add(0, [1, token], 5)
    _refused(context, batch, f"row 1: token {token} is not in the vocabulary")


def test_sequence_outside_the_context(context: Context) -> None:
    """B14: a unified context's own check lets ids up to 256 through; ours does not."""
    batch = Batch(16, n_seq_max=300)
    batch.add(3, [1], 0)
    _refused(context, batch, "row 0: sequence 3, the context has 3")
    batch.clear()
    batch.add(299, [1], 0)
    with pytest.raises(InvalidBatch, match="sequence 299"):
        context.decode(batch)


@pytest.mark.parametrize("pos", [0, 4, 6, -1])
def test_position_that_does_not_follow(context: Context, pos: int) -> None:
    """B14: the first row of a sequence goes on where its memory ends."""
    batch = Batch(16)
    batch.add(0, [1], pos)
    _refused(context, batch, f"row 0: position {pos}, the sequence goes on at 5")


def test_positions_with_a_hole(context: Context) -> None:
    """B14: rows of one sequence follow each other."""
    batch = Batch(16)
    batch.add(0, [1, 2], 5)
    batch.add(0, [3], 8)
    _refused(context, batch, "row 2: position 8 follows 7 - 1")


def test_outputs_only_where_marked(context: Context) -> None:
    """Logits of a row that was not marked, or of a row that is not there, are no_logits."""
    batch = Batch(16)
    batch.add(0, [6, 7], 5)
    assert context.decode(batch) == 0
    assert context.logits(1).shape == (context.n_vocab,)
    assert np.array_equal(context.logits(-1), context.logits(1))
    for row in (0, 2, -2, 500):
        with pytest.raises(NoLogits):
            context.logits(row)


def test_no_logits_before_a_decode(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """B14: reading or sampling before anything was decoded is no_logits."""
    model = tiny("dense")
    context = open_context(model)
    with pytest.raises(NoLogits):
        context.logits(0)
    with SamplerChain(model.vocab, SamplerParams()) as chain, pytest.raises(NoLogits):
        chain.sample(context, 0)


def test_logits_stay_what_they_were(tiny: Callable[[str], Model]) -> None:
    """B7: logits outlive the next decode, a larger output buffer and the context: they are a copy."""
    context = Context.open(tiny("dense"), ContextParams(n_ctx=4096, n_batch=2048, n_outputs_max=2048))
    kept = feed_logits(context, 1)
    before = kept.copy()
    feed_logits(context, 2048)  # llama.cpp moves its output buffer
    context.close()
    assert np.array_equal(kept, before)
    assert kept.any()


def feed_logits(context: Context, n: int) -> np.ndarray:
    """The logits of the first of `n` rows of a fresh sequence, as the context gives them."""
    context.memory.clear()
    batch = Batch(n)
    first = batch.add(0, prompt(context.model, n), 0, output="all")
    assert context.decode(batch) == 0
    return context.logits(first)


def test_use_after_close(tiny: Callable[[str], Model]) -> None:
    """B7: everything on a closed context raises `freed`; closing twice is nothing."""
    context = Context.open(tiny("dense"), ContextParams(n_ctx=256, n_batch=16))
    batch = Batch(4)
    batch.add(0, [1], 0)
    memory = context.memory
    context.close()
    context.close()
    uses: list[Callable[[], object]] = [
        lambda: context.decode(batch),
        lambda: context.logits(0),
        lambda: memory.rm(0),
        lambda: memory.pos_max(0),
        lambda: context.state_size(0),
        lambda: context.state_set(0, b"abcd"),
        lambda: context.memory_bytes,
        lambda: context.synchronize(),
        lambda: context.set_threads(1),
    ]
    for use in uses:
        with pytest.raises(HandleClosed):
            use()
    context.abort.raise_flag()  # the flag's memory outlives the context


def test_one_call_at_a_time(tiny: Callable[[str], Model]) -> None:
    """B7: threads use one context while it is closed: answers or `freed`, never a crash."""
    context = Context.open(tiny("dense"), ContextParams(n_ctx=256, n_batch=16, n_seq_max=4))
    refused: list[str] = []

    def hammer(seq_id: int) -> None:
        try:
            while True:
                feed(context, [1, 2, 3], seq_id=seq_id)
                context.memory.rm(seq_id)
        except NoLogits:
            hammer(seq_id)  # another thread's decode came between decode and logits
        except HandleClosed as error:
            refused.append(error.reason)

    threads = [threading.Thread(target=hammer, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        context.memory.pos_max(0)
    context.close()
    for thread in threads:
        thread.join()
    assert refused == ["freed"] * 3


def test_embedding_model(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """Embedding-only models: no memory, pooled rows, and input beyond n_ubatch is refused, not asserted."""
    model = tiny("embedding")
    context = open_context(model, n_ctx=256, n_batch=64, n_ubatch=32, embeddings=True, pooling="mean")
    with pytest.raises(NotSupported, match="no memory"):
        _ = context.memory
    batch = Batch(64, 3)
    batch.add(0, prompt(model, 10), 0, output="all")
    batch.add(1, prompt(model, 10, seed=1), 0, output="all")
    assert context.encode(batch) == 0
    first, second = context.embeddings_seq(0).copy(), context.embeddings_seq(1).copy()
    assert first.shape == (model.facts.n_embd_out,)
    assert off_by(first, second) > 0
    with pytest.raises(NoLogits):
        context.embeddings_seq(2)
    batch.clear()
    batch.add(0, prompt(model, 31), 0, output="all")
    for compute in (context.encode, context.decode):
        with pytest.raises(InvalidBatch, match="at most n_ubatch = 30"):
            compute(batch)


@pytest.mark.parametrize("n_ubatch", [1, 2, 3, 16, 63, 64])
def test_pooled_rows_and_sequences(
    tiny: Callable[[str], Model], open_context: OpenContext, n_ubatch: int
) -> None:
    """Mean pooling asserts when n_ubatch is no multiple of n_seq_max: rounded down, or refused."""
    shape = {"n_ctx": 256, "n_batch": 64, "n_ubatch": n_ubatch, "embeddings": True, "pooling": "mean"}
    if n_ubatch < 3:
        with pytest.raises(InvalidOption, match="n_seq_max=3"):
            open_context(tiny("embedding"), **shape)
    else:
        assert open_context(tiny("embedding"), **shape).n_ubatch == n_ubatch // 3 * 3


def test_token_embeddings_of_a_generator(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """A generating model in embedding mode gives a vector per row, and the logits it gives without."""
    model = tiny("dense")
    context = open_context(model, n_batch=16, embeddings=True, pooling="none")
    plain = open_context(model, n_batch=16)
    batch = Batch(16, 3)
    batch.add(0, [30, 31, 32], 0, output="all")
    assert context.decode(batch) == 0
    assert plain.decode(batch) == 0
    assert context.embeddings(2).shape == (model.facts.n_embd_out,)
    assert off_by(context.embeddings(0), context.embeddings(2)) > 0
    assert off_by(context.logits(2), plain.logits(2)) == 0
    assert plain.logits(2).any()
    with pytest.raises(NoLogits, match="sequence 1099511627776"):
        context.embeddings_seq(2**40)


def test_embedding_models_have_no_logits(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """What only embeds leaves an untouched buffer where logits would be: reading and sampling are errors."""
    model = tiny("embedding")
    context = open_context(model, n_batch=16, embeddings=True, pooling="mean")
    batch = Batch(16, 3)
    batch.add(0, [30, 31, 32], 0, output="all")
    assert context.encode(batch) == 0
    with pytest.raises(NoLogits, match="only makes embeddings"):
        context.logits(2)
    with SamplerChain(model.vocab, SamplerParams()) as chain, pytest.raises(NoLogits):
        chain.sample(context, 2)


def test_only_embedding_models_encode(context: Context) -> None:
    """An encode of a model with memory would end the process."""
    batch = Batch(16)
    batch.add(0, [1, 2], 5, output="all")
    with pytest.raises(NotSupported, match="does not encode"):
        context.encode(batch)
    step(context, 6, 5)


def test_rows_of_a_causal_embedding_context(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """More rows than n_ubatch are no fault of a causal model: it decodes them."""
    context = open_context(tiny("dense"), n_batch=64, n_ubatch=16, n_seq_max=1, embeddings=True)
    batch = Batch(64)
    batch.add(0, prompt(context.model, 40), 0, output="all")
    assert context.decode(batch) == 0


@pytest.mark.parametrize("kind", ["bert", "positions"])
def test_learned_positions_end(tiny: Callable[[str], Model], open_context: OpenContext, kind: str) -> None:
    """llama.cpp asserts on a position that the model has no row for."""
    context = open_context(
        tiny(kind), n_ctx=512, n_batch=300, n_seq_max=1, embeddings=kind == "bert", n_outputs_max=1
    )
    batch = Batch(300)
    batch.add(0, [20] * 129, 0, output="all" if kind == "bert" else "last")
    with pytest.raises(InvalidBatch, match="position 128, and this model has 128"):
        context.decode(batch)
    batch.clear()
    batch.add(0, [20] * 128, 0, output="all" if kind == "bert" else "last")
    assert context.decode(batch) == 0


def test_compute_buffer_stays_small(gemma: Model, open_context: OpenContext) -> None:
    """LLAMA_CPP: with 8 outputs gemma-3-270m needs under 40 MiB to compute, with 512 over ten times that."""
    small = open_context(gemma, n_ctx=2048, n_batch=512, n_outputs_max=8).memory_bytes.compute_bytes
    large = open_context(gemma, n_ctx=2048, n_batch=512, n_outputs_max=512).memory_bytes.compute_bytes
    assert small < 40 * 2**20
    assert large > 10 * small


def test_no_room_changes_nothing(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """LLAMA_CPP: rc 1 leaves every sequence as it was, and room makes the same batch work."""
    context = open_context(tiny("dense"), n_ctx=256, n_batch=128)
    reference = open_context(tiny("dense"), n_ctx=256, n_batch=128)
    tokens = prompt(context.model, 200)
    feed(context, tokens)
    feed(reference, tokens)
    batch = Batch(128, 3)
    batch.add(1, tokens[:100], 0)
    assert context.decode(batch) == 1
    assert (context.memory.pos_max(0), context.memory.pos_max(1)) == (199, -1)
    with pytest.raises(NoLogits):
        context.logits(99)
    assert off_by(step(context, 7, 200), step(reference, 7, 200)) == 0
    context.memory.rm(0)
    assert context.decode(batch) == 0


def test_threads_can_be_changed(context: Context) -> None:
    """Another number of threads takes effect on a living context."""
    for bad in ((0, None), (1, 0), (-1, 1), (513, None), (1, 2**40)):
        with pytest.raises(InvalidOption):
            context.set_threads(*bad)
    context.set_threads(1, 2)
    context.synchronize()
    feed(context, [6], pos=5)
