"""What users call to chat: messages in, a message or its events out."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import threading

import make_tiny_gguf
import pytest
import trio
from chat.scenes import TOOLS, USER, call, dialogue, result, tool

import erllama
from erllama import ChatMessage, Done, Thinking, ThinkingEnd, Token, TokenId, ToolCallDelta, llama
from erllama.errors import ContextOverflow, InvalidContent, InvalidGrammar, InvalidOption, NotSupported
from erllama.testing import FakeBackend
from runtime.chat_scenes import ScriptedChat
from runtime.scenes import events_of, load, loaded, wait_idle

pytestmark = pytest.mark.model  # templates are llama-common's

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Bergen", "n": 3}}\n</tool_call>'


async def chat_events(model, messages=(USER,), **options):
    """Everything a chat stream delivers, ids aside."""
    async with model.chat_stream(list(messages), **options) as events:
        return [event async for event in events if not isinstance(event, TokenId)]


async def test_an_answer_is_a_message():
    """C6: the template runs, the model answers, the answer is parsed."""
    async with loaded(ScriptedChat(says="It rains.")) as model:
        answer = await model.chat([USER])
    assert answer.message == ChatMessage(role="assistant", content="It rains.")
    assert answer.reply == "It rains."
    assert answer.finish_reason == "stop"


async def test_the_answers_message_goes_into_the_next_request():
    """A message that was answered is one that can be sent: calls, reasoning and all."""
    backend = ScriptedChat(says=f"<think>\nA city.\n</think>\n\n{CALL}")
    async with loaded(backend) as model:
        answer = await model.chat([USER], tools=TOOLS)
        [made] = answer.message.tool_calls
        result = {"role": "tool", "tool_call_id": made.id, "content": "rain"}
        await model.chat([USER, answer.message, result], tools=TOOLS)
        await model.chat([USER, answer.message.to_dict(), result], tools=TOOLS)
    assert made.arguments == {"city": "Oslo"}
    assert answer.message.reasoning_content.strip() == "A city."
    assert backend.prompts[1] == backend.prompts[2]
    assert '"city": "Oslo"' in backend.prompts[1]


async def test_a_call_streams_while_it_is_generated():
    """C9: id and name first, then arguments in pieces that add up; its text is no content."""
    async with loaded(ScriptedChat(says=f"Let me see.\n{CALL}\n{SECOND}")) as model:
        events = await chat_events(model, tools=TOOLS)
    done = events[-1].completion
    calls = [event for event in events if isinstance(event, ToolCallDelta)]
    assert [(c.index, c.name, c.arguments) for c in calls if c.name] == [
        (0, "get_weather", ""),
        (1, "get_time", ""),
    ]
    for index, made in enumerate(done.message.tool_calls):
        assert "".join(c.arguments for c in calls if c.index == index) == made.arguments_json
        assert json.loads(made.arguments_json) == made.arguments
    assert len([c for c in calls if c.index == 0]) > 3
    content = "".join(event.text for event in events if isinstance(event, Token))
    assert content == done.message.content
    assert "tool_call" not in content


async def test_a_raw_stream_knows_no_calls():
    """C9: the same text from a raw prompt is text."""
    async with loaded(ScriptedChat(says=CALL)) as model:
        events = await events_of(model, "prompt", max_tokens=200)
    assert {type(event) for event in events} == {Token, TokenId, Done}
    assert events[-1].completion.reply == CALL
    assert events[-1].completion.message is None


async def test_thinking_comes_before_the_answer():
    """C12, C13: thinking in pieces, one signed end, then content."""
    says = "<think>\nRain falls.\nOften.\n</think>\n\nYes."
    async with loaded(ScriptedChat(says=says), thinking_signing_key=b"secret") as model:
        events = await chat_events(model)
    kinds = [type(event) for event in events]
    assert kinds.count(ThinkingEnd) == 1
    end = kinds.index(ThinkingEnd)
    assert set(kinds[:end]) == {Thinking}
    assert set(kinds[end + 1 :]) == {Token, Done}
    thought = "".join(event.text for event in events[:end])
    assert thought.strip() == "Rain falls.\nOften."
    assert events[end].signature == hmac.new(b"secret", thought.encode(), hashlib.sha256).digest()
    assert events[-1].completion.reply == "Yes."
    assert events[-1].completion.message.reasoning_content == thought


async def test_reasoning_can_stay_in_the_content():
    """`inline` leaves the answer as the model wrote it; without a key the signature is empty."""
    says = "<think>\nHm.\n</think>\n\nYes."
    async with loaded(ScriptedChat(says=says)) as model:
        inline = await model.chat([USER], reasoning="inline")
        events = await chat_events(model)
    assert "Hm." in inline.reply
    assert inline.message.reasoning_content is None
    assert [event.signature for event in events if isinstance(event, ThinkingEnd)] == [b""]


async def test_reasoning_off_reaches_the_template():
    """A template that can be told not to think is told so."""
    backend = ScriptedChat()
    async with loaded(backend) as model:
        await model.chat([USER])
        await model.chat([USER], reasoning="off")
        await model.chat([USER], template_kwargs={"enable_thinking": False})
    thinks, silent, by_variable = backend.prompts
    assert silent == by_variable != thinks
    assert "</think>" in silent


async def test_an_answer_cut_short_makes_up_no_call():
    """A call that was cut off is not in the message, and nothing of it is content."""
    async with loaded(ScriptedChat(says=f"{CALL}\n{SECOND}")) as model:
        answer = await model.chat([USER], tools=TOOLS, max_tokens=len(CALL) + 60)
    assert answer.finish_reason == "length"
    assert [made.name for made in answer.message.tool_calls] == ["get_weather"]
    assert "get_time" not in answer.reply


FACES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "🙂👩‍👧"}}\n</tool_call>'


async def test_characters_in_arguments_stay_whole():
    """FAULTS: a byte at a time, cut behind any of them: no half character but the last, no half call."""
    backend = ScriptedChat(says=FACES)
    n_cut = 0
    async with loaded(backend) as model:
        for n in range(FACES.index("🙂") - 2, len(FACES.encode()) + 2):
            events = await chat_events(model, tools=TOOLS, max_tokens=n)
            sent = "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
            completion = events[-1].completion
            assert "�" not in sent[:-1]
            n_cut += "�" in sent
            assert '{"city": "🙂👩‍👧"}'.startswith(sent.removesuffix("�"))
            if completion.message.tool_calls:
                assert completion.message.tool_calls[0].arguments == {"city": "🙂👩‍👧"}
            assert completion.message.content == ""
    assert n_cut == 3 * 3 + 2  # behind each byte but the last, of three characters of 4 and one of 3
    assert completion.message.tool_calls


async def test_two_chats_in_one_session():
    """The second is refused while the first is answered, and the session goes on."""
    backend = ScriptedChat(says="word " * 20)
    async with loaded(backend, stream_buffer_events=8) as model:  # who reads no further is not done
        async with model.chat_stream([USER], session_id="s") as events:
            await events.__anext__()
            with pytest.raises(erllama.StickyBusy):
                await model.chat([USER], session_id="s")
            answer = await erllama.collect(events)
        messages = [USER, answer.message, {"role": "user", "content": "And now?"}]
        again = await model.chat(messages, session_id="s")
    assert again.reply == answer.reply


async def test_what_cannot_be_read_is_content():
    """A malformed call is plain text; the model, the process and the next request live."""
    says = '<tool_call>\n{"name": get_weather, "arguments": {"city": }\n</tool_call>'
    async with loaded(ScriptedChat(says=says)) as model:
        answer = await model.chat([USER], tools=TOOLS)
        assert answer.message.tool_calls == ()
        assert "get_weather" in answer.reply
        await wait_idle(model)


async def test_a_prefilled_answer_goes_on():
    """The last message is the beginning of the answer; the reply holds only what was generated."""
    backend = ScriptedChat(template="Qwen-Qwen2.5-7B-Instruct", says="ly, rain.")
    async with loaded(backend) as model:
        answer = await model.chat([USER, {"role": "assistant", "content": "Sure"}])
        events = await chat_events(model, [USER, {"role": "assistant", "content": "Sure"}])
    assert backend.prompts[0].endswith("<|im_start|>assistant\nSure")
    assert answer.message.content == answer.reply == "ly, rain."
    assert "".join(event.text for event in events if isinstance(event, Token)) == "ly, rain."


@pytest.mark.parametrize(
    "choice", ["auto", "required", "none", {"type": "function", "function": {"name": "get_time"}}]
)
async def test_tool_choice_reaches_grammar_and_parser(choice):
    """C7: each choice gives parameters of its own, and nothing is kept from one request to the next."""
    async with loaded(ScriptedChat()) as model:
        made = {
            str(c): await model.chat_apply([USER], tools=TOOLS, tool_choice=c)
            for c in ("auto", "none", choice)
        }
    params = made[str(choice)]
    grammar = params.grammar or ""
    assert ("get_time" in grammar) == (choice != "none")
    assert ("get_weather" in grammar) == (choice in ("auto", "required"))
    assert params.applied.grammar_lazy == (choice == "auto")
    assert params.prompt == made["auto"].prompt  # so that the cache stays warm


@pytest.mark.parametrize(("strict", "lazily"), [(False, True), (False, False), (True, False)])
async def test_the_grammar_of_calls_that_may_be_made_can_be_left_out(strict, lazily):
    """H10: then no grammar reaches the sampler, and calls are read all the same; strict tools keep it."""
    tools = [{**tool, "function": {**tool["function"], "strict": strict}} for tool in TOOLS]
    said = '<tool_call>\n{"name": "get_weather", "arguments": {"town": 1}}\n</tool_call>'
    backend = ScriptedChat(says=said)
    async with loaded(backend) as model:
        options = {"tools": tools, "lazy_tool_grammar": lazily}
        made = await model.chat_apply([USER], **options)
        must = await model.chat_apply([USER], tool_choice="required", **options)
        plain = await model.chat_apply([USER], tools=tools)
        answer = await model.chat([USER], **options)
    assert (made.grammar is not None) == made.applied.grammar_lazy == (strict or lazily)
    assert (backend.params[-1].grammar is not None) == backend.params[-1].guide.lazy == (strict or lazily)
    assert must.grammar
    assert made.prompt_ids == plain.prompt_ids
    assert [call.arguments for call in answer.message.tool_calls] == [{"town": 1}]


async def test_a_schema_holds_the_content_and_spares_the_thinking():
    """X14: the grammar lets the model think first."""
    backend = ScriptedChat(says='<think>\nFree text.\n</think>\n\n{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with loaded(backend) as model:
        answer = await model.chat([USER], json_schema=schema)
        wrapped = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        await model.chat([USER], response_format=wrapped)
        await model.chat([USER], response_format={"type": "json_object"})
    assert json.loads(answer.reply) == {"a": 1}
    assert answer.message.reasoning_content.strip() == "Free text."
    first, second, any_object = [params.grammar for params in backend.params]
    assert first == second != any_object
    assert "think" in first
    assert not backend.params[0].guide.lazy
    assert backend.params[0].guide.covers_prefill


async def test_a_grammar_of_ones_own():
    """G26: the caller's grammar is the only one, from the first token on."""
    backend = ScriptedChat(says="12")
    async with loaded(backend) as model:
        await model.chat([USER], grammar="root ::= digits")
        with pytest.raises(InvalidOption, match="both"):
            await model.chat([USER], grammar="root ::= digits", json_schema={"type": "null"})
        with pytest.raises(InvalidOption, match="both"):
            await model.chat([USER], grammar="root ::= digits", tools=TOOLS)
        with pytest.raises(InvalidOption, match="both"):
            await model.chat([USER], json_schema={"type": "null"}, tools=TOOLS)
    [params] = backend.params
    assert params.grammar == "root ::= digits"
    assert not params.guide.covers_prefill


