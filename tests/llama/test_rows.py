"""Many rows at once: token for token what each chain samples by itself, and errors of one row only."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from erllama.backend import Guide, ThinkingSpan
from erllama.errors import (
    DecodeFailed,
    HandleClosed,
    InvalidBatch,
    InvalidGrammar,
    NativeError,
    NoLogits,
    NotSupported,
)
from erllama.llama import Batch, SamplerChain, SamplerParams, decode_rows, live_samplers, sample_rows

from .support import feed, prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from erllama.llama import Context, Model

    from .support import OpenContext

pytestmark = pytest.mark.model

N_ROWS = 8
DIGITS = "root ::= [0-9]+"


@pytest.fixture
def chain() -> Iterator[Callable[..., SamplerChain]]:
    """`chain(model, temperature=…)`: chains that are closed with the test; afterwards none is left."""
    before = live_samplers()
    made: list[SamplerChain] = []

    def make(model: Model, **params: Any) -> SamplerChain:
        made.append(SamplerChain(model.vocab, SamplerParams(**params)))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert live_samplers() == before


@pytest.fixture
def context(tiny: Callable[[str], Model], open_context: OpenContext) -> Context:
    """A context whose rows 0 to 7 have logits."""
    return _with_rows(open_context(tiny("dense")), prompt(tiny("dense"), N_ROWS))


def _with_rows(context: Context, tokens: list[int]) -> Context:
    batch = Batch(len(tokens))
    batch.add(0, tokens, 0, output="all")
    assert context.decode(batch) == 0
    return context


def _native(context: Context, i: int) -> np.ndarray:
    """Row i's logits, where the samplers read them."""
    with context.handle as ptr:
        floats = context.lib.get_logits_ith(ptr, i)
    return np.frombuffer(context.lib.ffi.buffer(floats, context.n_vocab * 4), np.float32)


def _outcome(sample: Callable[[], Any]) -> Any:
    try:
        return sample()
    except Exception as error:
        return error


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Exception):
        return type(found) is type(expected) and str(found) == str(expected)
    return type(found) is int and found == expected


