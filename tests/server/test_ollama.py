"""The official ollama package against a real server, and what it does to loaded models."""

from __future__ import annotations

import json
from functools import partial

import ollama
import pytest
import trio
from runtime.chat_scenes import ScriptedChat

from erllama.errors import InvalidOption
from erllama.server.duration import seconds_of
from erllama.testing import FakeBackend
from server.scenes import serving, until

HELLO = [{"role": "user", "content": "Say hello in one short sentence."}]
GREEDY = {"temperature": 0, "num_predict": 12}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}},
    "required": ["name"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def client(real_server):
    """A client of the server."""
    made = ollama.Client(host=real_server)
    yield made
    made._client.close()


@pytest.mark.model
@pytest.mark.slow
def test_a_chat_is_answered_whole_and_streamed(client):
    """With text, and the same counts of what was asked."""
    options = {"temperature": 0, "num_predict": 3}
    whole = client.chat(model="smol", messages=HELLO, options=options)
    parts = list(client.chat(model="smol", messages=HELLO, options=options, stream=True))
    assert whole.message.content
    assert "".join(p.message.content for p in parts)
    last = parts[-1]
    assert (last.done, last.done_reason, last.eval_count) == (True, "length", 3)
    assert (last.prompt_eval_count, last.eval_count) == (whole.prompt_eval_count, whole.eval_count)
    assert last.total_duration > last.eval_duration > 0


@pytest.mark.model
@pytest.mark.slow
def test_prompts_are_questions_unless_they_are_raw(client):
    """A prompt is put into the model's template; a raw one is continued as it is."""
    asked = client.generate(model="smol", prompt="The capital of France is", options=GREEDY)
    raw = client.generate(model="smol", prompt="The capital of France is", options=GREEDY, raw=True)
    assert asked.prompt_eval_count > raw.prompt_eval_count
    assert "Paris" in raw.response
    parts = client.generate(model="smol", prompt="The capital of France is", options=GREEDY, stream=True)
    assert "".join(p.response for p in parts)


@pytest.mark.model
@pytest.mark.slow
def test_a_format_holds_the_answer(client):
    """A schema, or any JSON."""
    held = client.chat(model="smol", messages=HELLO, format=PERSON, options={"num_predict": 60})
    assert json.loads(held.message.content).keys() == {"name"}


@pytest.mark.model
@pytest.mark.slow
def test_models_are_told(client):
    """Tags, show, ps; embeddings are refused as not supported."""
    client.generate(model="smol", prompt="")
    assert [m.model for m in client.list().models] == ["smol"]
    assert [m.model for m in client.ps().models] == ["smol"]
    assert client.show("smol").details.format == "gguf"
    for ask in (partial(client.embed, input="x"), partial(client.embeddings, prompt="x")):
        with pytest.raises(ollama.ResponseError) as refused:
            ask(model="smol")
        assert refused.value.status_code == 501
    with pytest.raises(ollama.ResponseError) as missing:
        client.chat(model="nobody", messages=HELLO)
    assert missing.value.status_code == 404


@pytest.mark.model
def test_the_ollama_program_finds_what_it_reads(client):
    """It asks HEAD / first, cuts digests to twelve digits, and takes these facts of a model for granted."""
    http = client._client
    assert http.head("/").status_code == 200
    assert http.head("/api/version").status_code == 200
    http.post("/api/generate", json={"model": "smol"})
    (listed,), (loaded,) = (http.get(path).json()["models"] for path in ("/api/tags", "/api/ps"))
    assert listed["digest"] == loaded["digest"]
    assert len(bytes.fromhex(listed["digest"])) == 32
    assert listed["size"] > 0
    for name in ("model", "name"):  # what newer and older ones say
        shown = http.post("/api/show", json={name: "smol", "verbose": False}).json()
        facts = shown["model_info"]
        architecture = facts["general.architecture"]
        assert facts[f"{architecture}.context_length"] > 0
        assert facts[f"{architecture}.embedding_length"] > 0
        assert {"parameter_size", "quantization_level", "parent_model"} <= shown["details"].keys()
    # `ollama run smol "Hello"`, as it writes the body.
    asked = {"model": "smol", "prompt": "Hello", "suffix": "", "system": "", "template": "", "format": ""}
    asked |= {"context": None, "options": {"num_predict": 2}, "keep_alive": "5m0s", "images": None}
    lines = http.post("/api/generate", json=asked).text.splitlines()
    assert json.loads(lines[-1])["done_reason"] in ("length", "stop")
    assert all(json.loads(line)["model"] == "smol" for line in lines)


async def test_digests_differ_where_models_do(tmp_path):
    """By name and by file; the same as long as the file is; there is one also before the file is."""
    paths = {name: {"path": str(tmp_path / f"{name}.gguf")} for name in ("a", "b", "later")}
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_text("x")

    async def digests(scene):
        return {m["name"]: m["digest"] for m in (await scene.client.get("/api/tags")).json()["models"]}

    async with serving(names=tuple(paths), models=paths) as scene:
        first = await digests(scene)
        assert len(set(first.values())) == 3
        assert await digests(scene) == first
        (tmp_path / "a.gguf").write_text("longer")
        second = await digests(scene)
        assert [name for name in paths if first[name] != second[name]] == ["a"]


async def test_calls_arrive_decoded():
    """Whole and streamed, with thinking told apart."""
    says = f"<think>\nhm\n</think>\n\n{CALL}"
    async with serving(partial(ScriptedChat, says=says)) as scene:
        body = {"model": "fake", "messages": HELLO, "tools": TOOLS}
        whole = (await scene.client.post("/api/chat", json={**body, "stream": False})).json()
        assert whole["message"]["tool_calls"][0]["function"] == {
            "name": "get_weather",
            "arguments": {"city": "Paris"},
        }
        assert whole["message"]["thinking"].strip() == "hm"
        reply = await scene.client.post("/api/chat", json=body)
        assert reply.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in reply.text.splitlines()]
        assert lines[-2]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
        assert lines[-1]["done"]
        assert "".join(line["message"].get("thinking", "") for line in lines).strip() == "hm"