async def test_the_thinking_budget_reaches_the_sampler():
    """The block is ended by the sampler; without a budget it is left alone. 0 is none."""
    backend = ScriptedChat()
    async with loaded(backend) as model:
        await model.chat([USER], thinking_budget_tokens=7)
        await model.chat([USER], thinking_budget_tokens=0)
    limited, free = [params.guide.thinking for params in backend.params]
    assert limited.budget == 7
    assert bytes(limited.forced) == b"</think>"
    assert free is None


async def test_stop_strings_of_the_caller_are_reported():
    """`stop` works on chat too."""
    async with loaded(ScriptedChat(says="one two three")) as model:
        answer = await model.chat([USER], stop=" two")
    assert (answer.reply, answer.stop_sequence) == ("one", " two")


# --- what callers get wrong ---

SURROGATE = "\ud800"
BAD_MESSAGES = [
    ("not a list", 0),
    ({"role": "user", "content": "x"}, 0),
    ([], 0),
    ([3], 0),
    ([{"content": "x"}], 0),
    ([{"role": "narrator", "content": "x"}], 0),
    ([USER, {"role": "user"}], 1),
    ([USER, {"role": "user", "content": None}], 1),
    ([USER, {"role": "user", "content": 3}], 1),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], 0),
    ([{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}], 0),
    ([{"role": "user", "content": ["x"]}], 0),
    ([{"role": "user", "content": [{"type": "text", "text": 3}]}], 0),
    ([{"role": "user", "content": "x", "colour": "red"}], 0),
    ([{"role": "user", "content": SURROGATE}], 0),
    ([USER, {"role": "tool", "content": "x", "tool_call_id": "1"}], 1),
    ([USER, {"role": "tool", "content": "x"}], 1),
    ([{"role": "user", "content": "x", "tool_calls": [call("1", "f")]}], 0),
    ([USER, {"role": "assistant", "tool_calls": [call("1", "f"), call("1", "g")]}], 1),
    ([USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], 1),
    ([USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}], 1),
    ([USER, {"role": "assistant", "tool_calls": [{"id": "1", "function": {}}]}], 1),
    ([USER, {"role": "assistant", "tool_calls": "f"}], 1),
    ([USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}], 2),
    ([*dialogue()[:4], {"role": "tool", "tool_call_id": "call1aaaa", "content": "again"}], 4),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "index"), BAD_MESSAGES, ids=range(len(BAD_MESSAGES)))
