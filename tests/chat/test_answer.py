"""Answers that try to break their reader: arguments of every kind, a character at a time."""

from __future__ import annotations

import json

import pytest

from chat.scenes import NAMES, ONE_CALL, TOOLS, USER, call, templates, written
from erllama.chat.answer import (
    Answer,
    CallDelta,
    ContentDelta,
    ReasoningDelta,
    new_call_id,
    read_answer,
)
from erllama.chat.arguments import decoded
from erllama.chat.messages import check_messages
from erllama.chat.prompt import ChatParams
from erllama.errors import InvalidContent

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


def read_of(name, text, *, complete, **inputs):
    """An answer fed three characters at a time: its deltas, and its message."""
    applied = templates(name).apply({"messages": [USER], "tools": TOOLS, **inputs})
    params = ChatParams(prompt="", prompt_ids=[], applied=applied, tool_names=("get_weather", "get_time"))
    deltas = []
    with Answer(params) as answer:
        for at in range(0, len(text), 3):
            deltas += answer.feed(text[at : at + 3])
        more, message = answer.finish(complete=complete)
    return [*deltas, *more], message


def joined(kind, deltas):
    """The text of all deltas of a kind."""
    return "".join(delta.text for delta in deltas if isinstance(delta, kind))


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_announced_call_is_never_content_too(name, complete):
    """Cut anywhere, by whatever: what went out as a call does not come again as text."""
    applied, text = written(templates(name), ONE_CALL)
    params = ChatParams(prompt="", prompt_ids=[], applied=applied, tool_names=("get_weather", "get_time"))
    n_announced = 0
    for end in range(len(text)):
        with Answer(params) as answer:
            deltas = answer.feed(text[:end])
            more, message = answer.finish(complete=complete)
        if any(isinstance(delta, CallDelta) for delta in [*deltas, *more]):
            n_announced += 1
            assert "get_weather" not in joined(ContentDelta, [*deltas, *more]) + message.content
    assert n_announced


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "openai-gpt-oss-120b"])
def test_text_behind_a_whole_call_takes_nothing_away(name, complete, step):
    """It makes the answer unreadable: the call that was given out is in the message, the text is content."""
    applied, text = written(templates(name), ONE_CALL)
    params = ChatParams(prompt="", prompt_ids=[], applied=applied, tool_names=("get_weather", "get_time"))
    deltas = []
    with Answer(params) as answer:
        deltas += answer.feed(text)
        rest = " and more." * 200
        for at in range(0, len(rest), step):
            deltas += answer.feed(rest[at : at + step])
        more, message = answer.finish(complete=complete)
    deltas += more
    sent = "".join(delta.arguments for delta in deltas if isinstance(delta, CallDelta))
    [made] = message.tool_calls
    assert made.arguments == json.loads(sent) == {"city": "Oslo"}
    assert message.content == joined(ContentDelta, deltas)
    assert message.content.strip() == rest.strip()


SAD = "ok " + ":( [ {" * 300 + "the end"


@pytest.mark.parametrize("complete", [True, False])
def test_text_that_stops_being_readable_is_in_the_message(complete):
    """Brackets that nobody closes: what was streamed and what came behind it, once."""
    deltas, message = read_of("Qwen-Qwen2.5-7B-Instruct", SAD, complete=complete)
    assert message.content == SAD
    assert joined(ContentDelta, deltas) == SAD


@pytest.mark.parametrize("complete", [True, False])
def test_thinking_that_stops_being_readable_is_no_content(complete):
    """It was streamed as thinking; the answer behind it is content."""
    text = f"Let me {SAD}</think>The answer"
    deltas, message = read_of("Bielik-11B-v3.0-Instruct", text, complete=complete)
    assert message.reasoning_content == joined(ReasoningDelta, deltas) == f"Let me {SAD}"
    assert message.content == joined(ContentDelta, deltas) == "The answer"


def test_a_thinking_block_without_an_end_is_no_content():
    """The model ended its answer within it."""
    deltas, message = read_of("Bielik-11B-v3.0-Instruct", "I wonder about", complete=True)
    assert message.reasoning_content == joined(ReasoningDelta, deltas) == "I wonder about"
    assert message.content == joined(ContentDelta, deltas) == ""


def test_two_calls_with_one_id_get_two():
    """The model wrote the same id twice; the message can be sent back."""
    [name] = [name for name in NAMES if "command-r7b" in name]
    call = '{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}}'
    deltas, message = read_of(
        name, f"<|START_ACTION|>[\n    {call},\n    {call}\n]<|END_ACTION|>", complete=True
    )
    first, second = message.tool_calls
    assert first.id == "0"
    assert second.id not in ("", "0")
    assert [d.id for d in deltas if isinstance(d, CallDelta) and d.id] == [first.id, second.id]
    assert check_messages([USER, message])


QWEN = "Qwen-Qwen2.5-7B-Instruct"
GOOD = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo"}}\n</tool_call>'