async def test_an_empty_prompt_loads_and_keep_alive_0_unloads():
    """When the reply is there, so is the model, or it is gone."""
    async with serving() as scene:
        for path in ("/api/generate", "/api/chat"):
            loaded = (await scene.client.post(path, json={"model": "fake"})).json()
            assert (loaded["done"], loaded["done_reason"]) == (True, "load")
            assert len((await scene.client.get("/api/ps")).json()["models"]) == 1
            gone = (await scene.client.post(path, json={"model": "fake", "keep_alive": 0})).json()
            assert gone["done_reason"] == "unload"
            assert (await scene.client.get("/api/ps")).json()["models"] == []
        for stream in (False, True):
            body = {"model": "fake", "messages": HELLO, "keep_alive": "0s", "stream": stream}
            assert (await scene.client.post("/api/chat", json=body)).status_code == 200
            assert (await scene.client.get("/api/ps")).json()["models"] == []


@pytest.mark.parametrize("asked_again", [False, True])
async def test_a_busy_model_is_unloaded_when_its_last_answer_is_over(asked_again):
    """H7: the reply comes after that; a request that comes meanwhile and says how long it stays undoes it."""
    slow = partial(ScriptedChat, says="word " * 400, threaded=True, step_delay_s=0.02, n_slots=3)
    async with serving(slow) as scene:
        await scene.client.post("/api/generate", json={"model": "fake"})
        replies = []

        async def ask(name, **body):
            reply = await scene.client.post("/api/chat", json={"model": "fake", "stream": False, **body})
            replies.append((name, reply.json()["done_reason"]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(ask, "answer", messages=HELLO, options={"num_predict": 20}))
            await until(lambda: scene.entry().n_running)
            nursery.start_soon(partial(ask, "unload", keep_alive=0))
            await until(lambda: scene.entry().is_let_go)
            if asked_again:
                nursery.start_soon(partial(ask, "stays", keep_alive="5m"))
        left = (await scene.client.get("/api/ps")).json()["models"]
        if asked_again:
            assert sorted(replies) == [("answer", "length"), ("stays", "load"), ("unload", "load")]
            assert len(left) == 1
        else:
            assert replies == [("answer", "length"), ("unload", "unload")]
            assert left == []
            await scene.client.post("/api/generate", json={"model": "fake"})
            assert scene.entry().is_loaded, "the next load is not let go"


async def test_the_last_one_decides_how_long_a_model_stays():
    """A short time to live ends; a negative one does not."""
    async with serving() as scene:
        await scene.client.post("/api/generate", json={"model": "fake", "keep_alive": "50ms"})
        await until(lambda: not scene.entry().is_loaded)
        await scene.client.post("/api/generate", json={"model": "fake", "keep_alive": -1})
        shown = (await scene.client.get("/api/ps")).json()["models"][0]
        assert shown["expires_at"] > "2100"


@pytest.mark.parametrize(
    "wrong",
    [
        {"options": {"num_predict": 0}},
        {"images": ["a"]},
        {"keep_alive": "soon"},
        {"format": {"type": "bogus"}},
    ],
)
async def test_a_prompt_is_looked_at_before_a_load(wrong):
    """400, and nothing is loaded."""
    async with serving() as scene:
        for stream in (False, True):
            body = {"model": "fake", "prompt": "x", "stream": stream, **wrong}
            assert (await scene.client.post("/api/generate", json=body)).status_code == 400
        assert scene.loads == []


class WithoutTemplate(ScriptedChat):
    """Its file has none."""

    chat_templates = None


@pytest.mark.parametrize("make", [ScriptedChat, WithoutTemplate])
async def test_a_prompt_needs_one_load(make):
    """Templated or not is decided with the model at hand; the reply tells how long the load took."""
    backends = []

    def made():
        backends.append(make())
        return backends[-1]

    async with serving(made, keep_alive_s=0) as scene:
        body = {"model": "fake", "prompt": "2+2?", "system": "Count.", "stream": False}
        reply = await scene.client.post("/api/generate", json=body)
        assert reply.json()["response"] == "Hello."
        assert reply.json()["load_duration"] > 0
        assert scene.loads == ["fake"]
    (prompt,) = backends[0].prompts
    assert (prompt == "Count.\n\n2+2?") == (make is WithoutTemplate)
    assert ("<|im_start|>user\n2+2?" in prompt) == (make is ScriptedChat)


async def test_a_long_raw_prompt_is_cut_and_told():
    """With truncate the end of the prompt is kept; without it is refused with both lengths."""

    def make():
        return FakeBackend(n_ctx=100)

    async with serving(make) as scene:
        body = {"model": "fake", "prompt": "x" * 500, "raw": True, "stream": False}
        options = {"num_predict": 5, "temperature": 0}
        cut = await scene.client.post("/api/generate", json={**body, "options": options})
        assert cut.status_code == 200
        assert cut.json()["prompt_eval_count"] == 94
        assert cut.headers["x-erllama-cut-tokens"] == "406"
        refused = await scene.client.post("/api/generate", json={**body, "truncate": False})
        assert refused.status_code == 400
        assert "500" in refused.json()["error"]
        assert "100" in refused.json()["error"]


async def test_what_has_no_effect_is_told():
    """Unknown fields and options are named in a header; those that would change the answer are refused."""
    async with serving() as scene:
        body = {"model": "fake", "messages": HELLO, "stream": False, "colour": 1}
        reply = await scene.client.post("/api/chat", json={**body, "options": {"num_ctx": 99}})
        assert reply.headers["x-erllama-ignored"] == "colour, num_ctx"
        for options in ({"mirostat": 2}, {"presence_penalty": 1}, {"num_predict": 0}):
            refused = await scene.client.post("/api/chat", json={**body, "options": options})
            assert refused.status_code == 400
        for path in ("/api/pull", "/api/create", "/api/copy"):
            assert (await scene.client.post(path, json={})).status_code == 501


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (0, 0),
        (2.5, 2.5),
        (-1, -1),
        ("5m", 300),
        ("1h30m", 5400),
        ("250ms", 0.25),
        ("30", 30),
        ("-1", -1),
        ("-1s", -1),
        ("0", 0),
    ],
)
def test_lengths_of_time(given, seconds):
    """Numbers are seconds; text is a number or parts with units."""
    assert seconds_of(given) == seconds