async def test_bad_messages_are_typed_errors(messages, index):
    """C3: each names the message at fault, and nothing was computed."""
    backend = ScriptedChat()
    async with loaded(backend) as model:
        with pytest.raises(InvalidContent) as caught:
            await model.chat(messages)
        assert backend.steps == []
    if caught.value.detail is not None:
        assert caught.value.detail["index"] == index


BAD_TOOLS = [
    "get_weather",
    [3],
    [{"type": "retrieval"}],
    [{"type": "function"}],
    [{"type": "function", "function": {"description": "x"}}],
    [{"type": "function", "function": {"name": "a b"}}],
    [{"type": "function", "function": {"name": "x" * 129}}],
    [{"type": "function", "function": {"name": "f", "parameters": []}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
    [{"type": "function", "function": {"name": "f", "colour": "red"}}],
    [{"type": "function", "function": {"name": "f"}, "strict": True}],
    [{"type": "function", "function": {"name": "f", "strict": "yes"}}],
    [TOOLS[0], TOOLS[0]],
    [tool("get_time"), tool("get-time")],
    [tool("get_time"), tool("a"), tool("get.time")],
]


@pytest.mark.parametrize("tools", BAD_TOOLS, ids=range(len(BAD_TOOLS)))
async def test_bad_tools_are_typed_errors(tools):
    """Unknown kinds, missing and doubled names, schemas that are none."""
    async with loaded(ScriptedChat()) as model:
        with pytest.raises(InvalidContent, match="tools"):
            await model.chat([USER], tools=tools)


@pytest.mark.parametrize(
    "options",
    [
        {"tool_choice": "sometimes"},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"response_format": "json"},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        {"response_format": {"type": "json_object"}, "json_schema": {}},
        {"reasoning": "deep"},
        {"parallel_tool_calls": 1},
        {"template_kwargs": {"enable_thinking": "yes"}},
        {"template_kwargs": {"enable_thinking": True}, "reasoning": "off"},
        {"template_kwargs": {"messages": []}},
        {"template_kwargs": {"tools": 1}},
        {"temperature": -1},
        {"thinking": True, "reasoning": "off"},
        {"thinking": False, "reasoning": "inline"},
        {"thinking": "yes"},
        {"middleware": [3]},
    ],
    ids=str,
)
async def test_bad_options_are_typed_errors(options):
    """Nothing is accepted and ignored."""
    async with loaded(ScriptedChat()) as model:
        with pytest.raises(InvalidOption):
            await model.chat([USER], **options)


def nested(depth):
    """Objects within one another."""
    value = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("depth", [240, 450, 800, 5000])
async def test_what_is_nested_too_deep_is_a_typed_error(depth):
    """Wherever callers put JSON; what llama-common takes, Python's stack holds as well."""
    odd = tool("odd")
    odd["function"]["parameters"]["properties"]["n"] = {"enum": [nested(depth)]}
    called = {"role": "assistant", "content": "", "tool_calls": [call("1", "get_time")]}
    called["tool_calls"][0]["function"]["arguments"] = nested(depth)
    asked = [
        {"messages": [USER, called, result("1", "get_time", "x")], "tools": TOOLS},
        {"tools": [odd]},
        {"json_schema": {"const": nested(depth)}},
        {"template_kwargs": {"x": nested(depth)}},
    ]
    async with loaded(ScriptedChat()) as model:
        for options in asked:
            with pytest.raises((InvalidContent, InvalidGrammar)) if depth > 256 else contextlib.nullcontext():
                await model.chat(options.pop("messages", [USER]), **options)


async def test_unknown_options_name_the_nearest():
    """Of chat's own and of generation's."""
    async with loaded(ScriptedChat()) as model:
        with pytest.raises(erllama.UnknownOption, match="temperature"):
            await model.chat([USER], temprature=1)
        with pytest.raises(erllama.UnknownOption, match="tool_choice"):
            await model.chat_apply([USER], tool_choise="auto")


async def test_a_tool_that_cannot_be_enforced_spares_the_others(caplog):
    """The loose property is named in the log; all thirty tools work. A strict tool is refused instead."""
    odd = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "pattern": r"^(?=x)\d+$"},
            "b": {"type": "number", "minimum": 1},
        },
    }
    tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "parameters": odd}}]
    strict = [{"type": "function", "function": {"name": "odd", "parameters": odd, "strict": True}}]
    async with loaded(ScriptedChat()) as model:
        params = await model.chat_apply([USER], tools=tools)
        with pytest.raises(InvalidGrammar, match=r"tools\[0\] \(odd\).*pattern"):
            await model.chat_apply([USER], tools=strict)
    assert "(?=x)" in params.prompt  # the model reads what the author wrote
    assert "get_weather" in params.grammar
    assert {("pattern" in m, "minimum" in m) for m in caplog.messages if "odd" in m} == {
        (True, False),
        (False, True),
    }


