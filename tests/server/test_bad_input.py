"""What is refused, with which status and in whose shape; and that the server is there afterwards."""

from __future__ import annotations

import json
from functools import partial

import pytest
import trio
from runtime.chat_scenes import ScriptedChat

from erllama.errors import ModelNotFound
from server.scenes import chat_body, serving, until

CHAT, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/api/chat"
HELLO = [{"role": "user", "content": "Hi"}]
BODIES = {
    CHAT: {"model": "fake", "messages": HELLO},
    MESSAGES: {"model": "fake", "messages": HELLO, "max_tokens": 5},
    OLLAMA: {"model": "fake", "messages": HELLO, "stream": False},
}


def message_of(path, body):
    """The text of an error, which also checks its shape."""
    if path == OLLAMA:
        return body["error"]
    if path == MESSAGES:
        assert body["type"] == "error"
        assert body["error"]["type"]
    else:
        assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_wrong_bodies_are_refused_in_each_shape(path):
    """Not JSON, not an object, no model, wrong types, NaN, deep nesting: 400, and no model is loaded."""
    good = BODIES[path]
    wrong = [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        json.dumps({k: v for k, v in good.items() if k != "model"}).encode(),
        json.dumps({**good, "messages": "Hi"}).encode(),
        json.dumps({**good, "messages": [1]}).encode(),
        json.dumps({**good, "model": 7}).encode(),
        b'{"model": "fake", "max_tokens": 5, "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ]
    async with serving() as scene:
        for content in wrong:
            reply = await scene.client.post(path, content=content)
            assert reply.status_code == 400, content[:60]
            assert message_of(path, reply.json())
        assert scene.loads == []
        assert (await scene.client.post(path, json=good)).status_code == 200


OTHER_TYPES = [
    (
        CHAT,
        ({"max_tokens": "5"}, {"max_tokens": True}, {"max_tokens": 5.5}, {"temperature": "1"}, {"seed": "1"}),
    ),
    (CHAT, ({"stream": 1}, {"stream": "true"}, {"logprobs": 1}, {"stop": 5}, {"logit_bias": {"1": "2"}})),
    ("/v1/completions", ({"prompt": [True]}, {"prompt": [1.5]}, {"prompt": [[1, "2"]]}, {"prompt": {}})),
    (
        "/v1/responses",
        ({"max_output_tokens": "5"}, {"store": 1}, {"text": "x"}, {"include": "x"}, {"input": 5}),
    ),
    ("/detokenize", ({"tokens": ["5"]}, {"tokens": [True]}, {"tokens": 5})),
    (MESSAGES, ({"max_tokens": "5"}, {"stream": 1}, {"thinking": {"type": "enabled", "budget_tokens": "9"}})),
    (OLLAMA, ({"stream": 1}, {"truncate": "true"}, {"think": "x"}, {"think": 1}, {"keep_alive": True})),
    (OLLAMA, tuple({"options": {"temperature": wrong}} for wrong in ("1", True, [1]))),
    ("/v1/embeddings", ({"input": [1, "x"]}, {"input": 5}, {"dimensions": "5"})),
]


@pytest.mark.parametrize(("path", "wrong"), OTHER_TYPES)
async def test_a_type_is_not_taken_for_another(path, wrong):
    """ "5" is no number, 1 is not true: 400 that names the field. 5.0 is an integer, as in JSON Schema."""
    smallest = {"/v1/responses": {"model": "fake", "input": "Hi"}, "/detokenize": {"tokens": [1]}}
    smallest |= {"/v1/completions": {"model": "fake", "prompt": "Hi"}}
    smallest |= {"/v1/embeddings": {"model": "fake", "input": "Hi"}}
    good = {**BODIES, **smallest}[path]
    async with serving() as scene:
        for each in wrong:
            reply = await scene.client.post(path, json=good | each)
            assert reply.status_code == 400, (each, reply.text)
            assert next(iter(each)) in reply.text, reply.text
        assert scene.loads == []
        if path == CHAT:
            taken = {"max_tokens": 5.0, "temperature": 1, "top_p": 1.0, "seed": 3.0, "logit_bias": {"1": 2}}
            assert (await scene.client.post(path, json=good | taken)).status_code == 200


def _schema(path, schema):
    """The body's words for an answer that satisfies a schema."""
    if path == OLLAMA:
        return {"format": schema}
    if path == MESSAGES:
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
WRONG_CONTENT = {
    "schema": lambda path: _schema(path, {"type": "bogus"}),
    "schema that no grammar holds": lambda path: _schema(path, {"type": "number", "minimum": 3}),
    "role": lambda _: {"messages": [{"role": "bogus", "content": "x"}]},
    "answer of no call": lambda _: {
        "messages": [{"role": "tool", "content": "x", "tool_call_id": "nobodys"}]
    },
}


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_what_no_model_is_needed_to_see_is_refused_at_once(path, stream, busy):
    """H9: 400, streamed or not, with no load begun, and without waiting in line."""
    slow = partial(ScriptedChat, says="word " * 400, threaded=True, step_delay_s=0.02)
    async with serving(slow, models={"fake": {"context": {"n_seq_max": 1}}}) as scene:
        async with trio.open_nursery() as nursery:
            if busy:
                await scene.client.post(CHAT, json=chat_body(max_tokens=1))
                nursery.start_soon(partial(scene.client.post, CHAT, json=chat_body(max_tokens=300)))
                await until(lambda: scene.entry().n_running)
                scene.loads.clear()
            for name, wrong in WRONG_CONTENT.items():
                with trio.fail_after(20):
                    reply = await scene.client.post(
                        path, json={**BODIES[path], "stream": stream, **wrong(path)}
                    )
                assert reply.status_code == 400, (name, reply.text)
                assert message_of(path, reply.json())
            nursery.cancel_scope.cancel()
        assert scene.loads == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"tools": [{"type": "function"}]},
        {"tools": WEATHER, "tool_choice": "bogus"},
        {"max_tokens": 0},
        {"top_p": 7},
    ],
)
async def test_tools_and_numbers_are_looked_at_before_a_load(wrong):
    """As schemas and messages are."""
    async with serving() as scene:
        for stream in (False, True):
            reply = await scene.client.post(CHAT, json=chat_body(stream=stream, **wrong))
            assert reply.status_code == 400, reply.text
        assert scene.loads == []


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (path, wrong)
        for path in ("/tokenize", "/v1/messages/count_tokens")
        for wrong in (
            {"messages": [{"role": "wizard", "content": "x"}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            {"tools": [{"type": "function"}]},
        )
    ]
    + [
        ("/tokenize", {"messages": None, "content": "x", "tools": WEATHER}),
        ("/tokenize", {"content": "x"}),
        ("/detokenize", {"messages": None, "tokens": [-1]}),
        ("/detokenize", {"messages": None, "tokens": [2**31]}),
        ("/v1/messages/count_tokens", {"tool_choice": {"type": "any"}}),
    ],
)
async def test_who_counts_tokens_loads_nothing_for_what_is_wrong(path, wrong):
    """As those who generate: 400 that names the place, and no load."""
    async with serving() as scene:
        body = {"model": "fake", "messages": HELLO} | wrong
        reply = await scene.client.post(path, json={k: v for k, v in body.items() if v is not None})
        assert reply.status_code == 400, reply.text
        assert message_of(MESSAGES if "messages" in path else CHAT, reply.json())
        assert scene.loads == []


