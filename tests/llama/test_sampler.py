"""Choosing tokens: the chain, its seeds, grammars, and what is refused."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from erllama.errors import (
    DecodeFailed,
    HandleClosed,
    InvalidContent,
    InvalidGrammar,
    InvalidOption,
    NativeError,
    NoLogits,
    NotSupported,
)
from erllama.llama import Batch, Context, Model, SamplerChain, SamplerParams, live_samplers

from .support import feed, prompt, step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .support import OpenContext

pytestmark = pytest.mark.model

DIGITS = "root ::= [0-9] [0-9] [0-9] [0-9] [0-9] [0-9]"


@pytest.fixture
def dense(tiny: Callable[[str], Model]) -> Model:
    """The dense tiny model."""
    return tiny("dense")


@pytest.fixture
def context(dense: Model, open_context: OpenContext) -> Context:
    """A context whose row 19 has logits to sample from."""
    context = open_context(dense)
    feed(context, prompt(dense, 20))
    return context


@pytest.fixture
def chain(dense: Model) -> Iterator[Callable[..., SamplerChain]]:
    """`chain(temperature=…)`: chains that are closed with the test; afterwards none is left."""
    before = live_samplers()
    made: list[SamplerChain] = []

    def make(model: Model = dense, **params: Any) -> SamplerChain:
        chain = SamplerChain(model.vocab, SamplerParams(**params))
        made.append(chain)
        return chain

    yield make
    for each in made:
        each.close()
    assert live_samplers() == before


def test_greedy_takes_the_largest(context: Context, chain: Callable[..., SamplerChain]) -> None:
    """Temperature 0 is the argmax, whatever the other settings say."""
    best = int(context.logits(19).argmax())
    assert chain(temperature=0).sample(context, 19) == best
    assert chain(temperature=0, top_k=1, top_p=0.1, seed=5).sample(context, 19) == best
    assert chain(temperature=0.7, top_k=1).sample(context, 19) == best


def test_seed_decides(context: Context, chain: Callable[..., SamplerChain]) -> None:
    """The same seed draws the same tokens, another seed others; reset starts over."""

    def draw(sampler: SamplerChain) -> list[int]:
        return [sampler.sample(context, 19) for _ in range(30)]

    hot = {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    first = chain(seed=7, **hot)
    drawn = draw(first)
    assert draw(chain(seed=7, **hot)) == drawn
    assert draw(chain(seed=8, **hot)) != drawn
    first.reset()
    assert draw(first) == drawn


def test_filters_narrow_the_choice(context: Context, chain: Callable[..., SamplerChain]) -> None:
    """top_k, top_p and min_p each keep only likely tokens."""
    order = [int(t) for t in context.logits(19).argsort()[::-1]]
    wide = {"temperature": 20.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

    def seen(**params: Any) -> Counter[int]:
        sampler = chain(**{**wide, **params})
        return Counter(sampler.sample(context, 19) for _ in range(200))

    assert len(seen()) > 20
    assert set(seen(top_k=3)) == set(order[:3])
    assert set(seen(top_p=1e-6)) == {order[0]}
    assert set(seen(min_p=1.0)) == {order[0]}


def test_bias_and_ban(context: Context, chain: Callable[..., SamplerChain]) -> None:
    """A bias lifts a token over all others; minus infinity bans one. Mappings and pairs both do."""
    order = [int(t) for t in context.logits(19).argsort()[::-1]]
    assert chain(temperature=0, logit_bias={order[5]: 1000.0}).sample(context, 19) == order[5]
    banned = chain(temperature=0, logit_bias=((order[0], -math.inf), (order[1], -math.inf)))
    assert banned.sample(context, 19) == order[2]


def test_banning_everything_is_an_error(
    dense: Model, context: Context, chain: Callable[..., SamplerChain]
) -> None:
    """With no token left there is a typed error, not an arbitrary token."""
    nothing = dict.fromkeys(range(dense.facts.n_vocab), -math.inf)
    with pytest.raises(InvalidGrammar, match="no token"):
        chain(temperature=0, logit_bias=nothing).sample(context, 19)


def test_suppressed_tokens_are_never_chosen(
    dense: Model, context: Context, chain: Callable[..., SamplerChain], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that the GGUF lists as suppressed are banned, whatever the request's bias says."""
    best, second = (int(t) for t in context.logits(19).argsort()[::-1][:2])
    monkeypatch.setattr(dense.vocab, "suppressed", (best,))
    assert chain(temperature=0, logit_bias={best: 50.0}).sample(context, 19) == second


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-30, 9e-7])
def test_tiny_temperatures_are_greedy(
    context: Context, chain: Callable[..., SamplerChain], temperature: float
) -> None:
    """Logits divided by next to nothing overflow a float, and the draw would be arbitrary."""
    best = int(context.logits(19).argmax())
    wide = chain(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
    assert [wide.sample(context, 19) for _ in range(5)] == [best] * 5


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, math.nan]),
        ("top_k", [-1, 2**31]),
        ("top_p", [-0.1, 1.1, math.nan]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [-1.0, math.nan]),
        ("penalty_last_n", [-1, 2**31]),
        ("seed", [-1, 2**32]),
    ],
)
def test_params_that_do_not_fit(chain: Callable[..., SamplerChain], name: str, values: list[float]) -> None:
    """Numbers that llama.cpp's types do not hold, and NaN, are invalid_option."""
    for value in values:
        with pytest.raises(InvalidOption, match=name):
            chain(**{name: value})