async def test_two_hundred_tools():
    """A huge set compiles, and each of them may be called."""
    tools = [
        {"type": "function", "function": {**TOOLS[0]["function"], "name": f"tool_{i}"}} for i in range(200)
    ]
    says = '<tool_call>\n{"name": "tool_199", "arguments": {"city": "x"}}\n</tool_call>'
    async with loaded(ScriptedChat(says=says, n_ctx=1 << 17, n_batch=1 << 17)) as model:
        answer = await model.chat([USER], tools=tools)
    assert answer.message.tool_calls[0].name == "tool_199"


async def test_templates_that_raise_say_why():
    """A template's own words arrive; the next request is served."""
    async with erllama.open_engine() as engine:
        raises = "{{ raise_exception('no weather today') if messages|length > 2 else messages[0].content }}"
        model = await engine.load_model(backend=ScriptedChat(), chat_template=raises)
        with pytest.raises(InvalidContent, match="no weather today"):
            await model.chat(dialogue())
        assert (await model.chat([USER])).reply == "Hello."


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages[", "{% if x %}", "(" * 5000], ids=range(4))
async def test_templates_that_do_not_parse(template):
    """A typed error with the parser's words, when the first message is rendered."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(backend=ScriptedChat(), chat_template=template)
        with pytest.raises(InvalidContent, match="template"):
            await model.chat([USER])


async def test_a_template_without_generation_prompt():
    """It works: the answer begins where the prompt ends."""
    async with erllama.open_engine() as engine:
        plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        model = await engine.load_model(backend=ScriptedChat(), chat_template=plain)
        answer = await model.chat([USER])
    assert answer.reply == "Hello."


async def test_messages_that_cannot_fit_are_refused_at_once():
    """10 MiB against a context of 16k tokens: no template sees them, and no tokenizer what it makes long."""

    class Backend(ScriptedChat):
        def longest_piece(self) -> int:
            return 8

    backend = Backend()
    async with loaded(backend) as model:
        with pytest.raises(ContextOverflow):
            await model.chat([{"role": "user", "content": "x" * (10 << 20)}])
        assert backend.n_templates == 0
        backend.tokenize = None  # type: ignore[assignment]  # what only the template makes long
        many = [USER, {"role": "assistant", "content": "x"}] * 2_000
        called = {"role": "assistant", "content": "", "tool_calls": [call("1", "f", city="x" * (1 << 20))]}
        for messages in ([*many, USER], [USER, called, result("1", "f", "x")]):
            with pytest.raises(ContextOverflow):
                await model.chat(messages)


async def test_a_backend_without_templates_cannot_chat():
    """C10: every chat call says so by reason."""
    async with loaded(FakeBackend()) as model:
        for attempt in (model.chat, model.chat_apply, model.render_chat_template, model.warm):
            with pytest.raises(NotSupported) as caught:
                await attempt([USER])
            assert caught.value.reason == "chat_not_supported"


# --- templates, warmth, reading ---


async def test_templates_are_parsed_once_per_model():
    """C8: two requests, one template; purged, it is parsed again; a cache of one alternates."""
    async with erllama.open_engine(chat_cache_size=1) as engine:
        one, two = ScriptedChat(), ScriptedChat()
        first, second = await load(engine, one, "one"), await load(engine, two, "two")
        for _ in range(2):
            await first.chat([USER])
        assert one.n_templates == 1
        assert first.chat_purge()
        assert not first.chat_purge()
        await first.chat([USER])
        assert one.n_templates == 2
        await second.chat([USER])
        await first.chat([USER])
        assert (one.n_templates, two.n_templates) == (3, 1)


async def test_statistics_of_chats():
    """C15: rendering and reading are counted and timed."""
    async with loaded(ScriptedChat()) as model:
        await model.chat([USER], json_schema={"type": "null"})
        await model.chat([USER], json_schema={"type": "null"})
        counts = model.chat_statistics()
    assert (counts.n_applied, counts.n_parsed) == (2, 2)
    assert (counts.n_schema_hits, counts.n_schema_misses) == (1, 1)
    assert counts.apply_s > 0
    assert counts.parse_s > 0


async def test_warm_is_what_chat_computes():
    """The same path: after `warm`, `chat` computes one token of the prompt."""
    async with loaded(ScriptedChat()) as model:
        warmed = await model.warm(dialogue(), tools=TOOLS)
        answer = await model.chat(dialogue(), tools=TOOLS)
        ids = await model.render_chat_template(dialogue(), tools=TOOLS)
    assert warmed.context_tokens == ids == answer.context_tokens[: len(ids)]
    assert answer.stats.n_computed == 1


async def test_apply_then_parse():
    """C4, C5: the two halves of `chat`, for those who generate elsewhere."""
    async with loaded(ScriptedChat()) as model:
        params = await model.chat_apply([USER], tools=TOOLS)
        message = await model.chat_parse(params, f"Well.\n{CALL}")
        partial = await model.chat_parse(params, CALL[:50], partial=True)
        with pytest.raises(InvalidContent):
            await model.chat_parse("params", CALL)
    assert message.tool_calls[0].arguments == {"city": "Oslo"}
    assert message.content.strip() == "Well."
    assert partial.content == ""


async def test_cancelled_chats_end_with_what_there_was():
    """`cancel` ends the answer with a message; leaving the block frees everything."""
    async with loaded(ScriptedChat(says="word " * 200)) as model:
        async with model.chat_stream([USER]) as events:
            n = 0
            async for event in events:
                n += isinstance(event, Token)
                if n == 5:
                    events.cancel()
        assert event.completion.finish_reason == "cancelled"
        assert event.completion.message.content.startswith("word")
        async with model.chat_stream([USER]) as events:
            await events.__anext__()
        with trio.move_on_after(0):
            await model.chat([USER])
        await wait_idle(model)


# --- thinking in raw streams ---


@pytest.mark.parametrize("budget", [None, 0, -3, 3])
async def test_markers_tell_thinking_apart(budget):
    """C11, C12, C14: thinking events, one end, then text; a budget leaves the rest as text."""
    says = "<think>0123456789</think>answer"
    async with erllama.open_engine() as engine:
        model = await engine.load_model(
            backend=ScriptedChat(says=says), thinking_markers=("<think>", "</think>")
        )
        events = [
            e
            for e in await events_of(model, "p", thinking=True, thinking_budget_tokens=budget)
            if not isinstance(e, TokenId)
        ]
    kinds = [type(event) for event in events]
    n = 3 if budget == 3 else 10
    assert kinds[: n + 1] == [Thinking] * n + [ThinkingEnd]
    assert kinds[n + 1 :] == [Token] * (10 - n + len("answer")) + [Done]
    assert events[-1].completion.reply == "0123456789"[n:] + "answer"


async def test_without_markers_thinking_is_plain_text():
    """C11: the same events as a run that did not ask."""
    async with loaded(ScriptedChat(says="<think>0</think>1")) as model:
        asked = await events_of(model, "p", thinking=True)
        plain = await events_of(model, "p")
    assert [type(e) for e in asked] == [type(e) for e in plain]
    assert asked[-1].completion.reply == plain[-1].completion.reply == "<think>0</think>1"


async def test_control_tokens_as_markers_are_seen():
    """A marker that shows no text otherwise."""
    backend = ScriptedChat()
    backend.script = lambda _: [257, *b"hm", 257, *b"yes"]
    async with erllama.open_engine() as engine:
        model = await engine.load_model(backend=backend, thinking_markers=("<control>h", "<control>"))
        answer = await model.complete("p", thinking=True)
    assert answer.reply == "yes"


@pytest.mark.parametrize("markers", ["<think>", ("a",), ("a", ""), ("a", "a"), (1, 2)], ids=str)
async def test_bad_markers(markers):
    """Two different texts."""
    async with erllama.open_engine() as engine:
        with pytest.raises(InvalidOption, match="thinking_markers"):
            await engine.load_model(backend=FakeBackend(), thinking_markers=markers)


async def test_a_schema_for_raw_prompts():
    """`json_schema` is a grammar for `complete` as well; both at once are refused."""
    backend = ScriptedChat(says='"x"')
    async with loaded(backend) as model:
        await model.complete("p", json_schema={"type": "string"})
        with pytest.raises(InvalidOption, match="not both"):
            await model.complete("p", json_schema={}, grammar="root ::= digits")
        with pytest.raises(InvalidGrammar, match="uniqueItems"):
            await model.complete("p", json_schema={"type": "array", "uniqueItems": True})
    assert "char*" in backend.params[0].grammar


@pytest.mark.parametrize("stop", ["}", "Oslo", '"arguments"'])
async def test_a_stop_string_within_a_call_cuts_the_answer(stop):
    """What came before it is the answer; the call's text is no content, and half a call is none."""
    async with loaded(ScriptedChat(says=f"Let me see.\n{CALL}")) as model:
        events = await chat_events(model, tools=TOOLS, stop=[stop])
    done = events[-1].completion
    assert done.stop_sequence == stop
    assert done.message.content.strip() == "Let me see."
    assert done.message.tool_calls == ()
    assert "".join(event.text for event in events if isinstance(event, Token)) == done.message.content


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": "user", "content": [{"type": "text", "text": "a", 1: 2, "b": 3}]},
        {"role": "user", "content": [5]},
        5,
    ],
)
async def test_messages_of_odd_shapes_are_refused(message):
    """C3: `InvalidContent` before anything is looked at more closely."""
    async with loaded(ScriptedChat()) as model:
        with pytest.raises(InvalidContent, match=r"messages\[0\]"):
            await model.chat([message])