@pytest.mark.parametrize("given", ["", "-", "5 minutes", "m", "1h-3m", float("inf"), 1e12, "5mm"])
def test_other_texts_are_no_lengths_of_time(given):
    """A typed refusal."""
    with pytest.raises(InvalidOption):
        seconds_of(given)


@pytest.mark.model
def test_a_model_is_shown_by_its_file(client):
    """Details, template, parameters and metadata, whether it is loaded or not; lists are null."""
    shown = client.show("smol")
    assert shown.details.family == "llama"
    assert shown.details.quantization_level == "Q4_1"
    assert "<|im_start|>" in shown.template
    assert "num_ctx 2048" in shown.parameters
    assert shown.modelinfo["llama.block_count"] == 30
    assert shown.modelinfo["tokenizer.ggml.tokens"] is None
    assert shown.capabilities == ["completion"]
    assert client.list().models[0].details.quantization_level == "Q4_1"


async def test_what_a_template_has_words_for_is_a_capability(tmp_path):
    """Tools and thinking, also of a template that the settings name; what is no GGUF file tells nothing."""
    from chat.scenes import FOLDER

    template = tmp_path / "chat.jinja"
    template.write_text((FOLDER / "Qwen-Qwen3-0.6B.jinja").read_text())
    async with serving(models={"fake": {"chat_template_file": str(template)}}) as scene:
        shown = (await scene.client.post("/api/show", json={"model": "fake"})).json()
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["details"]["family"] == ""
        assert shown["model_info"] == {}
        template.unlink()
        missing = (await scene.client.post("/api/show", json={"model": "fake"})).json()
        assert missing["capabilities"] == ["completion"]