def test_nan_is_no_bias(chain: Callable[..., SamplerChain]) -> None:
    """A bias that is no number is refused."""
    with pytest.raises(InvalidContent, match="NaN"):
        chain(logit_bias={1: math.nan})


def test_chain_of_another_model(smollm2: Model, context: Context, chain: Callable[..., SamplerChain]) -> None:
    """A chain of a larger vocabulary would read beyond the logits."""
    with pytest.raises(NotSupported, match="fits the model"):
        chain(smollm2).sample(context, 19)


def test_a_chain_that_fails_half_way_frees_its_parts(
    dense: Model, chain: Callable[..., SamplerChain], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a later part cannot be made, grammar and chain are freed."""
    lib = dense.lib
    made: list[int] = []
    freed: list[int] = []
    address = lambda ptr: int(lib.ffi.cast("uintptr_t", ptr))  # noqa: E731  # one expression, used twice

    def spy(name: str, note: Callable[[Any, tuple[Any, ...]], None]) -> None:
        real = getattr(lib, name)

        def call(*args: Any) -> Any:
            result = real(*args)
            note(result, args)
            return result

        monkeypatch.setattr(lib, name, call)

    spy("sampler_init_grammar", lambda result, _: made.append(address(result)))
    spy("sampler_chain_init", lambda result, _: made.append(address(result)))
    spy("sampler_free", lambda _, args: freed.append(address(args[0])))

    def fail(*_: Any) -> Any:
        raise NativeError("out of memory", reason="oom")

    monkeypatch.setattr(lib, "sampling_new", fail)
    with pytest.raises(NativeError):
        chain(grammar=DIGITS)
    assert len(made) == 2
    assert sorted(freed) == sorted(made)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_bias_outside_the_vocabulary(chain: Callable[..., SamplerChain], token: int) -> None:
    """B14: a bias for a token that does not exist is refused."""
    with pytest.raises(InvalidContent, match="logit_bias"):
        chain(logit_bias={token: 1.0})


def test_repetition_penalty(context: Context, chain: Callable[..., SamplerChain]) -> None:
    """A strong penalty keeps greedy choice from repeating itself, as far back as it looks."""
    greedy = chain(temperature=0, repetition_penalty=1e9)
    drawn = [greedy.sample(context, 19) for _ in range(5)]
    assert len(set(drawn)) == 5
    short = chain(temperature=0, repetition_penalty=1e9, penalty_last_n=1)
    again = [short.sample(context, 19) for _ in range(6)]
    assert len(set(again)) == 2


def test_accepted_tokens_count_for_the_penalty(context: Context, chain: Callable[..., SamplerChain]) -> None:
    """`accept` is like having sampled the token."""
    best = int(context.logits(19).argmax())
    greedy = chain(temperature=0, repetition_penalty=1e9)
    greedy.accept(best)
    assert greedy.sample(context, 19) != best


@pytest.mark.parametrize("token", [-1, 10**6])
def test_accept_outside_the_vocabulary(chain: Callable[..., SamplerChain], token: int) -> None:
    """B14: ids that no vocabulary has are refused by accept."""
    with pytest.raises(InvalidContent):
        chain().accept(token)


def test_rows_without_logits(context: Context, chain: Callable[..., SamplerChain]) -> None:
    """Sampling a row that was not marked is no_logits: llama.cpp would assert."""
    sampler = chain()
    for row in (0, 18, 20, -5):
        with pytest.raises(NoLogits):
            sampler.sample(context, row)
    batch = Batch(4, 3)
    batch.add(0, [1], 20, output="none")
    assert context.decode(batch) == 0
    with pytest.raises(NoLogits):
        sampler.sample(context, 0)


def test_nan_is_an_error(context: Context, chain: Callable[..., SamplerChain]) -> None:
    """A model that computes no numbers gives a typed error, not a token."""
    with context.handle as native:
        pointer = context.lib.get_logits_ith(native, 19)
    before = pointer[5]
    pointer[5] = math.nan
    try:
        with pytest.raises(DecodeFailed, match="NaN"):
            chain(temperature=0).sample(context, 19)
    finally:
        pointer[5] = before


def test_use_after_close(dense: Model, context: Context) -> None:
    """A closed chain raises `freed`; closing twice is nothing; the count goes back."""
    before = live_samplers()
    sampler = SamplerChain(dense.vocab, SamplerParams(grammar=DIGITS))
    assert live_samplers() == before + 1
    sampler.close()
    sampler.close()
    assert live_samplers() == before
    for use in (lambda: sampler.sample(context, 19), lambda: sampler.accept(1), sampler.reset):
        with pytest.raises(HandleClosed):
            use()


def test_a_chain_keeps_its_model(tiny_gguf: Callable[[str], Any]) -> None:
    """B8: a model with a living sampler closes later."""
    model = Model.open(tiny_gguf("dense"))
    sampler = SamplerChain(model.vocab, SamplerParams(grammar=DIGITS))
    assert model.close() == "deferred"
    sampler.reset()
    sampler.close()
    assert model.handle.freed


# --- grammars ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("grammar_first", [False, True])
def test_grammar_shapes_the_text(smollm2: Model, open_context: OpenContext, grammar_first: bool) -> None:
    """With a grammar the text is a member of it, and the end comes where the grammar ends."""
    context = open_context(smollm2, n_ctx=256, n_batch=64)
    ids = smollm2.vocab.tokenize("The year is")
    params = SamplerParams(
        temperature=0, grammar="root ::= [0-9] [0-9] [0-9] [0-9]", grammar_first=grammar_first
    )
    feed(context, ids)
    out: list[int] = []
    with SamplerChain(smollm2.vocab, params) as sampler:
        token = sampler.sample(context, len(ids) - 1)
        while not smollm2.vocab.is_eog(token):
            out.append(token)
            step(context, token, len(ids) + len(out) - 1)
            token = sampler.sample(context, 0)
    text = smollm2.vocab.detokenize(out)
    assert len(text) == 4
    assert text.isdigit()


def test_both_grammar_orders_agree_when_greedy(
    smollm2: Model, open_context: OpenContext, chain: Callable[..., SamplerChain]
) -> None:
    """Rejecting one candidate and asking again chooses what filtering first chooses."""
    context = open_context(smollm2, n_ctx=256, n_batch=64)
    ids = smollm2.vocab.tokenize("The capital of France is")
    feed(context, ids)
    grammar = 'root ::= " " ("Rome" | "Berlin" | "Madrid")'
    chosen = {
        chain(smollm2, temperature=0, grammar=grammar, grammar_first=first).sample(context, len(ids) - 1)
        for first in (False, True)
    }
    assert len(chosen) == 1


def test_grammar_refuses_a_forced_token(dense: Model, chain: Callable[..., SamplerChain]) -> None:
    """An accepted token must fit the grammar; an end token in the middle would abort the process."""
    sampler = chain(grammar=DIGITS)
    (letter,) = dense.vocab.tokenize("x", add_special=False)[-1:]
    for token in (letter, dense.vocab.eos):
        with pytest.raises(InvalidGrammar, match=f"does not allow token {token}"):
            sampler.accept(token)
    (digit,) = dense.vocab.tokenize("7", add_special=False)[-1:]
    for _ in range(6):
        sampler.accept(digit)
    with pytest.raises(InvalidGrammar):
        sampler.accept(digit)
    sampler.reset()
    sampler.accept(digit)


@pytest.mark.parametrize(
    "repetition",
    ["{2}", "{0,3}", "{2,}", "{0}", "{ 1 , 4 }", "{2}{3}", "*", "+", "?", "{0,99}", "{3,9999}"],
)
def test_good_repetitions(chain: Callable[..., SamplerChain], repetition: str) -> None:
    """What llama.cpp accepts is not refused by our own look at it."""
    chain(grammar=f'root ::= ("a" [b\\]"] x){repetition} # {{5,2}} (((\nx ::= "{{9,1}}(" | "(\\""')


@pytest.mark.parametrize(
    ("grammar", "line", "text"),
    [
        ("root ::= (", 1, "expecting"),
        ("root ::= [a-z]+\nother ::= %\n", 2, "expecting"),
        ("# comment\n\nroot ::= missing\n", 3, "Undefined rule identifier 'missing'"),
        ('root = "a"', 1, "expecting ::="),
        ('start ::= "a"', 1, "no rule named 'root'"),
        ('root ::= "abc', 1, ""),
        ("root ::= [abc", 1, ""),
        ('root ::= "b"\nx ::= "a"{5,2}', 2, "at least 5 and at most 2"),  # would eat all memory
        ('root ::= "a"{ 7 , 2 }', 1, "at least 7 and at most 2"),
        ('root ::= "a"{99999999}', 1, "exceeds sane defaults"),
        ('root ::= "' + "x" * 100_000 + '"{1000}', 1, "more than 1048576 elements"),
        ('root ::= "a" {', 1, "expecting an int"),
        ('root ::= "a"{2,x}', 1, "expecting '}'"),
        ("root ::= " + "(" * 100_000, 1, "nested deeper"),
        ("root ::= *", 1, "expecting"),
    ],
)
def test_bad_grammars(chain: Callable[..., SamplerChain], grammar: str, line: int, text: str) -> None:
    """A grammar that does not parse is invalid_grammar with llama.cpp's words and the line."""
    with pytest.raises(InvalidGrammar) as caught:
        chain(grammar=grammar)
    assert text in str(caught.value)
    assert isinstance(caught.value.detail, dict)
    assert caught.value.detail["line"] == line


@pytest.mark.parametrize(
    "grammar", ["", " \n", 'root ::= "a\0b"', 'root ::= "\ud800"', "x" * (4 * 2**20 + 1)]
)
def test_grammars_that_are_no_text(chain: Callable[..., SamplerChain], grammar: str) -> None:
    """Empty text, NUL bytes, lone surrogates and megabytes are invalid_grammar."""
    with pytest.raises(InvalidGrammar):
        chain(grammar=grammar)


def rules(n: int, shape: str) -> str:
    """A grammar of `n` rules, each of which is `shape` with the next one's name in place of NEXT."""
    lines = [f"r{i} ::= " + shape.replace("NEXT", f"r{i + 1}") for i in range(n)]
    return "\n".join(["root ::= r0", *lines, f'r{n} ::= "a"', ""])


@pytest.mark.parametrize(
    ("n", "shape"),
    [
        (2_500, "NEXT"),
        (90_000, "NEXT"),  # 1.6 MB of text: a chain that overflows the stack of llama.cpp's recursion
        (90_000, '"x" | NEXT'),
        (40_000, '"x"? NEXT'),  # through an item that may be empty
        (60, "NEXT | NEXT"),  # 2^60 ways down, each of which llama.cpp takes
        (60, '"x"? NEXT | "y"? NEXT'),
    ],
)
def test_rules_that_begin_with_rules(chain: Callable[..., SamplerChain], n: int, shape: str) -> None:
    """llama.cpp recurses into what a rule begins with: too deep or too often is refused, not died of."""
    with pytest.raises(InvalidGrammar, match="begins with too many others") as caught:
        chain(grammar=rules(n, shape))
    assert isinstance(caught.value.detail, dict)
    assert 1 <= caught.value.detail["line"] <= n + 2


@pytest.mark.parametrize(
    ("n", "shape"),
    [
        (1_500, "NEXT"),
        (30_000, '"x" NEXT'),
        (15, "NEXT | NEXT"),
        (1_000, '"x" | NEXT'),
        (3_000, '"x" | "y" NEXT'),
    ],
)
def test_long_grammars_are_fine(chain: Callable[..., SamplerChain], n: int, shape: str) -> None:
    """Many rules, and long chains that begin with text, are taken."""
    chain(grammar=rules(n, shape))


def test_more_rules_than_anybody_needs(chain: Callable[..., SamplerChain]) -> None:
    """The number of rules is bounded too."""
    with pytest.raises(InvalidGrammar, match="more than 100000 rules"):
        chain(grammar=rules(110_000, '"x" NEXT'))


def test_left_recursion_is_refused(chain: Callable[..., SamplerChain]) -> None:
    """A grammar that llama.cpp refuses only after parsing is invalid_grammar too, in its words."""
    with pytest.raises(InvalidGrammar, match="left recursion"):
        chain(grammar='root ::= root "a" | "b"')


def test_grammar_exceptions_are_typed(
    dense: Model, chain: Callable[..., SamplerChain], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLAMA_CPP: "unexpected empty grammar stack" really flies from accept, and arrives as NativeError."""
    lib = dense.lib
    grammar = lib.sampler_init_grammar(dense.vocab._ptr, DIGITS.encode(), b"root")
    native = lib.sampler_chain_init(lib.sampler_chain_default_params())
    lib.sampler_chain_add(native, grammar)
    wrapped = lib.sampling_new(dense.facts.n_vocab, native, lib.ffi.NULL, lib.ffi.NULL, False, False)
    (letter,) = dense.vocab.tokenize("x", add_special=False)[-1:]
    try:
        with pytest.raises(NativeError, match="empty grammar stack") as caught:
            lib.sampling_accept(wrapped, letter)  # straight to the chain: nobody asked first
        assert caught.value.reason == "exception"
    finally:
        lib.sampling_free(wrapped)


def test_grammar_is_asked_about_one_token_only(
    smollm2: Model, open_context: OpenContext, chain: Callable[..., SamplerChain]
) -> None:
    """A grammar that allows everything costs almost nothing when asked about the chosen token only."""
    context = open_context(smollm2, n_ctx=256, n_batch=16)
    feed(context, [1, 2, 3])

    def cost(**params: Any) -> float:
        sampler = chain(smollm2, temperature=0, grammar="root ::= .*", **params)
        best = math.inf
        for _ in range(5):
            began = time.thread_time()
            sampler.sample(context, 2)
            best = min(best, time.thread_time() - began)
        return best

    assert cost() * 3 < cost(grammar_first=True)


@pytest.mark.parametrize("grammar_first", [False, True])
def test_a_forced_token_that_the_grammar_forbids(
    dense: Model, context: Context, chain: Callable[..., SamplerChain], grammar_first: bool
) -> None:
    """An infinite bias makes NaN of it: were it accepted, an end token would abort the process."""
    with context.handle as native:
        logits = context.lib.get_logits_ith(native, 19)
    for token in (0, dense.vocab.eos):
        before = logits[token]
        logits[token] = 1e9
        greedy = chain(
            temperature=0, grammar=DIGITS, grammar_first=grammar_first, logit_bias={token: math.inf}
        )
        try:
            drawn = greedy.sample(context, 19)
        except InvalidGrammar:
            continue
        finally:
            logits[token] = before
        assert dense.vocab.piece(drawn).isdigit()
