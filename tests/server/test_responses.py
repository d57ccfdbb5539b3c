"""/v1/responses: calls that are cut, conversations that are kept, and streams that fail."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import openai
import pytest
import trio
from runtime.chat_scenes import ScriptedChat

from erllama.errors import InvalidContent, InvalidOption, LoadFailed, QueueFull
from erllama.server.openai_input import TTL_S, Threads, size_of
from server.scenes import serving, sse_events

RESPONSES = "/v1/responses"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]
KEYS = {"openai": ["one", "two"]}

# The package leaves generators open behind a stream's last event; trio tells of it, asyncio does not.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def body(said: Any = "Hi", **more: Any) -> dict[str, Any]:
    return {"model": "fake", "input": said, **more}


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in sse_events(text)]


@pytest.mark.parametrize("streamed", [False, True])
async def test_half_a_call_is_none(streamed):
    """Where the limit of tokens cuts one off, nothing is told as done that a client would run."""
    async with serving(partial(ScriptedChat, says=CALL)) as scene:
        asked = body(tools=TOOLS, max_output_tokens=len(CALL) - 20, stream=streamed)
        reply = await scene.client.post(RESPONSES, json=asked)
        if streamed:
            events = events_of(reply.text)
            begun = [e["item"]["type"] for e in events if e["type"] == "response.output_item.added"]
            done = [e["item"]["type"] for e in events if e["type"] == "response.output_item.done"]
            assert (begun, done) == (["function_call", "message"], ["message"])
            assert not [e for e in events if e["type"] == "response.function_call_arguments.done"]
        response = events[-1]["response"] if streamed else reply.json()
        assert response["status"] == "incomplete"
        assert [item["type"] for item in response["output"]] == ["message"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("says", "limit", "right"),
    [
        ("Hello there.", 5, [("message", "incomplete")]),
        ("Hello there.", 99, [("message", "completed")]),
        ("<think>\nI think.\n</think>\n\nHello.", 14, [("reasoning", "incomplete")]),
        (
            "<think>\nI think.\n</think>\n\nHello.",
            31,
            [("reasoning", "completed"), ("message", "incomplete")],
        ),
        (CALL, 400, [("function_call", "completed")]),
    ],
)
async def test_the_item_that_was_cut_off_is_incomplete(says, limit, right, streamed):
    """In the response, and in the event that ends it."""
    async with serving(partial(ScriptedChat, says=says)) as scene:
        asked = body(tools=TOOLS, max_output_tokens=limit, stream=streamed)
        reply = await scene.client.post(RESPONSES, json=asked)
        events = events_of(reply.text) if streamed else []
        response = events[-1]["response"] if streamed else reply.json()
        told = [(item["type"], item["status"]) for item in response["output"]]
        assert told == right
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert [item["status"] for item in done] == [status for _, status in right if streamed]


async def test_system_items_stay_and_instructions_do_not():
    """The next turn has what was said in the input before; instructions are given anew with each turn."""
    async with serving() as scene:
        said = [{"role": "system", "content": "Sys word"}, {"role": "user", "content": "Hi"}]
        first = await scene.client.post(RESPONSES, json=body(said, instructions="First rule"))
        again = body("Again", previous_response_id=first.json()["id"], instructions="Second rule")
        await scene.client.post(RESPONSES, json=again)
        prompts = scene.backends["fake"].prompts
        assert [("Sys word" in p, "First rule" in p, "Second rule" in p) for p in prompts] == [
            (True, True, False),
            (True, False, True),
        ]


async def test_a_conversation_is_its_keys_alone():
    """Another API key that knows the id gets 404 as if it did not exist; the first one goes on."""
    async with serving(auth=KEYS) as scene:
        one, two = ({"authorization": f"Bearer {key}"} for key in KEYS["openai"])
        first = await scene.client.post(RESPONSES, json=body("My secret"), headers=one)
        again = body("And?", previous_response_id=first.json()["id"])
        for headers, status in ((two, 404), (one, 200)):
            assert (await scene.client.post(RESPONSES, json=again, headers=headers)).status_code == status
        assert ["My secret" in p for p in scene.backends["fake"].prompts] == [True, True]


async def test_a_response_that_is_not_kept_is_told():
    """In OpenAI's shape: one that never was, one that was not to be kept; before anything else is wrong."""
    orphan = [{"type": "function_call_output", "call_id": "c", "output": "x"}]
    async with serving() as scene:
        unkept = (await scene.client.post(RESPONSES, json=body("Hi", store=False))).json()["id"]
        for asked, response_id in ((orphan, "resp_invented"), ("And?", unkept), ("And?", "")):
            reply = await scene.client.post(RESPONSES, json=body(asked, previous_response_id=response_id))
            error = reply.json()["error"]
            assert reply.status_code == 404
            assert error["code"] == "previous_response_not_found"
            assert (error["type"], error["param"]) == ("invalid_request_error", "previous_response_id")
        assert len(scene.backends["fake"].prompts) == 1


