"""An answer held to a schema is the JSON and nothing around it: for every template."""

from __future__ import annotations

import pytest

from chat.scenes import NAMES, USER, renderer
from chat.test_call_first import takes
from erllama import llama
from erllama.chat.answer import read_answer
from erllama.chat.options import ChatOptions
from erllama.chat.prompt import _begins_thinking
from erllama.errors import NotSupported

pytestmark = pytest.mark.model

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = '{"a": 1}'
# Their answers have a channel, which is spelled before the JSON.
CHANNELS = {
    "Cohere2MoE": "<|END_THINKING|><|START_TEXT|>",
    "muse-glimmer": "<|message|>",
    "openai-gpt-oss-120b": "<|channel|>final<|message|>",
}
UNHELD = {
    "GigaChat3-10B-A1.8B",
    "Kimi-K2-Instruct",
    "Kimi-K2-Thinking",
    "Kimi-K3",
    "inclusionai-ling-3.0-flash",
    "meetkai-functionary-medium-v3.2",
    "moonshotai-Kimi-K2",
}
HELD = [name for name in NAMES if name not in UNHELD]


@pytest.fixture(scope="module")
def vocab(smollm2_path):
    """A real one: grammars are asked token by token."""
    with llama.Model.open(smollm2_path) as model:
        yield model.vocab


def held(name, *before):
    """What the answer is held to, and what stands before its JSON: in the prompt, and in the answer."""
    render, _ = renderer(name)
    params = render.render([USER, *before], ChatOptions(), SCHEMA)
    applied = params.applied
    thought = f"Hm.{applied.thinking_ends[0]}" if _begins_thinking(applied) else ""
    return params, applied.generation_prompt, CHANNELS.get(name, thought)


@pytest.mark.parametrize("name", HELD)
def test_the_grammar_takes_the_json_alone(vocab, name):
    """No fence, which parsers hide, and no white space behind it."""
    params, begun, before = held(name)
    assert takes(vocab, params.grammar, begun + before + JSON)
    for text in (f"```json\n{JSON}", "```", f"{JSON}\n", f"{JSON} "):
        assert not takes(vocab, params.grammar, begun + before + text), text


@pytest.mark.parametrize("name", HELD)
def test_the_answer_is_read_without_a_fence(name):
    """Also where upstream's parser waits for one."""
    params, _, before = held(name)
    answer = read_answer(params, before + JSON, partial=False)
    assert answer.content == JSON
    assert read_answer(params, before + JSON[:-1], partial=True).content == JSON[:-1]


def test_no_white_space_comes_before_it_where_nothing_is_thought(vocab):
    params, begun, _ = held("Qwen-Qwen2.5-7B-Instruct")
    assert not takes(vocab, params.grammar, begun + "\n" + JSON)


def test_a_fence_that_the_caller_began_is_gone_on_with(vocab):
    params, begun, _ = held("Qwen-Qwen2.5-7B-Instruct", {"role": "assistant", "content": "```json\n"})
    assert begun.endswith("```json\n")
    assert takes(vocab, params.grammar, f"{begun}{JSON}\n```")


@pytest.mark.parametrize("name", sorted(UNHELD))
def test_a_template_that_cannot_be_held_to_a_schema_says_so(name):
    """Its answer would be free, in silence."""
    render, _ = renderer(name)
    with pytest.raises(NotSupported) as refused:
        render.render([USER], ChatOptions(), SCHEMA)
    assert refused.value.detail == "json_schema"