async def test_a_grammar_does_not_hold_within_thinking():
    """It would from the first token, so nothing is thought; a template that always begins so is refused."""
    backend = ScriptedChat(says="12")
    async with loaded(backend) as model:
        answer = await model.chat([USER], grammar="root ::= digits", thinking_budget_tokens=5)
    assert answer.reply == "12"
    assert answer.message.reasoning_content is None
    assert backend.params[0].guide.thinking is None
    async with loaded(ScriptedChat(template="Apriel-1.6-15b-Thinker-fixed")) as model:
        with pytest.raises(InvalidOption, match="thinking"):
            await model.chat([USER], grammar="root ::= digits")


async def test_an_empty_grammar_is_not_passed_over():
    """It is refused, as it is by `complete`, or reaches the sampler; the answer is not free."""
    backend = ScriptedChat(says="12")
    async with loaded(backend) as model:
        try:
            await model.chat([USER], grammar="")
        except (InvalidOption, InvalidGrammar):
            return
    assert backend.params[0].grammar == ""


async def test_thinking_says_what_reasoning_says():
    """`thinking=False` is `reasoning="off"`; True leaves it to the template."""
    backend = ScriptedChat()
    async with loaded(backend) as model:
        for given in ({"thinking": False}, {"reasoning": "off"}, {"thinking": True}, {}):
            await model.chat([USER], **given)
    off, said, on, default = backend.prompts
    assert off == said
    assert on == default
    assert off != on


