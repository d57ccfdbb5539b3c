"""Where a chat's grammar and thinking begin: lazy grammars, prefills, budgets."""

from __future__ import annotations

import pytest

from erllama import llama
from erllama.backend import Guide, ThinkingSpan
from erllama.errors import InvalidGrammar

pytestmark = pytest.mark.model

GRAMMAR = 'root ::= "<call>" [0-9]+ "</call>"'


@pytest.fixture
def vocab(smollm2):
    """SmolLM2's."""
    return smollm2.vocab


def ids(vocab, text):
    """Tokens of a text."""
    return tuple(vocab.tokenize(text, add_special=False, parse_special=True))


def chain(vocab, **guide):
    """A sampler with the grammar above."""
    return llama.SamplerChain(vocab, llama.SamplerParams(grammar=GRAMMAR, guide=Guide(**guide)))


def say(sampler, vocab, text):
    """Accept the tokens of a text."""
    for token in ids(vocab, text):
        sampler.accept(token)


LAZY = {"lazy": True, "trigger_patterns": ("<call>",)}


def test_a_lazy_grammar_waits_for_its_trigger(vocab):
    """Before it anything goes, behind it only what the grammar says."""
    with chain(vocab, **LAZY) as sampler:
        say(sampler, vocab, "Any text, </call> and 17, too. ")
        say(sampler, vocab, "<call>12")
        with pytest.raises(InvalidGrammar):
            say(sampler, vocab, " twelve")


def test_a_lazy_grammar_allows_an_answer_without_trigger(vocab):
    """The end of the answer is allowed as long as nothing was triggered, and again behind the call."""
    with chain(vocab, **LAZY) as sampler:
        say(sampler, vocab, "Nothing to call.")
        sampler.accept(vocab.eos)
    with chain(vocab, **LAZY) as sampler:
        say(sampler, vocab, "<call>1")
        with pytest.raises(InvalidGrammar):
            sampler.accept(vocab.eos)
        say(sampler, vocab, "</call>")
        sampler.accept(vocab.eos)


def test_a_token_as_trigger(vocab):
    """A control token starts the grammar, which describes it."""
    params = llama.SamplerParams(
        grammar='root ::= "<repo_name>" [0-9]+',
        guide=Guide(lazy=True, trigger_tokens=ids(vocab, "<repo_name>")),
    )
    with llama.SamplerChain(vocab, params) as sampler:
        say(sampler, vocab, "text <repo_name>1")
        with pytest.raises(InvalidGrammar):
            say(sampler, vocab, "x")


def spelled(vocab, text):
    """A text in its single characters' tokens."""
    return [token for character in text for token in vocab.tokenize(character, add_special=False)]


@pytest.fixture
def watching(vocab):
    """A sampler whose trigger is one token."""
    params = llama.SamplerParams(
        grammar='root ::= "<repo_name>" [0-9]+',
        guide=Guide(lazy=True, trigger_tokens=ids(vocab, "<repo_name>")),
    )
    with llama.SamplerChain(vocab, params) as sampler:
        yield sampler


def test_a_trigger_that_is_spelled_in_other_tokens(vocab, watching):
    """A token as trigger is its text: in several tokens too the call is held to the grammar."""
    for _ in range(2):
        for token in spelled(vocab, "some <repo_name"):
            watching.accept(token)
        say(watching, vocab, " x <repo")
        for token in spelled(vocab, "<repo_name>1"):
            watching.accept(token)
        with pytest.raises(InvalidGrammar):
            say(watching, vocab, "x")
        watching.reset()


def test_a_spelled_trigger_is_seen_once(vocab, watching):
    """What follows the real one is the grammar's matter alone."""
    say(watching, vocab, "<repo_name>12")
    with pytest.raises(InvalidGrammar):
        watching.accept(spelled(vocab, "<")[0])


def test_the_triggers_text_before_what_is_no_call(vocab, watching):
    """A token brings its end and more, which no call goes on with: the answer stays free."""
    [end] = [t for t in ids(vocab, ">.") if vocab.piece(t) == b">."] or [None]
    assert end is not None, "the vocabulary has no such token: choose another"
    for token in spelled(vocab, "<repo_name"):
        watching.accept(token)
    watching.accept(end)
    say(watching, vocab, " words")


def test_thinking_is_not_looked_into(vocab):
    """The trigger's words in a thinking block start nothing; behind it they do."""
    span = ThinkingSpan(start=ids(vocab, "<t>"), ends=(ids(vocab, "</t>"),), forced=ids(vocab, "</t>"))
    with chain(vocab, **LAZY, thinking=span) as sampler:
        say(sampler, vocab, "<t>")
        say(sampler, vocab, "maybe <call> or not")
        say(sampler, vocab, "</t>")
        say(sampler, vocab, "<call>1")
        with pytest.raises(InvalidGrammar):
            say(sampler, vocab, " x")


def test_a_prefill_moves_the_grammar_on(vocab):
    """What the prompt already has is not generated again."""
    with chain(vocab, prefill=ids(vocab, "<call>"), covers_prefill=True) as sampler:
        say(sampler, vocab, "12</call>")
        sampler.accept(vocab.eos)
        sampler.reset()
        say(sampler, vocab, "1")
        with pytest.raises(InvalidGrammar):
            say(sampler, vocab, "<call>")
    with chain(vocab, prefill=ids(vocab, "<call>")) as sampler, pytest.raises(InvalidGrammar):
        say(sampler, vocab, "12")  # a grammar of the caller's own begins with the answer


def test_a_prefill_that_the_grammar_forbids(vocab):
    """A typed error, and nothing is left behind."""
    before = llama.live_samplers()
    with pytest.raises(InvalidGrammar):
        chain(vocab, prefill=ids(vocab, "other"), covers_prefill=True)
    assert llama.live_samplers() == before


@pytest.mark.parametrize("opened_by", ["model", "prompt"])
def test_a_budget_ends_thinking(smollm2, open_context, opened_by):
    """After so many tokens the end is forced; then the model goes on freely."""
    vocab, context, budget = smollm2.vocab, open_context(smollm2), 5
    start, end = ids(vocab, "<t>"), ids(vocab, "</t>")
    guide = Guide(
        thinking=ThinkingSpan(start=start, ends=(end,), forced=end, budget=budget),
        prefill=start if opened_by == "prompt" else (),
    )
    params = llama.SamplerParams(temperature=0.0, guide=guide)
    tokens, pos, made = list(ids(vocab, "Once upon a time")), 0, []
    with llama.SamplerChain(vocab, params) as sampler:
        if opened_by == "model":
            for token in start:
                sampler.accept(token)
        batch = llama.Batch(64, 1)
        for _ in range(budget + len(end) + 3):
            batch.clear()
            row = batch.add(0, tokens, pos)
            assert context.decode(batch) == 0
            pos += len(tokens)
            tokens = [sampler.sample(context, row)]
            made += tokens
    assert tuple(made[budget : budget + len(end)]) == end
    assert tuple(made[: len(end)]) != end


def test_patterns_that_are_none(vocab):
    """A trigger that is no regular expression is refused by C++, not by a crash."""
    with pytest.raises(InvalidGrammar, match="trigger"):
        chain(vocab, lazy=True, trigger_patterns=("(",))
