"""Where a call is required, nothing but thinking and white space may come before it: for every template."""

from __future__ import annotations

import pytest

from chat.scenes import (
    NAMES,
    NO_CALLS,
    NO_TOOLS,
    ONE_CALL,
    REFUSES_DIALOGUE,
    TOOLS,
    USER,
    renderer,
    templates,
    written,
)
from chat.test_templates import NOT_READ
from erllama import llama
from erllama.backend import Guide
from erllama.chat.options import ChatOptions
from erllama.chat.prompt import _begins_thinking
from erllama.errors import InvalidGrammar, NotSupported
from erllama.llama.sampler import SamplerChain, SamplerParams

pytestmark = pytest.mark.model

SAID = 'Let me "see"\\:\n'
CALLING = [name for name in NAMES if name not in NO_TOOLS | REFUSES_DIALOGUE]


@pytest.fixture(scope="module")
def vocab(smollm2_path):
    """A real one: grammars are asked token by token."""
    with llama.Model.open(smollm2_path) as model:
        yield model.vocab


def takes(vocab, grammar, text):
    """Whether an answer may begin with this text."""
    try:
        with SamplerChain(vocab, SamplerParams(grammar=grammar, guide=Guide())) as sampler:
            for token in vocab.tokenize(text, add_special=False, parse_special=False):
                sampler.accept(token)
    except InvalidGrammar:
        return False
    return True


def required(name, messages=(USER,), **options):
    """What the answer is held to, and what the prompt has of it."""
    render, _ = renderer(name)
    try:
        params = render.render(
            list(messages), ChatOptions(tools=TOOLS[:1], tool_choice="required", **options)
        )
    except NotSupported:
        pytest.skip("it cannot be made to call")
    return params.grammar, params.applied.generation_prompt


def free_texts(applied):
    """What a model might say first, also behind thinking."""
    start, is_open = applied.thinking_start, _begins_thinking(applied)
    said = ("I would say", "\n\nLet me", "all\nI", "<|channel|>commentary<|message|>I")
    texts = [] if is_open else list(said)
    for end in applied.thinking_ends[:1]:  # the others are calls
        texts += [f"{'' if is_open else start}\nHm.\n{end}{text}" for text in said]
    return texts


@pytest.mark.parametrize("reasoning", ["auto", "inline"])
@pytest.mark.parametrize("name", CALLING)
def test_no_text_comes_before_a_required_call(vocab, name, reasoning):
    """H10: `required` is a guarantee; a model that talks first may talk until the context ends."""
    grammar, begun = required(name, reasoning=reasoning)
    assert takes(vocab, grammar, begun)
    render, _ = renderer(name)
    applied = render.render([USER], ChatOptions(tools=TOOLS[:1], reasoning=reasoning)).applied
    assert free_texts(applied)
    taken = [text for text in free_texts(applied) if takes(vocab, grammar, begun + text)]
    assert not taken


@pytest.mark.parametrize("name", [name for name in CALLING if name not in NO_CALLS | NOT_READ])
def test_a_required_call_is_taken(vocab, name):
    """As the template itself writes it, whatever may come before it."""
    grammar, begun = required(name)
    call = written(templates(name), ONE_CALL)[1].removesuffix("<|tool_response>")
    assert takes(vocab, grammar, begun + call)


@pytest.mark.parametrize("parts", [[SAID], [SAID[:7], SAID[7:]]], ids=["one part", "two parts"])
def test_a_call_follows_what_the_answer_has_already(vocab, parts):
    """An answer that begins with text goes on with the call, and with no more text."""
    content = [{"type": "text", "text": part} for part in parts]
    messages = [USER, {"role": "assistant", "content": content}]
    grammar, begun = required("Qwen-Qwen2.5-7B-Instruct", messages)
    assert begun.endswith(SAID)
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert takes(vocab, grammar, begun + call)
    assert not takes(vocab, grammar, begun + "I")


@pytest.mark.parametrize("name", [name for name in CALLING if name not in NO_CALLS | NOT_READ])
def test_one_call_is_one(vocab, name):
    """H13: without parallel calls the grammar takes no second one, however near it follows."""
    grammar, begun = required(name, parallel_tool_calls=False)
    call = written(templates(name), ONE_CALL)[1].removesuffix("<|tool_response>")
    assert takes(vocab, grammar, begun + call)
    for space in ("", "\n", "\n\n", ", "):
        assert not takes(vocab, grammar, f"{begun}{call}{space}{call}")
