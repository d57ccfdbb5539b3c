"""Tools, structured output and limits through the official openai package, whole and streamed."""

from __future__ import annotations

import json
from functools import partial

import openai
import pytest
from pydantic import BaseModel
from runtime.chat_scenes import ScriptedChat

from server.scenes import serving, sse_events

HELLO = [{"role": "user", "content": "How is the weather?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALL_ARGUMENTS = '{"city": "Paris"}'
TWO_CALLS = CALL + "\n" + CALL.replace("Paris", "Rome")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather of a city", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS = [{"type": "function", "strict": False, **FUNCTION}]
CITIES = [{"city": "Paris"}, {"city": "Rome"}]

# The package leaves generators open behind a stream's last event; trio tells of it, asyncio does not.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Place(BaseModel):
    """A place."""

    city: str


def scripted(scene):
    return openai.AsyncOpenAI(base_url=f"{scene.url}/v1", api_key="none", max_retries=0)


async def chat(client, *, streamed, **more):
    """The choice's message and reason, as the package puts them together."""
    options = {"model": "fake", "messages": HELLO, "tools": TOOLS, "max_tokens": 400} | more
    if not streamed:
        choice = (await client.chat.completions.create(**options)).choices[0]
    else:
        async with client.chat.completions.stream(**options) as stream:
            async for _ in stream:
                pass
            choice = (await stream.get_final_completion()).choices[0]
    return choice.message, choice.finish_reason


@pytest.mark.parametrize("streamed", [False, True])
async def test_calls_of_a_chat(streamed):
    """Two calls, each with an id and arguments of its own, and no text besides."""
    async with serving(partial(ScriptedChat, says=TWO_CALLS)) as scene, scripted(scene) as client:
        message, reason = await chat(client, streamed=streamed)
        assert reason == "tool_calls"
        assert [json.loads(call.function.arguments) for call in message.tool_calls] == CITIES
        assert len({call.id for call in message.tool_calls}) == 2
        assert not message.content


@pytest.mark.parametrize("lazily", [False, True])
async def test_a_model_may_be_let_write_its_calls_freely(lazily):
    """H10: a model's setting takes the grammar away that begins with a call; calls arrive all the same."""
    make = partial(ScriptedChat, says=TWO_CALLS)
    models = {"fake": {"lazy_tool_grammar": lazily}}
    async with serving(make, models=models) as scene, scripted(scene) as client:
        message, _ = await chat(client, streamed=False)
        assert len(message.tool_calls) == 2
        assert (scene.backends["fake"].params[-1].grammar is not None) == lazily
        await chat(client, streamed=False, tool_choice="required")
        assert scene.backends["fake"].params[-1].grammar is not None


@pytest.mark.parametrize("streamed", [False, True])
async def test_one_call_none_and_a_cut_one(streamed):
    """parallel_tool_calls caps them, tool_choice none takes them away; half a call is no arguments."""
    async with serving(partial(ScriptedChat, says=TWO_CALLS)) as scene, scripted(scene) as client:
        one, _ = await chat(client, streamed=streamed, parallel_tool_calls=False)
        assert [json.loads(call.function.arguments) for call in one.tool_calls] == CITIES[:1]
        none, reason = await chat(client, streamed=streamed, tool_choice="none")
        assert (not none.tool_calls, reason) == (True, "stop")
        body = {
            "model": "fake",
            "messages": HELLO,
            "tools": TOOLS,
            "max_tokens": len(CALL) - 20,
            "stream": streamed,
        }
        cut = (await scene.client.post("/v1/chat/completions", json=body)).text
        assert '"finish_reason":"length"' in cut
        events = [json.loads(data) for data in sse_events(cut)[:-1]] if streamed else []
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        given = [call["function"]["arguments"] for d in deltas for call in d.get("tool_calls", ())]
        if streamed:  # what was given out ends where the answer does, and is no JSON
            assert CALL_ARGUMENTS.startswith("".join(given))
            assert 0 < len("".join(given)) < len(CALL_ARGUMENTS)
        else:
            assert not json.loads(cut)["choices"][0]["message"].get("tool_calls")


@pytest.mark.parametrize("streamed", [False, True])
async def test_calls_of_a_response(streamed):
    """Items of their own; their outputs go on from it by its id."""
    async with serving(partial(ScriptedChat, says=TWO_CALLS)) as scene, scripted(scene) as client:
        options = {
            "model": "fake",
            "input": "How is the weather?",
            "tools": FLAT_TOOLS,
            "max_output_tokens": 400,
        }
        if streamed:
            async with client.responses.stream(**options) as stream:
                kinds = [event.type async for event in stream]
                response = await stream.get_final_response()
            assert kinds.count("response.function_call_arguments.done") == 2
        else:
            response = await client.responses.create(**options)
        calls = [item for item in response.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == CITIES
        outputs = [{"type": "function_call_output", "call_id": c.call_id, "output": "sun"} for c in calls]
        again = await client.responses.create(
            **options | {"input": outputs}, previous_response_id=response.id
        )
        assert again.usage.input_tokens_details.cached_tokens > response.usage.input_tokens - 30


async def test_structured_output_is_parsed():
    """By the package's own helpers, of chats and of responses."""
    async with serving(partial(ScriptedChat, says='{"city": "Oslo"}')) as scene, scripted(scene) as client:
        chatted = await client.chat.completions.parse(model="fake", messages=HELLO, response_format=Place)
        assert chatted.choices[0].message.parsed == Place(city="Oslo")
        response = await client.responses.parse(model="fake", input="Where?", text_format=Place)
        assert response.output_parsed == Place(city="Oslo")


@pytest.mark.parametrize(
    ("status", "kind", "ask"),
    [
        (400, openai.BadRequestError, {"n": 2}),
        (400, openai.BadRequestError, {"messages": []}),
        (401, openai.AuthenticationError, {}),
        (404, openai.NotFoundError, {"model": "nobody"}),
    ],
)
async def test_refusals_raise_the_class_of_their_status(status, kind, ask):
    """And say which field it was."""
    auth = {"auth": {"openai": ["right"]}} if status == 401 else {}
    async with serving(**auth) as scene, scripted(scene) as client:
        with pytest.raises(kind) as refused:
            await client.chat.completions.create(**{"model": "fake", "messages": HELLO, **ask})
        assert refused.value.status_code == status
        if "n" in ask:
            assert refused.value.param == "n"


def no_constant(name):
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
async def test_numbers_that_json_has_not_are_never_sent(path, streamed):
    """A model wrote 1e999: every reply is JSON, and there is no call with an infinity."""
    says = '<tool_call>\n{"name": "f", "arguments": {"n": 1e999}}\n</tool_call>'
    schema = {"type": "object", "properties": {"n": {"type": "number"}}}
    function = {"name": "f", "description": "d"}
    tool = {"type": "function", "function": {**function, "parameters": schema}}
    if path == "/v1/messages":
        tool = {**function, "input_schema": schema}
    body = {"model": "fake", "messages": HELLO, "tools": [tool], "stream": streamed, "max_tokens": 400}
    if path == "/api/chat":
        del body["max_tokens"]
    async with serving(partial(ScriptedChat, says=says)) as scene:
        reply = await scene.client.post(path, json=body)
    assert reply.status_code == 200
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines()]
    told = [json.loads(line, parse_constant=no_constant) for line in lines if line.startswith("{")]
    assert told
    assert not any("error" in each for each in told)
    assert '"input":{"n"' not in reply.text
