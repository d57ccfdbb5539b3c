"""The official anthropic package against a real server, and against a scripted model that calls tools."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
from functools import partial

import anthropic
import pytest
from runtime.chat_scenes import ScriptedChat

from server.scenes import serving

GREEDY = {"temperature": 0}  # newer versions of the package have no such argument
HELLO = [{"role": "user", "content": "Say hello in one short sentence."}]
TOOLS = [
    {
        "name": "get_weather",
        "description": "The weather of a city",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
        "cache_control": {"type": "ephemeral"},
    }
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO_CALLS = CALL + "\n" + CALL.replace("Paris", "Rome")


@pytest.fixture(scope="module")
def client(real_server):
    """A client of the server."""
    with anthropic.Anthropic(base_url=real_server, api_key="none", max_retries=0) as made:
        yield made


def ask(client, **more):
    options = {"model": "smol", "messages": HELLO, "extra_body": GREEDY, "max_tokens": 16} | more
    return client.messages.create(**options)


def total(usage):
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


@pytest.mark.model
@pytest.mark.slow
def test_a_message_is_answered_whole_and_streamed(client):
    """With text, and three counts that add up to what count_tokens says."""
    system = [{"type": "text", "text": "You are kind. " * 30, "cache_control": {"type": "ephemeral"}}]
    whole = ask(client, system=system)
    assert whole.content[0].text
    assert whole.stop_reason in ("end_turn", "max_tokens")
    counted = client.messages.count_tokens(model="smol", messages=HELLO, system=system).input_tokens
    assert total(whole.usage) == counted
    with client.messages.stream(
        model="smol", messages=HELLO, system=system, extra_body=GREEDY, max_tokens=16
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text != ""
    assert final.usage.cache_read_input_tokens > 0
    assert total(final.usage) == counted
    assert final.usage.output_tokens > 0


async def test_a_stop_sequence_is_named():
    """The answer ends before it, and says which one it was."""
    async with serving(partial(ScriptedChat, says="one two three")) as scene, scripted(scene) as client:
        options = {"model": "fake", "messages": HELLO, "max_tokens": 50, "stop_sequences": ["two", "x"]}
        whole = await client.messages.create(**options)
        async with client.messages.stream(**options) as stream:
            streamed = await stream.get_final_message()
        for answer in (whole, streamed):
            assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "two")
            assert answer.content[0].text == "one "


@pytest.mark.model
@pytest.mark.slow
def test_refusals_have_their_classes(client):
    """What the SDK raises follows status and shape."""
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(client, model="nobody")
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        ask(client, max_tokens=0)
    with pytest.raises(anthropic.BadRequestError, match="nonsense"):
        ask(client, extra_body={"nonsense": 1})
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        ask(client, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        ask(client, messages=[{"role": "user", "content": "word " * 4000}])
    assert [m.id for m in client.models.list()] == ["smol"]


def scripted(scene):
    return anthropic.AsyncAnthropic(base_url=scene.url, api_key="none", max_retries=0)


@pytest.mark.parametrize("streamed", [False, True])
async def test_calls_arrive_as_blocks(streamed):
    """Two calls are two blocks with ids and arguments; with parallel use off there is one."""
    async with serving(partial(ScriptedChat, says=TWO_CALLS)) as scene, scripted(scene) as client:
        options = {"model": "fake", "messages": HELLO, "tools": TOOLS, "max_tokens": 400}
        if streamed:
            async with client.messages.stream(**options) as stream:
                kinds = [event.type async for event in stream]
                message = await stream.get_final_message()
            assert kinds[0] == "message_start"
            assert kinds[-1] == "message_stop"
        else:
            message = await client.messages.create(**options)
        assert message.stop_reason == "tool_use"
        assert [b.input for b in message.content if b.type == "tool_use"] == [
            {"city": "Paris"},
            {"city": "Rome"},
        ]
        ids = [b.id for b in message.content if b.type == "tool_use"]
        assert len(set(ids)) == 2
        assert all(i.startswith("toolu_") for i in ids)
        assert not [b for b in message.content if b.type == "text"]


@pytest.mark.parametrize(("thinking", "budget"), [({"type": "enabled", "budget_tokens": 7}, 7), (None, None)])
async def test_the_budget_of_thinking_reaches_the_sampler(thinking, budget):
    """H16: after so many tokens the block is ended for the model."""
    async with serving() as scene:
        body = {"model": "fake", "messages": HELLO, "max_tokens": 50, "thinking": thinking}
        assert (await scene.client.post("/v1/messages", json=body)).status_code == 200
        guided = scene.backends["fake"].params[-1].guide.thinking
        assert (guided and guided.budget) == budget


async def test_the_packages_own_runner_of_tools_goes_on_without_a_thread():
    """It asks for a conversation that the server keeps, is refused in words it knows, and sends all of it."""
    asked = []

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sun"

    async with serving(partial(ScriptedChat, says=CALL)) as scene, scripted(scene) as client:
        runner = client.beta.messages.tool_runner(
            model="fake", messages=HELLO, tools=[get_weather], max_tokens=400, max_iterations=3
        )
        replies = [reply async for reply in runner]
        assert len(replies) == 3
        assert asked[:2] == ["Paris", "Paris"]
        assert "sun" in scene.backends["fake"].prompts[-1]


async def test_an_agent_reads_more_from_the_cache_each_turn():
    """Ten turns with a tool: what is reused grows every time, and nothing is counted twice."""
    async with serving(partial(ScriptedChat, says=CALL)) as scene, scripted(scene) as client:
        messages = [*HELLO]
        reads = []
        for turn in range(10):
            reply = await client.messages.create(
                model="fake",
                system="You have tools. " * 20,
                messages=messages,
                tools=TOOLS,
                max_tokens=400,
                metadata={"user_id": "agent"},
            )
            counted = await client.messages.count_tokens(
                model="fake", system="You have tools. " * 20, messages=messages, tools=TOOLS
            )
            assert total(reply.usage) == counted.input_tokens
            reads.append(reply.usage.cache_read_input_tokens)
            call = reply.content[0]
            result = {"type": "tool_result", "tool_use_id": call.id, "content": f"{turn} degrees"}
            messages += [
                {"role": "assistant", "content": [b.model_dump() for b in reply.content]},
                {"role": "user", "content": [result]},
            ]
        assert reads[0] == 0
        assert all(later > earlier for earlier, later in itertools.pairwise(reads))


async def test_a_billing_line_does_not_cost_the_cache():
    """A line that changes with every request is dropped, the header says so, and the rest is reused."""
    async with serving(partial(ScriptedChat, says="Hi")) as scene:
        reads = []
        for n in (1, 2):
            body = {
                "model": "fake",
                "max_tokens": 5,
                "messages": HELLO,
                "system": [
                    {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.{n}; cch=0{n}7;"},
                    {"type": "text", "text": "You are an agent. " * 20},
                ],
            }
            reply = await scene.client.post("/v1/messages", json=body)
            assert reply.headers["x-erllama-prompt-changes"] == "claude-code billing dropped"
            reads.append(reply.json()["usage"]["cache_read_input_tokens"])
        assert reads[0] == 0
        assert reads[1] > 300
        assert "billing" not in scene.backends["fake"].prompts[0]


async def test_thinking_is_told_only_to_those_who_ask():
    """With thinking enabled there is a thinking block before the text, else only the text."""
    says = "<think>\nhm\n</think>\n\nHello."
    async with serving(partial(ScriptedChat, says=says)) as scene, scripted(scene) as client:
        options = {"model": "fake", "messages": HELLO, "max_tokens": 2000}
        thinking = {"type": "enabled", "budget_tokens": 1024}
        reply = await client.messages.create(**options, thinking=thinking)
        assert [b.type for b in reply.content] == ["thinking", "text"]
        assert reply.content[0].thinking.strip() == "hm"
        async with client.messages.stream(**options, thinking=thinking) as stream:
            final = await stream.get_final_message()
        assert [b.type for b in final.content] == ["thinking", "text"]
        assert final.content[1].text.strip() == "Hello."
        omitted = {**thinking, "display": "omitted"}
        reply = await client.messages.create(**options, thinking=omitted)
        assert [(b.type, b.text.strip()) for b in reply.content] == [("text", "Hello.")]
        async with client.messages.stream(**options, thinking=omitted) as stream:
            final = await stream.get_final_message()
        assert [(b.type, b.text.strip()) for b in final.content] == [("text", "Hello.")]


@pytest.mark.parametrize("key", ["", "secret"])
async def test_a_block_of_thinking_is_signed_if_there_is_a_key(key):
    """H16: signature_delta carries the HMAC of what was thought; without a key there is no such event."""
    says = "<think>\nhm\n</think>\n\nHello."
    auth = {"thinking_signing_key": key}
    async with serving(partial(ScriptedChat, says=says), auth=auth) as scene:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        body = {"model": "fake", "messages": HELLO, "max_tokens": 2000, "thinking": thinking, "stream": True}
        reply = await scene.client.post("/v1/messages", json=body)
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        thought = "".join(d["thinking"] for d in deltas if d["type"] == "thinking_delta")
        signed = [d["signature"] for d in deltas if d["type"] == "signature_delta"]
        made = hmac.new(key.encode(), thought.encode(), hashlib.sha256).hexdigest()
        assert thought.strip() == "hm"
        assert signed == ([made] if key else [])


async def test_a_busy_session_is_overloaded():
    """529 and retry-after, as Anthropic's clients expect."""
    import trio

    make = partial(ScriptedChat, says="word " * 100, threaded=True, step_delay_s=0.02, n_slots=2)
    async with serving(make) as scene:
        body = {"model": "fake", "max_tokens": 30, "messages": HELLO, "metadata": {"user_id": "me"}}
        await scene.client.post("/v1/messages", json=body | {"max_tokens": 1})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(scene.client.post, "/v1/messages", json=body))
            await trio.sleep(0.1)
            busy = await scene.client.post("/v1/messages", json=body)
            assert busy.status_code == 529
            assert busy.headers["retry-after"] == "1"
            assert busy.json()["error"]["type"] == "overloaded_error"