def _logits(rng: np.random.Generator, n: int) -> np.ndarray:
    """Rows as they are, and as they should not be: ties at the top and everywhere, infinities, few values."""
    kind = rng.integers(0, 8)
    logits = (rng.normal(0, rng.choice([0.1, 3.0, 30.0]), n)).astype(np.float32)
    if kind == 1:
        logits = np.round(logits)  # many ties
    elif kind == 2:
        logits[rng.integers(0, n, n // 3)] = -np.inf
    elif kind == 3:
        logits[rng.integers(0, n, 5)] = logits.max() + 1  # a tie at the top
    elif kind == 4:
        logits[:] = rng.choice([0.0, -0.0, 1.0], n)
    elif kind == 5:
        logits = np.sort(logits)  # every one is larger than those before
    elif kind == 6:
        logits[:] = -np.inf
        logits[rng.integers(0, n, rng.integers(0, 4))] = 1.5
    elif kind == 7:
        logits[rng.integers(0, n, 2)] = rng.choice([np.inf, np.nan])
    return logits


def _params(rng: random.Random, n_vocab: int) -> dict[str, Any]:
    """A chain of any kind."""
    values = [-math.inf, math.inf, -100.0, -1.0, 0.0, 0.5, 2.0, 100.0]
    n_biased = rng.choice([0, 0, 1, 3, 40, n_vocab // 2])
    return {
        "temperature": rng.choice([0.0, 9e-7, 1e-5, 0.3, 0.8, 1.5, 5.0]),
        "top_k": rng.choice([0, 1, 2, 5, 40, 127, 128, 129, 200, n_vocab, 2 * n_vocab]),
        "top_p": rng.choice([0.0, 0.3, 0.95, 1.0]),
        "min_p": rng.choice([0.0, 0.05, 0.9, 1.0]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.0, 1.3]),
        "penalty_last_n": rng.choice([0, 8]),
        "seed": rng.randrange(2**32),
        "logit_bias": {t: rng.choice(values) for t in rng.sample(range(n_vocab), n_biased)},
        "grammar": rng.choice([None, None, None, None, DIGITS]),
        "grammar_first": rng.choice([False, True]),
    }


@pytest.mark.slow
def test_rows_get_what_their_chains_choose(context: Context, chain: Callable[..., SamplerChain]) -> None:
    """Thousands of rows of any logits under chains of any kind: the same tokens, the same errors."""
    rng, numbers = random.Random(1), np.random.default_rng(1)
    n_tokens = n_errors = 0
    for _ in range(150):
        params = [_params(rng, context.n_vocab) for _ in range(N_ROWS)]
        alone = [chain(context.model, **p) for p in params]
        together = [chain(context.model, **p) for p in params]
        for _ in range(4):
            order = rng.sample(range(N_ROWS), N_ROWS)
            for i in range(N_ROWS):
                _native(context, i)[:] = _logits(numbers, context.n_vocab)
            expected = [
                _outcome(lambda c=c, i=i: c.sample(context, i)) for c, i in zip(alone, order, strict=True)
            ]
            before = [_native(context, i).copy() for i in range(N_ROWS)]
            found = sample_rows(context, together, order)
            for one, other, p in zip(found, expected, params, strict=True):
                assert _same(one, other), (one, other, p)
                n_errors += isinstance(one, Exception)
                n_tokens += not isinstance(one, Exception)
            for i in range(N_ROWS):
                assert _native(context, i).tobytes() == before[i].tobytes()
        for each in (*alone, *together):
            each.close()
    assert n_tokens > 2500
    assert n_errors > 50


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "logit_bias": {198: -math.inf, 28: 3.0, 0: 1.0}},
        {"temperature": 0.8},
        {"temperature": 1.4, "top_k": 100, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 1.0, "top_k": 12, "top_p": 0.9, "logit_bias": {198: -math.inf, 28: 3.0}},
        {"temperature": 1.0, "top_k": 500, "top_p": 0.99},
        {"temperature": 0.7, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_a_models_logits(
    smollm2: Model, open_context: OpenContext, chain: Callable[..., SamplerChain], params: dict[str, Any]
) -> None:
    """On the logits of SmolLM2: 40 draws of each of 24 rows."""
    text = "The quick brown fox jumps over the lazy dog, and 1 + 2 = 3. Once upon a time there was a"
    tokens = smollm2.vocab.tokenize(text)[:24]
    context = _with_rows(open_context(smollm2, n_outputs_max=64), tokens)
    rows = range(len(tokens))
    alone = [chain(smollm2, **params, seed=i) for i in rows]
    together = [chain(smollm2, **params, seed=i) for i in rows]
    for _ in range(40):
        expected = [c.sample(context, i) for c, i in zip(alone, rows, strict=True)]
        assert sample_rows(context, together, rows) == expected


def test_an_error_is_one_rows_own(
    tiny: Callable[[str], Model], context: Context, smollm2: Model, chain: Callable[..., SamplerChain]
) -> None:
    """Whatever is wrong with one row, the others are sampled."""
    dense = tiny("dense")
    nothing = dict.fromkeys(range(dense.facts.n_vocab), -math.inf)
    closed = chain(dense)
    closed.close()
    good = [chain(dense, temperature=0.0) for _ in range(2)]
    chains = [
        good[0],
        closed,
        chain(smollm2),
        chain(dense),
        chain(dense, logit_bias=nothing),
        chain(dense, temperature=0.0, logit_bias=nothing),
        chain(dense, temperature=0.0),
        chain(dense),
        good[1],
    ]
    _native(context, 3)[5] = math.nan
    found = sample_rows(context, chains, [0, 1, 1, N_ROWS, 2, 2, 3, 3, 4])
    kinds = [HandleClosed, NotSupported, NoLogits, InvalidGrammar, InvalidGrammar, DecodeFailed, DecodeFailed]
    assert [type(each) for each in found[1:8]] == kinds
    assert [found[0], found[8]] == [int(context.logits(0).argmax()), int(context.logits(4).argmax())]


def test_an_exception_of_native_code_is_one_rows_own(
    tiny: Callable[[str], Model], context: Context, chain: Callable[..., SamplerChain]
) -> None:
    """A grammar that throws fails its own request, and says so; nothing crosses into the others."""
    dense = tiny("dense")
    lib, (letter,) = dense.lib, dense.vocab.tokenize("x", add_special=False)[-1:]
    native = lib.sampler_chain_init(lib.sampler_chain_default_params())
    lib.sampler_chain_add(native, lib.sampler_init_grammar(dense.vocab._ptr, DIGITS.encode(), b"root"))
    wrapped = lib.sampling_new(dense.facts.n_vocab, native, lib.ffi.NULL, lib.ffi.NULL, False, False)
    bad, *good = (chain(dense, temperature=0.0) for _ in range(3))
    bad.row.chain = native  # it is told of a token that nobody has asked it about
    _native(context, 1)[letter] = 1e9
    try:
        found = sample_rows(context, [good[0], bad, good[1]], [0, 1, 2])
    finally:
        lib.sampling_free(wrapped)
    assert isinstance(found[1], NativeError)
    assert "empty grammar stack" in str(found[1])
    assert [found[0], found[2]] == [int(context.logits(i).argmax()) for i in (0, 2)]


def test_no_rows(context: Context) -> None:
    """Nothing to sample is nothing; a closed context is refused."""
    assert sample_rows(context, [], []) == []
    context.close()
    with pytest.raises(HandleClosed):
        sample_rows(context, [], [])


def test_rows_without_logits_are_refused(
    tiny: Callable[[str], Model], open_context: OpenContext, chain: Callable[..., SamplerChain]
) -> None:
    """A row that was not marked has none, whatever its index: llama.cpp would assert."""
    dense = tiny("dense")
    context = open_context(dense)
    feed(context, prompt(dense, 20))
    rows = [0, 18, 20, -1, -5, 19]
    found = sample_rows(context, [chain(dense, temperature=0.0) for _ in rows], rows)
    assert [isinstance(each, NoLogits) for each in found] == [True] * 5 + [False]


def test_which_chains_leave_most_of_the_vocabulary_out(
    tiny: Callable[[str], Model], chain: Callable[..., SamplerChain]
) -> None:
    """Greedy ones and those with a top_k; none with a grammar, a penalty, or anything not known here."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class More(SamplerParams):
        unheard_of: int = 0

    def ways(**params: Any) -> tuple[bool, int]:
        row = chain(tiny("dense"), **params).row
        return row.is_greedy, row.top_k

    assert ways(temperature=0.0, top_k=7) == (True, 0)
    assert ways(temperature=0.0, logit_bias={1: 2.0}, seed=3, grammar_first=True) == (True, 0)
    assert ways(top_k=7, min_p=0.0, top_p=0.5) == (False, 7)
    assert ways(top_k=7, repetition_penalty=1.1, penalty_last_n=0) == (False, 7)
    assert ways(top_k=7, guide=Guide(prefill=(5, 6), visible={3: b"x"})) == (False, 7)
    span = ThinkingSpan(start=(5,), ends=((6,),), forced=(6,), budget=3)
    assert ways(top_k=7, guide=Guide(thinking=span)) == (False, 0)
    assert ways(grammar=DIGITS, guide=Guide(lazy=True, trigger_tokens=(5,))) == (False, 0)
    for params in ({"repetition_penalty": 1.1}, {"grammar": DIGITS}, {"temperature": 0.0, "grammar": DIGITS}):
        assert ways(**params) == (False, 0)
    for unheard_of, expected in ((0, 40), (1, 0)):
        with SamplerChain(tiny("dense").vocab, More(unheard_of=unheard_of)) as one:
            assert one.row.top_k == expected


# --- decoded and sampled in one call ---


def _start(batch: Batch, tokens: list[int]) -> list[int]:
    """Two sequences with one half each, the last rows marked; returns these."""
    half = len(tokens) // 2
    batch.clear()
    return [batch.add(seq, tokens[seq * half : (seq + 1) * half], 0) for seq in range(2)]


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"repetition_penalty": 1.3}, {"grammar": DIGITS}]
)
def test_decoding_and_sampling_in_one_call_is_the_same_as_in_two(
    tiny: Callable[[str], Model],
    open_context: OpenContext,
    chain: Callable[..., SamplerChain],
    params: dict[str, Any],
) -> None:
    """Twenty steps of two sequences: the same tokens, the same logits, in the same order."""
    dense, told = tiny("dense"), []
    for merged in (False, True):
        context, batch = open_context(dense, n_seq_max=2), Batch(64, 2)
        chains = [chain(dense, seed=i, **params) for i in range(2)]
        rows, found = _start(batch, prompt(dense, 20)), []
        for i in range(20):
            if merged:
                decoded = decode_rows(context, batch, chains, rows)
                assert (decoded.rc, len(decoded.outcomes)) == (0, 2)
                assert min(decoded.compute_s, decoded.cpu_s, decoded.sample_s) > 0
                tokens = decoded.outcomes
            else:
                assert context.decode(batch) == 0
                tokens = sample_rows(context, chains, rows)
            found.append((tokens, [context.logits(row).tobytes() for row in rows]))
            batch.fill([0, 1], tokens, [10 + i, 10 + i])
            rows = [0, 1]
        told.append(found)
    assert told[0] == told[1]


def test_what_is_not_decoded_is_not_sampled(
    tiny: Callable[[str], Model], open_context: OpenContext, chain: Callable[..., SamplerChain]
) -> None:
    """Refused, aborted or without room: no chain draws, so the next try gives what the first would have."""
    dense = tiny("dense")
    context, batch = open_context(dense), Batch(64)
    drawing, fresh = chain(dense, seed=1), chain(dense, seed=1)
    row = batch.add(0, [*prompt(dense, 10), dense.facts.n_vocab], 0)
    with pytest.raises(InvalidBatch):
        decode_rows(context, batch, [drawing], [row])
    batch.clear()
    row = batch.add(0, prompt(dense, 10), 0)
    context.abort.raise_flag()
    decoded = decode_rows(context, batch, [drawing], [row])
    assert (decoded.rc, decoded.outcomes, decoded.sample_s) == (2, [], 0.0)
    context.abort.clear()
    context.memory.clear(data=False)
    assert decode_rows(context, batch, [drawing], [row]).outcomes == [fresh.sample(context, row)]


def test_rows_that_will_have_no_logits_are_refused(
    tiny: Callable[[str], Model], open_context: OpenContext, chain: Callable[..., SamplerChain]
) -> None:
    """They are known before the decode: the others are sampled."""
    dense = tiny("dense")
    context, batch = open_context(dense), Batch(64)
    batch.add(0, prompt(dense, 20), 0)
    rows = [0, 18, 20, -1, -5, 19]
    closed = chain(dense)
    chains = [*(chain(dense, temperature=0.0) for _ in rows), closed]
    closed.close()
    decoded = decode_rows(context, batch, chains, [*rows, 19])
    kinds = [NoLogits] * 5 + [int, HandleClosed]
    assert [type(each) for each in decoded.outcomes] == kinds
    assert decoded.outcomes[5] == int(context.logits(19).argmax())
