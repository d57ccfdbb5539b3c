"""Middleware: functions around every call, which see it, change it, or answer it themselves."""

from __future__ import annotations

import dataclasses
import time

import pytest
from chat.scenes import TOOLS, USER

import erllama
from erllama.errors import InvalidOption

from .chat_scenes import ScriptedChat

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def recorder(into, mark=""):
    """Notes name, seconds and result of every call, when it is over."""

    async def record(call, following):
        into.append(f"{mark}>{call.name}")
        started = time.perf_counter()
        result = await following(call)
        into.append((f"{mark}{call.name}", time.perf_counter() - started, call, result))
        return result

    return record


def finished(log):
    """The names of what is over, in order."""
    return [each[0] for each in log if isinstance(each, tuple)]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_chat_is_one_rendering_and_one_reading(streams):
    """C15: apply and parse are seen once each, with how long they took."""
    log = []
    async with erllama.open_engine(middleware=[recorder(log)]) as engine:
        model = await engine.load_model(backend=ScriptedChat(says=CALL))
        if streams:
            async with model.chat_stream([USER], tools=TOOLS) as events:
                done = await erllama.collect(events)
        else:
            done = await model.chat([USER], tools=TOOLS)
    names = finished(log)
    assert sorted(names) == sorted(["chat_apply", "chat_parse", "chat_stream" if streams else "chat"])
    by_name = {each[0]: each for each in log if isinstance(each, tuple)}
    _, apply_s, apply, params = by_name["chat_apply"]
    _, _, parse, message = by_name["chat_parse"]
    assert apply_s >= params.apply_s > 0
    assert apply.arguments["messages"] == [USER]
    assert parse.arguments["seconds"] > 0
    assert parse.arguments["text"] == CALL
    assert parse.arguments["partial"] is False
    assert message == done.message


async def test_the_halves_by_hand_are_seen_too():
    """`chat_apply` and `chat_parse` of those who generate elsewhere."""
    log = []
    async with erllama.open_engine(middleware=[recorder(log)]) as engine:
        model = await engine.load_model(backend=ScriptedChat())
        params = await model.chat_apply([USER], tools=TOOLS)
        await model.chat_parse(params, CALL)
        await model.warm([USER])
        await model.prefill_only("p")
    assert finished(log) == ["chat_apply", "chat_parse", "chat_apply", "warm", "prefill_only"]


async def test_they_nest_in_the_order_given():
    """The engine's around the request's, the first outermost; a request's own is around its chat's halves."""
    log = []
    outer = [recorder(log, "a"), recorder(log, "b")]
    async with erllama.open_engine(middleware=outer) as engine:
        model = await engine.load_model(backend=ScriptedChat())
        await model.complete("p", middleware=[recorder(log, "c")])
        assert log[:3] == ["a>complete", "b>complete", "c>complete"]
        assert finished(log) == ["ccomplete", "bcomplete", "acomplete"]
        log.clear()
        await model.chat([USER], middleware=[recorder(log, "c")])
    assert {"cchat", "cchat_apply", "cchat_parse"} <= set(finished(log))


async def test_one_may_change_the_call():
    """What the next ones get is what it hands on."""

    async def shorter(call, following):
        return await following(
            dataclasses.replace(call, arguments={**call.arguments, "max_tokens": 2, "prompt": "other"})
        )

    backend = ScriptedChat()
    async with erllama.open_engine() as engine:
        model = await engine.load_model(backend=backend)
        answer = await model.complete("p", middleware=[shorter])
        async with model.stream("p", middleware=[shorter]) as events:
            streamed = await erllama.collect(events)
    assert len(answer.generated) == len(streamed.generated) == 2
    assert backend.prompts == ["other", "other"]


async def test_one_may_answer_itself():
    """Nothing is computed, and a stream's block ends as any other."""

    async def known(call, following):
        return "known"

    backend = ScriptedChat()
    async with erllama.open_engine(middleware=[known]) as engine:
        model = await engine.load_model(backend=backend)
        assert await model.chat([USER]) == "known"
        async with model.stream("p") as events:
            assert events == "known"
    assert backend.prompts == []


async def test_what_one_raises_arrives():
    """And nothing is left running."""

    async def refuses(call, following):
        await following(call)
        raise LookupError("not today")

    async with erllama.open_engine() as engine:
        model = await engine.load_model(backend=ScriptedChat())
        with pytest.raises(LookupError, match="not today"):
            await model.complete("p", middleware=[refuses])
        with pytest.raises(LookupError, match="not today"):
            async with model.chat_stream([USER], middleware=[refuses]):
                raise AssertionError("the block was entered")
        assert model.queue_depth() == 0


@pytest.mark.parametrize("given", ["x", [3], 3, {"a": print}])
async def test_what_is_no_middleware(given):
    """A typed error, of the engine and of a request."""
    with pytest.raises(InvalidOption, match="middleware"):
        erllama.open_engine(middleware=given).__aenter__().send(None)
    async with erllama.open_engine() as engine:
        model = await engine.load_model(backend=ScriptedChat())
        with pytest.raises(InvalidOption, match="middleware"):
            await model.complete("p", middleware=given)