async def test_one_call_for_those_who_want_one():
    """Where the model writes two all the same, the first is what counts; whole and streamed."""
    async with serving(partial(ScriptedChat, says=TWO_CALLS)) as scene, scripted(scene) as client:
        options = {"model": "fake", "messages": HELLO, "tools": TOOLS, "max_tokens": 400}
        options["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
        whole = await client.messages.create(**options)
        async with client.messages.stream(**options) as stream:
            streamed = await stream.get_final_message()
        for reply in (whole, streamed):
            assert [b.input for b in reply.content] == [{"city": "Paris"}]
            assert reply.stop_reason == "tool_use"


async def test_models_are_told_in_anthropics_shape_and_under_its_keys():
    """Listed and one by one, also by an alias; OpenAI's clients get theirs at the same paths."""
    auth = {"anthropic": ["a"], "openai": ["o"]}
    async with serving(auth=auth, aliases={"other": "fake"}) as scene:
        async with anthropic.AsyncAnthropic(base_url=scene.url, api_key="a", max_retries=0) as client:
            assert [(m.id, m.type) async for m in client.models.list()] == [("fake", "model")]
            for name in ("fake", "other"):
                model = await client.models.retrieve(name)
                assert (model.id, model.type, model.display_name) == (name, "model", name)
                assert model.created_at.year == 1970
            with pytest.raises(anthropic.NotFoundError) as missing:
                await client.models.retrieve("nobody")
            assert missing.value.body["error"]["type"] == "not_found_error"
        async with anthropic.AsyncAnthropic(base_url=scene.url, api_key="o", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.models.retrieve("fake")
        for key, status in (("o", 200), ("a", 401)):
            bearer = {"authorization": f"Bearer {key}"}
            reply = await scene.client.get("/v1/models/fake", headers=bearer)
            assert reply.status_code == status
            assert ("owned_by" in reply.json()) == (status == 200)


async def test_a_call_comes_in_pieces_and_a_cut_one_is_no_use():
    """H14: several input_json_delta make the arguments; cut off they make none, and it says max_tokens."""
    async with serving(partial(ScriptedChat, says=CALL)) as scene:
        for limit, reason in ((400, "tool_use"), (len(CALL) - 20, "max_tokens")):
            body = {"model": "fake", "messages": HELLO, "tools": TOOLS, "max_tokens": limit}
            whole = (await scene.client.post("/v1/messages", json=body)).json()
            assert whole["stop_reason"] == reason
            calls = [block["input"] for block in whole["content"] if block["type"] == "tool_use"]
            assert calls == ([{"city": "Paris"}] if reason == "tool_use" else [])
            reply = await scene.client.post("/v1/messages", json={**body, "stream": True})
            events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
            deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
            pieces = [d["partial_json"] for d in deltas if d["type"] == "input_json_delta"]
            assert len(pieces) > 1
            (end,) = [event["delta"] for event in events if event["type"] == "message_delta"]
            assert end["stop_reason"] == reason
            if reason == "tool_use":
                assert json.loads("".join(pieces)) == {"city": "Paris"}
            else:
                with pytest.raises(ValueError, match=r"Unterminated|Expecting|delimiter"):
                    json.loads("".join(pieces))
