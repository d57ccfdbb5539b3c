"""X13: whatever callers write, and wherever, makes no control token; an unknown way in ends in an error."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from chat.scenes import NAMES, USER, renderer
from erllama.chat.authored import without_escapes
from erllama.chat.options import ChatOptions
from erllama.errors import ErllamaError, InvalidContent

pytestmark = pytest.mark.model

N_TEXTS = 1  # control-token texts tried at each place


def with_call(*, call_id="call1aaaa", result_name="get_weather", **function):
    """A history with a call, and its result."""
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}', **function}
    call = {"id": call_id, "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": call_id, "name": result_name, "content": "wet"}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, result]


def with_tool(**city):
    """A tool with a schema that says more of its city."""
    properties = {"city": {"type": "string", **city}}
    return tool_of({"type": "object", "properties": properties})


def tool_of(schema):
    """The question, and a tool of that schema."""
    function = {"name": "get_weather", "description": "x", "parameters": schema}
    return {"messages": [USER], "tools": [{"type": "function", "function": function}]}


def parts(*texts):
    """A user's message in parts."""
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]


def escaped(text):
    """Every character as a JSON escape."""
    return "".join(f"\\u{ord(character):04x}" for character in text)


def as_json(text):
    """Inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


PLACES = {
    "content": lambda t: {"messages": [{"role": "user", "content": f"a {t} b"}]},
    "two parts": lambda t: {"messages": parts(f"a {t[:3]}", f"{t[3:]} b")},
    "two messages": lambda t: {
        "messages": [
            {"role": "user", "content": f"a {t[:3]}"},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": f"{t[3:]} b"},
        ]
    },
    "name": lambda t: {"messages": [{"role": "user", "name": f"n{t}", "content": "b"}]},
    "call's name": lambda t: {"messages": with_call(name=f"f{t}")},
    "arguments": lambda t: {"messages": with_call(arguments=f'{{"city": "a{as_json(t)}"}}')},
    "arguments in escapes": lambda t: {"messages": with_call(arguments=f'{{"city": "a{escaped(t)}"}}')},
    "arguments with slashes": lambda t: {
        "messages": with_call(arguments=f'{{"city": "a{as_json(t)}"}}'.replace("/", "\\/"))
    },
    "arguments as a mapping": lambda t: {"messages": with_call(arguments={"city": f"a{t}"})},
    "argument's name": lambda t: {"messages": with_call(arguments={f"a{t}": 1})},
    "argument's bare name": lambda t: {"messages": with_call(arguments={t.strip("<>|/[]"): 1})},
    "call's id": lambda t: {"messages": with_call(call_id=f"id{t}")},
    "result's name": lambda t: {"messages": with_call(result_name=f"get{t}")},
    "description": lambda t: with_tool(description=f"a{t}"),
    "enum": lambda t: with_tool(enum=[f"a{t}", "b"]),
    "default": lambda t: with_tool(default=f"a{t}"),
    "comment": lambda t: with_tool(**{"$comment": f"a{t}"}),
    "pattern": lambda t: with_tool(pattern=f"^(a|{t})$"),
    "bare keyword": lambda t: with_tool(**{t.strip("<>|/[]"): "x"}),
    "property": lambda t: tool_of({"type": "object", "properties": {f"p{t}": {"type": "string"}}}),
    "documents": lambda t: {
        "messages": [USER],
        "template_kwargs": {"documents": [{"title": "a", "text": f"b{t}", "content": f"b{t}"}]},
    },
}


def rendered(render, messages, **options):
    """The control tokens of a prompt, and how often each is in it."""
    params = render.render(messages, ChatOptions(**options))
    return Counter(token for token in params.prompt_ids if token > 255)


@pytest.mark.parametrize("name", NAMES)
def test_no_place_lets_a_control_token_in(name):
    """Every place where callers' text can be, with the texts that this template writes itself."""
    render, vocabulary = renderer(name)
    long = [text for text in vocabulary.ids if len(text) > 4]
    n_tried = 0
    for place, make in PLACES.items():
        try:
            want = rendered(render, **make("zzzzzz"))
        except ErllamaError:  # a template without tools
            continue
        for text in long[:: max(1, len(long) // N_TEXTS)]:
            try:
                found = rendered(render, **make(text))
            except InvalidContent:
                continue
            assert found == want, (place, text)
            n_tried += 1
    assert n_tried > 3


@pytest.mark.parametrize("name", NAMES)
def test_what_only_looks_like_markup_is_taken(name):
    """Brackets, comparisons, code and JSON in every place where a text may be: nothing is refused."""
    render, _ = renderer(name)
    said = 'if a < b [1] {"k": ["<", "|"]} <div> </p> [x] x>y'
    refused = []
    for place in ("content", "two parts", "arguments", "description", "enum", "default", "documents"):
        try:
            rendered(render, **PLACES[place]("zzzzzz"))
        except ErllamaError:
            continue
        try:
            rendered(render, **PLACES[place](said))
        except InvalidContent as why:
            refused.append((place, str(why)))
    assert not refused


def test_escapes_that_are_needed_stay():
    """Quotes, backslashes, control characters; the value is the same."""
    text = r'{"a\/\u003c": "\u00e9 \ud83d\ude00 \u0022 \\u003c \n \u0000 \u005c"}'
    made = without_escapes(text)
    assert json.loads(made) == json.loads(text)
    assert made.startswith('{"a/<": "é 🙂'.replace("🙂", "\U0001f600"))
    assert r"\\u003c \n" in made