def test_conversations_are_kept_for_a_time_and_within_a_size():
    """An hour each; the oldest go where all of them are too large, also the newest if it is so alone."""
    now, said = 0.0, [{"role": "user", "content": "x" * 1000}]
    threads = Threads(int(2.5 * size_of(said)), lambda: now)
    assert size_of(said) > 1000
    for name in "abc":
        threads.put(name, b"", said)
        now += 1
    assert [kept(threads, name) for name in "abc"] == [None, said, said]
    now = TTL_S + 1.5
    assert [kept(threads, name) for name in "bc"] == [None, said]
    threads.put("d", b"", [{"role": "user", "content": "x" * 9000}])
    assert [kept(threads, name) for name in "cd"] == [None, None]
    threads.put("e", b"", said)
    assert kept(threads, "e") == said


def kept(threads: Threads, name: str) -> list[dict[str, Any]] | None:
    try:
        return threads.get(name, b"")
    except InvalidOption:
        return None


async def test_the_settings_say_how_much_is_kept():
    """With no room there is nothing to go on from."""
    async with serving(limits={"max_kept_conversations_bytes": 0}) as scene:
        first = await scene.client.post(RESPONSES, json=body("My word"))
        again = body("And?", previous_response_id=first.json()["id"])
        assert (await scene.client.post(RESPONSES, json=again)).status_code == 404


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LoadFailed("no such luck"), "server_error"),
        (QueueFull("no such luck"), "rate_limit_exceeded"),
        (InvalidContent("no such luck"), "invalid_prompt"),
    ],
)
async def test_a_stream_that_fails_has_begun(error, code):
    """`response.created` comes first even before any token, and the official package tells the error."""
    async with serving() as scene:

        async def fail(spec, progress):
            await trio.sleep(0.05)
            raise error

        scene.pool._load = fail
        events = events_of((await scene.client.post(RESPONSES, json=body(stream=True))).text)
        kinds = ["response.created", "response.in_progress", "response.failed"]
        assert [e["type"] for e in events] == kinds
        assert [e["sequence_number"] for e in events] == [0, 1, 2]
        assert events[-1]["response"]["error"] == {"code": code, "message": "no such luck"}
        client = openai.AsyncOpenAI(base_url=f"{scene.url}/v1", api_key="none", max_retries=0)
        async with client, client.responses.stream(model="fake", input="Hi") as stream:
            last = [event async for event in stream][-1]
        assert (last.type, last.response.error.message) == ("response.failed", "no such luck")


@pytest.mark.parametrize("streamed", [False, True])
async def test_tokens_of_thinking_are_counted(streamed):
    """Those between the markers, a part of the output; none where nothing was thought."""
    thought = "\nLet me think.\n"
    for says, least, most in (
        (f"<think>{thought}</think>\n\nHello.", len(thought.strip()), len(f"<think>{thought}</think>")),
        ("Hello.", 0, 0),
    ):
        async with serving(partial(ScriptedChat, says=says)) as scene:
            reply = await scene.client.post(RESPONSES, json=body(stream=streamed))
            response = events_of(reply.text)[-1]["response"] if streamed else reply.json()
            usage = response["usage"]
            assert least <= usage["output_tokens_details"]["reasoning_tokens"] <= most
            assert usage["output_tokens"] >= len(says)
