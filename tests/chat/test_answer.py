"""Answers that try to break their reader: arguments of every kind, a character at a time."""

from __future__ import annotations

import json

import pytest

from chat.scenes import TOOLS, USER, call, templates, written
from erllama.chat.answer import Answer, CallDelta, ContentDelta, decoded, new_call_id
from erllama.chat.prompt import ChatParams

pytestmark = pytest.mark.model

NASTY = 'a "quoted" \\ back\\slash, C:\\temp/x, </tool_call>, {"b": [1]}, 🙂 ü\nnew line\ttab'
FAMILIES = [
    "Qwen-Qwen2.5-7B-Instruct",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "meta-llama-Llama-3.2-3B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "deepseek-ai-DeepSeek-V3.1",
    "Kimi-K2-Instruct",
    "ibm-granite-granite-4.0",
    "openai-gpt-oss-120b",
    "Cohere2MoE",
    "unsloth-Apriel-1.5",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_nasty_arguments_stream_without_a_step_back(name):
    """FAULTS: quotes, slashes, closing tags, negative numbers, emoji: every delta extends what was before."""
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("call1aaaa", "get_weather", city=NASTY, n=-17)],
    }
    applied, text = written(templates(name), message)
    params = ChatParams(prompt="", prompt_ids=[], applied=applied, tool_names=("get_weather", "get_time"))
    sent = ""
    with Answer(params) as answer:
        for character in text:
            for delta in answer.feed(character):
                assert not isinstance(delta, ContentDelta) or "get_weather" not in delta.text
                sent += delta.arguments if isinstance(delta, CallDelta) else ""
        deltas, read = answer.finish(complete=True)
        sent += "".join(delta.arguments for delta in deltas if isinstance(delta, CallDelta))
    [made] = read.tool_calls
    assert made.arguments == {"city": NASTY, "n": -17}
    assert json.loads(sent) == made.arguments
    assert sent == made.arguments_json


def test_calls_of_tools_that_nobody_offered_are_content():
    """A name that is not among the tools is no call."""
    applied = templates("Qwen-Qwen2.5-7B-Instruct").apply({"messages": [USER], "tools": TOOLS})
    params = ChatParams(prompt="", prompt_ids=[], applied=applied, tool_names=("get_weather",))
    with Answer(params) as answer:
        deltas = answer.feed('<tool_call>\n{"name": "get_time", "arguments": {"city": "x"}}\n</tool_call>')
        more, read = answer.finish(complete=True)
    assert read.tool_calls == ()
    assert "get_time" in read.content
    assert not [delta for delta in (*deltas, *more) if isinstance(delta, CallDelta)]


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '"x"', "null", "{'a': 1}", "[" * 100_000])
def test_arguments_that_are_no_object(text):
    """Not decoded, and no crash."""
    assert decoded(text) is None


def test_call_ids_differ():
    """Nine letters and digits, as the strictest template wants them."""
    ids = {new_call_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(i) == 9 and i.isalnum() for i in ids)