@pytest.mark.parametrize("path", BODIES)
async def test_a_model_that_is_not_there_is_answered_with_those_that_are(path):
    """Models and aliases: what to ask for stands in the message."""
    aliases = {"gpt-4o": "other"}
    async with serving(names=("fake", "other"), aliases=aliases) as scene:
        reply = await scene.client.post(path, json=BODIES[path] | {"model": "nobody"})
        assert reply.status_code == 404
        told = message_of(path, reply.json())
        assert all(name in told for name in ("'nobody'", "fake", "other", "gpt-4o"))
        with pytest.raises(ModelNotFound) as caught:
            scene.pool.resolver.resolve("nobody")
        assert caught.value.detail["known"] == ["fake", "other", "gpt-4o"]


@pytest.mark.parametrize("path", BODIES)
async def test_names_are_names_and_never_paths(path):
    """404 in each shape (Ollama's dialect refuses an empty one before that)."""
    async with serving() as scene:
        for name in ("../../../etc/passwd", "/etc/passwd", "nobody", "", "fake\0", "fake.gguf", "x" * 5000):
            reply = await scene.client.post(path, json=BODIES[path] | {"model": name})
            assert reply.status_code == (400 if path == OLLAMA and not name else 404)
            assert message_of(path, reply.json())
        assert scene.loads == []


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("field", "item", "n_max"), [("messages", HELLO[0], 3), ("tools", None, 2)])
async def test_counts_have_limits(path, field, item, n_max):
    """The limit is taken, one more is refused before a model is loaded."""

    def tool(i):
        if path == MESSAGES:
            return {"name": f"t{i}", "input_schema": {"type": "object"}}
        return {"type": "function", "function": {"name": f"t{i}", "parameters": {"type": "object"}}}

    async with serving(limits={"max_messages": 3, "max_tools": 2}) as scene:
        for n, status in ((n_max + 1, 400), (n_max, 200)):
            items = [item or tool(i) for i in range(n)]
            reply = await scene.client.post(path, json=BODIES[path] | {field: items})
            assert reply.status_code == status, reply.text
            assert scene.loads == ([] if status == 400 else ["fake"])


