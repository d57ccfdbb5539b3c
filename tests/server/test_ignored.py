"""Every option is honoured, or refused, or named in the header for what has no effect."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio
from runtime.chat_scenes import ScriptedChat

from server.scenes import serving

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TOKENIZE = "/tokenize"
NESTED = {"name": "x", "schema": {"type": "object"}, "strict": True, "description": "A thing"}
SCHEMA_FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
TOOL_USE = {"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
HELLO = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": HELLO},
    RESPONSES: {"model": "fake", "input": "Hi"},
    MESSAGES: {"model": "fake", "messages": HELLO, "max_tokens": 5},
    TOKENIZE: {"model": "fake", "messages": HELLO},
    "/v1/messages/count_tokens": {"model": "fake", "messages": HELLO},
    "/api/chat": {"model": "fake", "messages": HELLO, "stream": False},
    "/api/generate": {"model": "fake", "prompt": "Hi", "raw": True, "stream": False},
}
REFUSED = [
    (CHAT, {"tool_choice": "bogus"}),
    (CHAT, {"tool_choice": "required"}),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "nobody"}}}),
    (CHAT, {"stream_options": {"include_usage": True}}),
    (CHAT, {"reasoning_effort": "bogus"}),
    (CHAT, {"verbosity": "bogus"}),
    (RESPONSES, {"tool_choice": "bogus"}),
    (RESPONSES, {"reasoning": {"effort": "bogus"}}),
    (RESPONSES, {"reasoning": {"bogus": 1}}),
    (RESPONSES, {"text": {"bogus": 1}}),
    (RESPONSES, {"text": {"verbosity": "bogus"}}),
    (RESPONSES, {"text": {"format": {"type": "bogus"}}}),
    (RESPONSES, {"metadata": {"a": 1}}),
    (RESPONSES, {"metadata": {"a" * 65: "x"}}),
    (CHAT, {"metadata": {"a": "x" * 513}}),
    (CHAT, {"metadata": {str(i): "x" for i in range(17)}}),
    (MESSAGES, {"metadata": {"user_id": 1}}),
    (TOKENIZE, {"add_special": False}),
    (TOKENIZE, {"parse_special": False}),
    (RESPONSES, {"stream_options": {"include_usage": True}}),
    (MESSAGES, {"tool_choice": {"type": "bogus"}}),
    (MESSAGES, {"tool_choice": {"type": "any"}}),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "nobody"}}),
    (MESSAGES, {"output_config": {"effort": "bogus"}}),
    (MESSAGES, {"output_config": {"bogus": 1}}),
    (MESSAGES, {"thinking": {"type": "bogus"}}),
    (MESSAGES, {"thinking": {"type": "enabled"}}),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": True}}),
    (MESSAGES, {"thinking": {"type": "adaptive", "display": "bogus"}}),
    ("/v1/messages/count_tokens", {"output_config": {"bogus": 1}}),
    ("/api/chat", {"format": "xml"}),
    ("/api/generate", {"format": "xml"}),
]
UNKNOWN = [
    (RESPONSES, {"text": {"format": {"type": "text", "bogus": 1}}}, "text.format.bogus"),
    (RESPONSES, {"text": {"format": {**SCHEMA_FORMAT, "bogus": 1}}}, "text.format.bogus"),
    (RESPONSES, {"response_format": {"type": "json_object", "bogus": 1}}, "response_format.bogus"),
    (CHAT, {"response_format": {"type": "text", "bogus": 1}}, "response_format.bogus"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": NESTED, "bogus": 1}}, "format.bogus"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {**NESTED, "bogus": 1}}},
        "response_format.json_schema.bogus",
    ),
    (RESPONSES, {"response_format": {"type": "text"}, "text": {"format": {"type": "bogus"}}}, "text.format"),
    (RESPONSES, {"response_format": {"type": "bogus"}, "text": {"format": {"type": "text"}}}, "text.format"),
    (RESPONSES, {"response_format": {}, "text": {"format": SCHEMA_FORMAT}}, "text.format"),
    (RESPONSES, {"response_format": {}}, "response_format"),
    (RESPONSES, {"text": {"format": {}}}, "format"),
    (MESSAGES, {"output_config": {"format": SCHEMA_FORMAT}, "output_format": SCHEMA_FORMAT}, "output_format"),
    (MESSAGES, {"output_config": {"format": {}}, "output_format": SCHEMA_FORMAT}, "output_format"),
    (MESSAGES, {"output_config": {"format": {}}}, "output_config.format"),
    (MESSAGES, {"output_format": {}}, "output_config.format"),
    (MESSAGES, {"metadata": {"bogus": "x"}}, "metadata.bogus"),
    (MESSAGES, {"messages": [*HELLO, {"role": "user", "content": "x", "bogus": 1}]}, "messages.1.bogus"),
    (MESSAGES, {"tools": [TOOL_USE, {**TOOL_USE, "bogus": 1}]}, "tools.1.bogus"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}, "bogus": 1}]}, "tools.0.bogus"),
    (MESSAGES, {"output_config": {"format": {**SCHEMA_FORMAT, "bogus": 1}}}, "output_config.format.bogus"),
]
NAMED = [
    (
        CHAT,
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    (RESPONSES, {"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    (RESPONSES, {"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    (
        MESSAGES,
        {"output_config": {"task_budget": {"type": "tokens", "total": 9}}},
        "output_config.task_budget",
    ),
    (
        MESSAGES,
        {"tools": [TOOL_USE, {**TOOL_USE, "name": "g", "input_examples": [{}]}]},
        "tools.input_examples",
    ),
    ("/api/generate", {"think": True}, "think"),
]
TAKEN = [
    (CHAT, {"tool_choice": "auto"}),
    (CHAT, {"tool_choice": "none", "tools": []}),
    (CHAT, {"reasoning_effort": "low"}),
    (RESPONSES, {"text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}}),
    (RESPONSES, {"truncation": "auto", "tool_choice": "auto"}),
    (RESPONSES, {"metadata": {"any": "key", "may": "stand here"}}),
    (RESPONSES, {"text": {"format": {**SCHEMA_FORMAT, **NESTED}}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": NESTED}}),
    (CHAT, {"response_format": {"type": "json_object", "schema": {"type": "object"}}}),
    (MESSAGES, {"metadata": {"user_id": None}}),
    (TOKENIZE, {"tools": None}),
    (
        MESSAGES,
        {"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": "max"}},
    ),
    (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ("/api/generate", {"format": "json"}),
]


async def test_what_cannot_be_honoured_is_refused():
    """400 that names the field, whole or streamed; also where there are no tools to choose from."""
    async with serving() as scene:
        await scene.client.post("/api/generate", json={"model": "fake"})  # loads it
        for path, more in REFUSED:
            reply = await scene.client.post(path, json=BODIES[path] | more)
            assert reply.status_code == 400, (path, more, reply.text)
            (field,) = more
            assert field in reply.text or "format" in reply.text, reply.text


@pytest.mark.parametrize(("path", "more", "place"), UNKNOWN)
async def test_keys_within_an_object_are_refused_by_their_place(path, more, place):
    """Before a model is loaded, as OpenAI and Anthropic refuse them."""
    async with serving() as scene:
        reply = await scene.client.post(path, json=BODIES[path] | more)
        assert reply.status_code == 400, reply.text
        assert place in reply.json()["error"]["message"]
        assert scene.loads == []


@pytest.mark.parametrize(("path", "more", "name"), NAMED)
async def test_what_has_no_effect_is_named(path, more, name):
    """In the header, by its place."""
    async with serving() as scene:
        await scene.client.post("/api/generate", json={"model": "fake"})
        reply = await scene.client.post(path, json=BODIES[path] | more)
        assert (reply.status_code, reply.headers["x-erllama-ignored"]) == (200, name), reply.text


REASONING = [
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"thinking_budget_tokens": 9, "user": "me"}, "user, thinking_budget_tokens"),
    (RESPONSES, {"reasoning": {"effort": "high"}}, "reasoning.effort"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
    (MESSAGES, {"output_config": {"effort": "low"}}, "output_config.effort"),
    ("/api/chat", {"think": True}, "think"),
    ("/api/chat", {"think": "high"}, "think"),
    ("/api/generate", {"think": True, "raw": False}, "think"),
]
NO_REASONING = [
    (CHAT, {"reasoning_effort": "none"}),
    (RESPONSES, {"reasoning": {"effort": "none"}}),
    (MESSAGES, {"thinking": {"type": "disabled"}}),
    ("/api/chat", {"think": False}),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_asked_of_a_model_that_cannot_is_named(stream):
    """Where the template has no thinking; one that shows the effort alone has it."""
    for template, thinks in (
        ("Qwen-Qwen3-0.6B", True),
        ("upstage-Solar-Open-100B", True),
        ("Qwen-Qwen2.5-7B-Instruct", False),
    ):
        async with serving(partial(ScriptedChat, template=template)) as scene:
            await scene.client.post("/api/generate", json={"model": "fake"})  # loads it
            for path, more, names in [*REASONING, *((*each, None) for each in NO_REASONING)]:
                reply = await scene.client.post(path, json=BODIES[path] | more | {"stream": stream})
                told = reply.headers.get("x-erllama-ignored")
                wanted = names if not thinks else ("user" if "user" in more else None)
                assert (reply.status_code, told) == (200, wanted), (template, path, more, reply.text)


async def test_a_stream_whose_headers_are_out_is_told_too():
    """In a comment, also where the headers named other fields."""
    async with serving(partial(ScriptedChat, template="Qwen-Qwen2.5-7B-Instruct")) as scene:
        scene.hold_load = trio.Event()
        more = {"user": "me", "reasoning_effort": "high", "stream": True}
        async with scene.client.stream("POST", CHAT, json=BODIES[CHAT] | more) as reply:
            assert reply.headers["x-erllama-ignored"] == "user"
            scene.hold_load.set()
            text = "".join([part async for part in reply.aiter_text()])
        assert ": x-erllama-ignored: reasoning_effort\n\n" in text


async def test_what_is_honoured_is_not_named():
    """What every client sends is taken without a word."""
    async with serving() as scene:
        for path, more in TAKEN:
            reply = await scene.client.post(path, json=BODIES[path] | more)
            assert (reply.status_code, "x-erllama-ignored" in reply.headers) == (200, False), (
                more,
                reply.text,
            )


NULLS = [
    (CHAT, ("temperature", "top_p", "top_k", "stream", "n", "stop", "max_tokens", "stream_options")),
    ("/v1/completions", ("temperature", "top_p", "stream", "logprobs", "echo", "suffix", "best_of")),
    (RESPONSES, ("temperature", "top_p", "stream", "instructions", "text", "tools", "store")),
    ("/api/chat", ("stream", "options", "format", "keep_alive", "think", "truncate", "tools")),
    ("/api/generate", ("system", "template", "context", "raw", "images", "suffix", "truncate")),
]


@pytest.mark.parametrize(("path", "names"), NULLS)
async def test_null_is_as_if_it_were_not_there(path, names):
    """Packages send it for what their caller left open; only what has to be there is missed."""
    async with serving() as scene:
        body = {k: v for k, v in BODIES.get(path, {"model": "fake", "prompt": "Hi"}).items() if k != "stream"}
        usual = await scene.client.post(path, json=body)
        reply = await scene.client.post(path, json={**body, **dict.fromkeys(names)})
        assert (reply.status_code, reply.headers["content-type"]) == (200, usual.headers["content-type"])
        assert (await scene.client.post(path, json={**body, "model": None})).status_code == 400
        unknown = (await scene.client.post(path, json={**body, "bogus": None})).status_code
        assert unknown == (200 if path.startswith("/api/") else 400)


async def test_truncation_decides_whether_a_history_is_cut():
    """Disabled: refused, though the settings would cut; auto: cut, though they would not."""

    def small():
        backend = ScriptedChat(n_ctx=1)
        backend.n_ctx = 600
        return backend

    said = [{"role": r, "content": "x" * 100} for _ in range(5) for r in ("user", "assistant")]
    body = {"model": "fake", "input": [*said, *HELLO], "max_output_tokens": 20}
    for fits, truncation, status in (
        (True, None, 200),
        (True, "disabled", 400),
        (False, None, 400),
        (False, "auto", 200),
    ):
        async with serving(small, fit_history=fits) as scene:
            reply = await scene.client.post(RESPONSES, json={**body, "truncation": truncation})
            assert reply.status_code == status, reply.text
            assert ("x-erllama-dropped-messages" in reply.headers) == (status == 200)


async def test_messages_are_tokenized_as_a_chat_renders_them():
    """Without the lines that are taken out of its head; and with the limits of a chat."""
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=01;"
    messages = [{"role": "system", "content": f"{billing}\nBe kind."}, *HELLO]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    async with serving(limits={"max_tools": 1}) as scene:
        body = {"model": "fake", "messages": messages, "tools": [tool]}
        usage = (await scene.client.post(CHAT, json=body)).json()["usage"]
        tokens = (await scene.client.post("/tokenize", json=body)).json()["tokens"]
        assert len(tokens) == usage["prompt_tokens"]
        assert "billing" not in scene.backends["fake"].prompts[0]
        assert (await scene.client.post("/tokenize", json=body | {"tools": [tool, tool]})).status_code == 400
