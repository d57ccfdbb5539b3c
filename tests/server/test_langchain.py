"""A second kind of client: LangChain, against a real and a scripted server."""

from __future__ import annotations

import operator
from functools import partial, reduce

import pytest
import trio
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from runtime.chat_scenes import ScriptedChat

from server.scenes import serving

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO_CALLS = CALL + "\n" + CALL.replace("Paris", "Rome")


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(le=150)


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sun in {city}"


def langchain(url, model="smol", **more):
    options = {"model": model, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "temperature": 0}
    return ChatOpenAI(**{**options, "max_completion_tokens": 16, **more})


def whole_of_stream(client, messages):
    """What its chunks add up to; LangChain's own asynchronous calls need asyncio."""
    return reduce(operator.add, client.stream(messages))


@pytest.mark.model
@pytest.mark.slow
def test_a_chat_is_answered_whole_and_streamed(real_server):
    """Text and usage; the cached tokens of the second time are told."""
    client = langchain(real_server, stream_usage=True)
    messages = [("system", "You are kind. " * 10), ("human", "Say hello in one short sentence.")]
    whole = client.invoke(messages)
    chunks = list(client.stream(messages))
    assert whole.content
    assert "".join(chunk.content for chunk in chunks)
    usage = next(chunk.usage_metadata for chunk in chunks if chunk.usage_metadata)
    assert usage["input_tokens"] == whole.usage_metadata["input_tokens"]
    assert usage["input_token_details"]["cache_read"] == usage["input_tokens"] - 1


@pytest.mark.model
@pytest.mark.slow
def test_structured_output_is_an_object(real_server):
    """Of the class that was asked for."""
    client = langchain(real_server, max_completion_tokens=80).with_structured_output(
        Person, method="json_schema"
    )
    person = client.invoke("Ada is 36 years old. Who is it?")
    assert isinstance(person, Person)


@pytest.mark.parametrize("streamed", [False, True])
async def test_tools_are_called_and_their_results_taken(streamed):
    """Two calls arrive with ids and arguments; the results go back, and more is reused."""
    async with serving(partial(ScriptedChat, says=TWO_CALLS)) as scene:
        client = langchain(scene.url, "fake", max_completion_tokens=400).bind_tools([get_weather])
        messages = [("system", "Use the tools. " * 20), ("human", "How is the weather in Paris and Rome?")]
        ask = partial(whole_of_stream, client) if streamed else client.invoke
        reply = await trio.to_thread.run_sync(ask, messages)
        assert [call["args"] for call in reply.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}]
        assert len({call["id"] for call in reply.tool_calls}) == 2
        assert reply.content == ""
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": get_weather(**call["args"])}
            for call in reply.tool_calls
        ]
        again = await trio.to_thread.run_sync(client.invoke, [*messages, reply, *results])
        assert again.usage_metadata["input_token_details"]["cache_read"] > 500


async def test_a_chain_that_reminds_in_the_middle_is_answered():
    """A system message after the first one, which Qwen 3.5's template would refuse."""
    async with serving(partial(ScriptedChat, template="Qwen3.5-4B", says="hm</think>Hello.")) as scene:
        messages = [
            ("system", "Be kind."),
            ("human", "Hi"),
            ("ai", "Yes?"),
            ("system", "Be short."),
            ("human", "Why?"),
        ]
        answer = await trio.to_thread.run_sync(langchain(scene.url, "fake").invoke, messages)
        assert answer.content == "Hello."