async def test_bodies_have_a_limit():
    """413 over it, told by its length or found while reading; at the limit it is read."""
    async with serving(limits={"max_request_body_bytes": 2000}) as scene:
        body = json.dumps(chat_body()).encode()
        padded = body + b" " * (2000 - len(body))

        async def in_pieces(content):
            for start in range(0, len(content), 500):
                yield content[start : start + 500]

        assert (await scene.client.post(CHAT, content=padded)).status_code == 200
        assert (await scene.client.post(CHAT, content=in_pieces(padded))).status_code == 200
        for content in (padded + b" ", in_pieces(padded + b" ")):
            reply = await scene.client.post(CHAT, content=content)
            assert reply.status_code == 413
            assert reply.json()["error"]["code"] == "body_too_large"


async def test_a_body_that_does_not_come_is_not_waited_for():
    """408 after the time that clients have."""
    async with serving(limits={"slow_client_s": 0.2}) as scene:

        async def slow():
            yield b'{"model": '
            await trio.sleep(1)
            yield b'"fake"}'

        reply = await scene.client.post(CHAT, content=slow())
        assert reply.status_code == 408
        assert scene.loads == []


DISHONOURABLE = [
    {"n": 2},
    {"temperature": 2.1},
    {"temperature": -0.1},
    {"top_p": 1.1},
    {"top_k": -1},
    {"max_tokens": 0},
    {"presence_penalty": 1},
    {"top_logprobs": 3},
    {"logprobs": True, "top_logprobs": 21},
    {"stop": [""]},
    {"stop": ""},
    {"logit_bias": {"x": 1}},
    {"modalities": ["audio"]},
    {"nonsense": 1},
    {"response_format": {"type": "yaml"}},
    {"response_format": {"type": "json_schema"}},
    {"tools": [{"type": "web"}]},
    {"messages": []},
    {"messages": [{"role": "wizard", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [{"role": "tool", "content": "x", "tool_call_id": "nobody"}]},
    {"messages": [{"role": "user", "content": "\ud800"}]},
]


@pytest.mark.parametrize("loaded", [False, True])
async def test_options_that_cannot_be_honoured_are_refused(loaded):
    """Never passed over in silence; the same whether streamed or not, and whether the model is loaded."""
    async with serving() as scene:
        if loaded:
            await scene.client.post(CHAT, json=chat_body(max_tokens=1))
        for more in DISHONOURABLE:
            for stream in (False, True):
                body = json.dumps(chat_body() | more | {"stream": stream})
                reply = await scene.client.post(CHAT, content=body)
                assert reply.status_code == 400, (more, reply.text)
                assert "Options." not in reply.text  # no class of Python's
                assert message_of(CHAT, reply.json())
        assert scene.loads == ["fake"] * loaded


async def test_keys_open_the_surfaces_that_want_them():
    """401 without one or with a wrong one, in each shape; a surface without a list is open."""
    auth = {"openai": ["right"], "anthropic": ["right"]}
    async with serving(auth=auth) as scene:
        for path in (CHAT, MESSAGES):
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"x-api-key": ""},
                {"authorization": "right"},
            ):
                reply = await scene.client.post(path, json=BODIES[path], headers=headers)
                assert reply.status_code == 401
                assert message_of(path, reply.json())
            for headers in ({"authorization": "Bearer right"}, {"x-api-key": "right"}):
                reply = await scene.client.post(path, json=BODIES[path], headers=headers)
                assert reply.status_code == 200
        assert (await scene.client.post(OLLAMA, json=BODIES[OLLAMA])).status_code == 200
        assert (await scene.client.get("/v1/models")).status_code == 401
        assert (await scene.client.get("/")).status_code == 200  # Ollama's clients look whether it is there
        assert (await scene.client.get("/health")).status_code == 200