async def test_a_model_that_is_unloaded_keeps_no_template():
    """Also where a rendering that nobody waits for is still going on."""
    async with erllama.open_engine() as engine:
        model = await load(engine, ScriptedChat(), "one")
        await model.chat([USER])
        await model.unload()
        assert not engine._templates.purge(model.handle)


BROKEN = {
    "does not parse": "{% for m in messages %}{{ m.content }",
    "calls itself": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "calls itself when it runs": "{% macro f(x) %}{% if x %}{{ f(x) }}{% endif %}{% endmacro %}{{ f(1) }}",
}


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("how", BROKEN)
async def test_a_file_whose_template_is_broken(how, tmp_path):
    """The model loads and answers prompts; chat is a typed error, and so is the next; the process lives."""
    tiny = make_tiny_gguf.dense()
    tiny.meta[".tokenizer.chat_template"] = BROKEN[how]
    tiny.save(tmp_path / "broken.gguf")
    async with erllama.open_engine() as engine:
        model = await engine.load_model(tmp_path / "broken.gguf", context=erllama.ContextOptions(n_threads=1))
        for _ in range(2):
            with pytest.raises(InvalidContent, match="template"):
                await model.chat([USER])
        answer = await model.complete("Hi", max_tokens=3)
    assert len(answer.generated) == 3


TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("writes", ["", "{{ bos_token }}"])
async def test_a_prompt_begins_once(adds, writes, tmp_path):
    """FAULTS: a BOS of the template, one of the tokenizer, or of both, is one; and the same as raw text."""
    tiny = make_tiny_gguf.dense()
    tiny.meta[".tokenizer.ggml.add_bos_token"] = adds
    tiny.meta[".tokenizer.chat_template"] = writes + TURNS
    tiny.save(tmp_path / "tiny.gguf")
    async with erllama.open_engine() as engine:
        model = await engine.load_model(tmp_path / "tiny.gguf", context=erllama.ContextOptions(n_threads=1))
        params = await model.chat_apply([USER])
        raw = model.tokenize(params.prompt)
    assert params.prompt_ids == raw
    bos = 0
    assert [at for at, token in enumerate(raw) if token == bos] == ([0] if adds or writes else [])


@pytest.mark.parametrize("leave", [False, True])
async def test_long_parses_leave_the_event_loop_alone(monkeypatch, leave):
    """What takes milliseconds is read in a thread; nothing is lost, also where the reader is cancelled."""
    threads = set()
    parse = llama.ChatParser.parse

    def watched(self, text, **options):
        threads.add(threading.get_ident())
        return parse(self, text, **options)

    monkeypatch.setattr(llama.ChatParser, "parse", watched)
    monkeypatch.setattr("erllama.chat.answer.SLOW_S", 0.0)
    says = "word " * 40 + CALL
    async with loaded(ScriptedChat(says=says)) as model, model.chat_stream([USER], tools=TOOLS) as events:
        seen = []
        while not seen or not isinstance(seen[-1], Done):
            with trio.CancelScope() as scope:
                if leave:
                    scope.deadline = trio.current_time() + 0.0005
                seen.append(await events.__anext__())
    message = seen[-1].completion.message
    assert message.tool_calls[0].arguments == {"city": "Oslo"}
    assert "".join(e.text for e in seen if isinstance(e, Token)) == message.content
    assert len(threads - {threading.get_ident()}) >= 1


async def test_many_tools_are_loaded_in_a_thread(monkeypatch):
    """The parser of two hundred tools is some 100 KB of text to take apart."""
    threads = []
    made = llama.ChatParser.__init__

    def watched(self, text):
        threads.append(threading.get_ident())
        made(self, text)

    monkeypatch.setattr(llama.ChatParser, "__init__", watched)
    function = TOOLS[0]["function"]
    tools = [{"type": "function", "function": {**function, "name": f"tool_{i}"}} for i in range(200)]
    async with loaded(ScriptedChat(n_ctx=1 << 17, n_batch=1 << 17)) as model:
        await model.chat([USER], tools=tools)
        await model.chat([USER])
    assert [each == threading.get_ident() for each in threads] == [False, True]