def free_read_of(text, name=QWEN, *, complete=True, step=3):
    """An answer that no grammar held, fed in steps: its deltas, and its message."""
    applied = templates(name).apply({"messages": [USER], "tools": TOOLS})
    params = ChatParams(
        prompt="",
        prompt_ids=[],
        applied=applied,
        tool_names=("get_weather", "get_time"),
        are_calls_held=False,
    )
    deltas = []
    with Answer(params) as answer:
        for at in range(0, len(text), step):
            deltas += answer.feed(text[at : at + step])
        more, message = answer.finish(complete=complete)
    deltas += more
    assert message.content == joined(ContentDelta, deltas)
    for i, made in enumerate(message.tool_calls):
        sent = [d.arguments for d in deltas if isinstance(d, CallDelta) and d.index == i]
        assert "".join(sent) == made.arguments_json
    return deltas, message


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": }\n</tool_call>',
        'Text first. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome}\n</tool_call> And so',
        'Text first.\n<tool_call>\n{"name": "get_weather", "arguments": {"city" "Rome"}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"n": 1e999}}\n</tool_call>',
        '<tool_call>\n{"name": "get_rain", "arguments": {"city": "Rome"}}\n</tool_call>',
        '<tool_call>\n{"name":',
        'Text first. <tool_call>\n{"name": "get_we',
    ],
)
def test_without_a_grammar_no_text_of_a_call_is_lost(text, step):
    """A call that cannot be read is text, all of it; a good one before it stays a call."""
    _, message = free_read_of(text, step=step)
    assert message.tool_calls == ()
    assert message.content == text
    if step == 1000:
        return  # nothing was read before it became unreadable
    _, message = free_read_of(f"{GOOD}\n{text}", step=step)
    [made] = message.tool_calls
    assert (made.name, made.arguments) == ("get_time", {"city": "Oslo"})
    assert message.content.endswith(text[text.index("<tool_call>") :])
    assert "get_time" not in message.content


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "openai-gpt-oss-120b"])
def test_an_answer_that_ends_within_a_call_is_text(name):
    """Upstream's parser reads nothing of it and says so to nobody."""
    _, text = written(templates(name), ONE_CALL)
    for end in range(text.index("get_weather"), text.index("Oslo"), 4):
        _, message = free_read_of(text[:end], name)
        assert message.tool_calls == ()
        assert message.content.endswith(text[end - 4 : end])


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("value", ['"Rome"', "[1, 2]", "5", "null", "true", '"[1]"', '"{\\"city\\": "'])
def test_arguments_are_never_made_up(value, step):
    """Upstream's parser makes {} of what is no object: a successful call that nobody asked for."""
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {value}}}\n</tool_call>'
    deltas, message = free_read_of(text, step=step)
    assert message.tool_calls == ()
    assert message.content == text
    assert not [delta for delta in deltas if isinstance(delta, CallDelta)]
    _, message = free_read_of(GOOD + text, step=step)
    assert [made.name for made in message.tool_calls] == ["get_time"]
    assert message.content == text


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("{}", {}),
        ("{ }", {}),
        (r'"{\"city\": \"Rome\"}"', {"city": "Rome"}),
        (r'" {\"city\": \"a \\\"b\\\"\"} "', {"city": 'a "b"'}),
        ('"{}"', {}),
    ],
)
def test_an_object_is_read_also_from_a_string(value, wanted, step):
    """As OpenAI's own format has it; an empty one where one was written."""
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {value}}}\n</tool_call>'
    _, message = free_read_of(text + GOOD, step=step)
    assert [(made.name, made.arguments) for made in message.tool_calls] == [
        ("get_weather", wanted),
        ("get_time", {"city": "Oslo"}),
    ]
    assert message.content == ""


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_that_no_grammar_held_are_read(name):
    """The same as with one, in every family."""
    _, text = written(templates(name), ONE_CALL)
    _, message = free_read_of(text, name)
    [made] = message.tool_calls
    assert (made.name, made.arguments) == ("get_weather", {"city": "Oslo"})
    _, cut = free_read_of(text[: text.index("Oslo")], name, complete=False)
    assert cut.tool_calls == ()


@pytest.mark.parametrize("number", ["1e999", "-1e999", "Infinity", "NaN"])
def test_numbers_that_are_none_are_no_arguments(number):
    """JSON has no infinity, so nobody could be sent one; the call is there as text."""
    assert decoded(f'{{"n": {number}}}') is None
    assert decoded('{"n": 1e9, "m": [-0.5]}') == {"n": 1e9, "m": [-0.5]}
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"n": 1e999}}\n</tool_call>'
    _, message = read_of(QWEN, text, complete=True)
    assert message.tool_calls == ()
    assert message.content == text


@pytest.mark.parametrize("value", ["5", '"Rome"'])
def test_a_whole_text_with_made_up_arguments_is_refused(value):
    """`chat_parse` says so."""
    applied = templates(QWEN).apply({"messages": [USER], "tools": TOOLS})
    params = ChatParams(
        prompt="", prompt_ids=[], applied=applied, tool_names=("get_weather",), are_calls_held=False
    )
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {value}}}\n</tool_call>'
    with pytest.raises(InvalidContent, match="no JSON object"):
        read_answer(params, text, partial=False)