async def test_pages_of_other_origins_are_let_in_only_by_name():
    """Without a list no headers at all; with one, preflights and replies carry them for its origins."""
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    async with serving() as scene:
        reply = await scene.client.options(CHAT, headers=preflight)
        assert not [h for h in reply.headers if h.startswith("access-control")]
        # What a page can send without asking first is not read as JSON.
        simple = {"origin": "https://a.example", "content-type": "text/plain"}
        reply = await scene.client.post(CHAT, content=json.dumps(chat_body()), headers=simple)
        assert reply.status_code == 400
    async with serving(cors={"origins": ["https://a.example"], "max_age_s": 60}) as scene:
        reply = await scene.client.options(CHAT, headers=preflight)
        assert reply.status_code == 204
        assert reply.headers["access-control-max-age"] == "60"
        for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
            reply = await scene.client.post(CHAT, json=chat_body(), headers={"origin": origin})
            assert reply.headers.get("access-control-allow-origin") == allowed


async def test_requests_have_ids():
    """One's own is echoed unless it is odd, else one is made; also on errors, under another header's name."""
    async with serving(request_id_header="x-trace") as scene:
        for given, back in (("abc", "abc"), ("a b", None), ("x" * 129, None), (None, None)):
            headers = {} if given is None else {"x-trace": given}
            for path, body in ((CHAT, chat_body()), ("/nowhere", {})):
                reply = await scene.client.post(path, json=body, headers=headers)
                found = reply.headers["x-trace"]
                assert found == back if back else found.startswith("req_")


async def test_paths_and_methods_that_are_not_there():
    """404 and 405 in the shape of the surface that was asked."""
    async with serving() as scene:
        for path, shape in (("/v1/nothing", CHAT), ("/v1/messages/x", MESSAGES), ("/api/nothing", OLLAMA)):
            reply = await scene.client.post(path, json={})
            assert reply.status_code == 404
            assert message_of(shape, reply.json())
        refused = await scene.client.get(CHAT)
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


async def test_head_is_get_without_its_body(caplog):
    """The same status and headers on every path that GET has; other paths are refused as ever."""
    caplog.set_level("INFO", "erllama.access")
    async with serving(auth={"ollama": ["key"]}) as scene:
        for path in ("/", "/health", "/api/version", "/v1/models", "/v1/models/nobody", "/api/tags", CHAT):
            got, head = await scene.client.get(path), await scene.client.head(path)
            assert (head.status_code, head.content) == (got.status_code, b"")
            assert head.headers["content-length"] == got.headers["content-length"] != "0"
        assert (await scene.client.head("/")).status_code == 200
        assert (await scene.client.head("/api/tags")).status_code == 401
        await until(lambda: len(_access_lines(caplog)) == 16)
        assert sum(" HEAD " in line for line in _access_lines(caplog)) == 9
        assert 'path="/api/version"' in (await scene.client.get("/metrics")).text


def _access_lines(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "erllama.access"]