async def test_calls_are_streamed_as_soon_as_they_are_whole():
    """Each whole in a line of its own, the first before the end; never one that was cut."""
    second = CALL.replace("Paris", "Rome")
    async with serving(partial(ScriptedChat, says=f"{CALL}\n{second}")) as scene:
        body = {"model": "fake", "messages": HELLO, "tools": TOOLS}
        reply = await scene.client.post("/api/chat", json=body)
        lines = [json.loads(line) for line in reply.text.splitlines()]
        calls = [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]]
        assert [[c["function"]["arguments"] for c in told] for told in calls] == [
            [{"city": "Paris"}],
            [{"city": "Rome"}],
        ]
        assert len({told[0]["id"] for told in calls}) == 2
        cut = await scene.client.post("/api/chat", json={**body, "options": {"num_predict": len(CALL) - 20}})
        assert "tool_calls" not in cut.text


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_official_client_gets_calls_and_thinking(streamed):
    """Whole and streamed, and sends a result back."""
    says = f"<think>\nhm\n</think>\n\n{CALL}"
    async with serving(partial(ScriptedChat, says=says)) as scene:
        client = ollama.AsyncClient(host=scene.url)
        reply = await client.chat(model="fake", messages=HELLO, tools=TOOLS, think=True, stream=streamed)
        parts = [part async for part in reply] if streamed else [reply]
        [call] = [call for part in parts for call in part.message.tool_calls or ()]
        assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
        assert "".join(part.message.thinking or "" for part in parts).strip() == "hm"
        assert parts[-1].done
        asked = {"role": "assistant", "tool_calls": [call.model_dump()]}
        result = {"role": "tool", "tool_name": "get_weather", "content": "sun"}
        again = await client.chat(model="fake", messages=[*HELLO, asked, result], tools=TOOLS)
        assert again.prompt_eval_count > parts[-1].prompt_eval_count
        await client._client.aclose()


@pytest.mark.parametrize("streamed", [False, True])
async def test_reused_tokens_are_a_part_of_the_prompt(streamed):
    """X9: the second time nearly all of it, and the prompt is as long as before."""
    async with serving() as scene:
        body = {"model": "fake", "messages": HELLO, "stream": streamed}
        replies = [await scene.client.post("/api/chat", json=body) for _ in range(2)]
        first, second = (json.loads(reply.text.splitlines()[-1]) for reply in replies)
        assert first["prompt_eval_cached_count"] == 0
        assert second["prompt_eval_count"] == first["prompt_eval_count"]
        assert second["prompt_eval_cached_count"] == second["prompt_eval_count"] - 1


async def test_half_a_call_is_none():
    """Where the limit of tokens cuts it off, there is none in the whole reply either."""
    async with serving(partial(ScriptedChat, says=CALL)) as scene:
        options = {"num_predict": len(CALL) - 20}
        body = {"model": "fake", "messages": HELLO, "tools": TOOLS, "stream": False, "options": options}
        reply = (await scene.client.post("/api/chat", json=body)).json()
        assert (reply["done_reason"], "tool_calls" in reply["message"]) == ("length", False)
