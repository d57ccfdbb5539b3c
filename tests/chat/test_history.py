"""Calls that a client resends in another order are rendered as they were sampled."""

from __future__ import annotations

import json

import pytest

from chat.scenes import NAMES, NO_CALLS, USER, call, renderer
from erllama.chat.history import in_order
from erllama.chat.options import ChatOptions

NUMBER = {"type": "integer"}
SCHEMA = {
    "type": "object",
    "properties": {
        "b": {"type": "object", "properties": {"x": NUMBER, "y": NUMBER}},
        "a": {"type": "string"},
        "c": {"type": "array", "items": {"type": "object", "properties": {"q": NUMBER, "p": NUMBER}}},
    },
    "required": ["c", "a"],
}


def test_keys_come_in_the_order_of_the_grammar():
    """What is required first, then the rest, each as the schema lists it; nested too; unknown ones last."""
    given = '{"z": 1, "b": {"y": 2, "x": 1}, "c": [{"p": 1, "q": 2}], "a": "ü"}'
    assert in_order(given, SCHEMA) == '{"a": "ü", "c": [{"q": 2, "p": 1}], "b": {"x": 1, "y": 2}, "z": 1}'


@pytest.mark.parametrize(
    "text", ['{"a":"x"}', '{ "b":{"x":1}, "a" : 1.50 }', "{}", '{"c": 1e400, "b": {"y": 1, "x": 2}}']
)
def test_what_is_in_order_stays_as_it_was_written(text):
    """Not a space changes; nor does a text whose numbers Python cannot write."""
    schema = {**SCHEMA, "required": ["b", "c"]}
    assert in_order(text, schema) == text
    assert in_order(text, None) == text


@pytest.mark.model
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_CALLS])
def test_the_prompt_does_not_depend_on_a_clients_order(name):
    """X12: every template renders both orders to the same tokens."""
    kinds = {"b": "integer", "a": "string", "c": "integer"}
    schema = {
        "type": "object",
        "properties": {n: {"type": k} for n, k in kinds.items()},
        "required": ["a", "c"],
    }
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    ordered, other = {"a": "s", "c": 2, "b": 1}, {"b": 1, "c": 2, "a": "s"}
    result = {"role": "tool", "tool_call_id": "call1aaaa", "name": "f", "content": "ok"}
    render, _ = renderer(name)
    one, two = (
        render.render(
            [
                USER,
                {"role": "assistant", "content": "", "tool_calls": [call("call1aaaa", "f", **sent)]},
                result,
            ],
            ChatOptions(tools=[tool]),
        )
        for sent in (ordered, other)
    )
    assert one.prompt == two.prompt
    assert json.loads(json.dumps(ordered)) == other


@pytest.mark.model
def test_without_a_grammar_the_order_is_the_models_own():
    """No grammar chose an order, so none is put back; a strict tool has one."""
    schema = {
        "type": "object",
        "properties": {"b": NUMBER, "a": NUMBER},
        "required": ["a"],
        "additionalProperties": False,
    }
    function = {"name": "f", "description": "d", "parameters": schema}
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call("call1aaaa", "f", b=1, a=2)]},
        {"role": "tool", "tool_call_id": "call1aaaa", "name": "f", "content": "ok"},
    ]
    render, _ = renderer("Qwen-Qwen2.5-7B-Instruct")
    for lazily, strict in [(True, False), (False, False), (False, True)]:
        tools = [{"type": "function", "function": {**function, "strict": strict}}]
        prompt = render.render(messages, ChatOptions(tools=tools, lazy_tool_grammar=lazily)).prompt
        as_sent = '{"b": 1, "a": 2}' in prompt
        assert as_sent == (not lazily and not strict)
        assert as_sent != ('{"a": 2, "b": 1}' in prompt)