async def test_every_request_is_logged_once(caplog):
    """Method, path, status, model and tokens; odd characters of paths cannot forge a line."""
    caplog.set_level("INFO", "erllama.access")
    async with serving() as scene:
        await scene.client.post(CHAT, json=chat_body())
        await scene.client.post(CHAT, json=chat_body(stream=True))
        await scene.client.get("/a%0Aforged")
        await until(lambda: len(_access_lines(caplog)) == 3)
        lines = _access_lines(caplog)
    assert all("model=fake" in line and "generated=" in line and " 200 " in line for line in lines[:2])
    assert "\n" not in lines[2]
    assert " 404 " in lines[2]


async def test_metrics_count_what_happened():
    """Prometheus text that its own parser reads, with the numbers of a scripted load."""
    from prometheus_client.parser import text_string_to_metric_families

    async with serving(partial(ScriptedChat, says="Hi")) as scene:
        for _ in range(2):
            assert (await scene.client.post(CHAT, json=chat_body("word " * 40))).status_code == 200
        await scene.client.post(CHAT, json=chat_body() | {"model": "nobody"})
        # A request is counted when its last byte is sent, which is when its client has it.
        await until(lambda: b'status="404"' in scene.service.metrics.text())
        text = (await scene.client.get("/metrics")).text
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    def value(name, **labels):
        return found[name, tuple(sorted(labels.items()))]

    assert value("erllama_requests_total", surface="openai", path=CHAT, status="200") == 2
    assert value("erllama_requests_total", surface="openai", path=CHAT, status="404") == 1
    assert value("erllama_tokens_total", model="fake", kind="generated") == 6
    prompt = value("erllama_tokens_total", model="fake", kind="prompt")
    assert value("erllama_tokens_total", model="fake", kind="cached") == prompt / 2 - 1
    assert value("erllama_cache_hits_total", model="fake", kind="cold") == 1
    assert value("erllama_cache_hits_total", model="fake", kind="exact") == 1
    assert value("erllama_engine_admit_duration_seconds_count", op="infer") == 2
    assert value("erllama_chat_apply_duration_seconds_count", model="fake") == 2
    assert value("erllama_model_loaded", model="fake") == 1
    assert value("erllama_active_answers", model="fake") == 0
    for kind in ("event_loop", "threads"):
        assert 0 <= value("erllama_busy_ratio", kind=kind) <= 1


async def test_only_names_of_this_machine_are_answered():
    """A page whose name leads to the loopback address is refused, unless the name is listed."""
    async with serving(listen={"port": 0, "hosts": ["box.example"]}) as scene:
        for host, status in (
            ("localhost:8080", 200),
            ("127.0.0.1", 200),
            ("[::1]:99", 200),
            ("box.example", 200),
            ("evil.example:8080", 403),
            ("127.0.0.1.evil.example", 403),
            ("", 403),
        ):
            reply = await scene.client.get("/v1/models", headers={"host": host})
            assert reply.status_code == status, host


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat"])
async def test_an_empty_body_is_told(path):
    """Not as a parameter by the name of body."""
    async with serving() as scene:
        reply = await scene.client.post(path)
        assert reply.status_code == 400
        assert "the body is empty; send JSON" in reply.text


async def test_a_wrong_method_or_base_url_is_told():
    """405 with what is allowed; 404 with the path that was probably meant."""
    async with serving() as scene:
        reply = await scene.client.get(CHAT)
        assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
        for path, meant in (
            ("/chat/completions", CHAT),
            ("/v1/v1/messages", "/v1/messages"),
            ("/v1/api/chat", "/api/chat"),
            ("/chat", "/api/chat"),
            ("/nowhere", None),
        ):
            reply = await scene.client.post(path, json={})
            assert reply.status_code == 404, path
            told = reply.json()["error"]["message"]
            assert ("meant" in told) == (meant is not None)
            assert meant is None or f"; is {meant} meant?" in told


async def test_health_is_of_no_dialect():
    """In the metrics, unlike what clients ask."""
    async with serving() as scene:
        for path in ("/health", "/v1/models"):
            await scene.client.get(path)
        await until(lambda: b'path="/v1/models"' in scene.service.metrics.text())
        text = (await scene.client.get("/metrics")).text
        for path, surface in (("/health", "erllama"), ("/v1/models", "openai")):
            assert f'erllama_requests_total{{path="{path}",status="200",surface="{surface}"}} 1.0' in text
