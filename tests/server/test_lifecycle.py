"""What a server does with clients that come, wait, leave and ask too much; models are arithmetic."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from runtime.chat_scenes import ScriptedChat

import erllama
from erllama.errors import LoadFailed, ModelWouldOom
from erllama.server.app import make_app
from erllama.server.pool import loader
from erllama.server.registry import ConfiguredModels
from erllama.server.settings import make_settings
from erllama.testing import FakeBackend
from server.scenes import asgi_scope, chat_body, receiver, serving, sse_events, until

CHAT = "/v1/chat/completions"
SLOW = partial(ScriptedChat, says="word " * 400, threaded=True, step_delay_s=0.02)


def one_lane():
    return {"models": {"fake": {"context": {"n_seq_max": 1}}}}


async def test_a_chat_is_answered():
    """The shape of the smallest request, with its id and its note about the cache."""
    async with serving() as scene:
        reply = await scene.client.post(CHAT, json=chat_body())
        assert reply.status_code == 200
        assert reply.json()["choices"][0]["message"]["content"] == "Hello."
        assert reply.headers["x-request-id"].startswith("req_")
        assert "reason=" in reply.headers["x-erllama-cache"]


async def test_requests_that_come_while_a_model_loads_share_the_load():
    """Three clients, one load; streams hear of it meanwhile."""
    async with serving() as scene:
        scene.hold_load = trio.Event()
        replies = []

        async def ask(stream: bool) -> None:
            replies.append(await scene.client.post(CHAT, json=chat_body(stream=stream)))

        async with trio.open_nursery() as nursery:
            for stream in (False, True, True):
                nursery.start_soon(ask, stream)
            await trio.sleep(0.2)
            scene.hold_load.set()
        assert scene.loads == ["fake"]
        assert [r.status_code for r in replies] == [200] * 3
        told = [r for r in replies if "event-stream" in r.headers["content-type"]]
        assert all(": loading\n\n" in r.text and sse_events(r.text)[-1] == "[DONE]" for r in told)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_a_stream_is_told_how_far_its_load_is(path, monkeypatch):
    """H30: until the model is there, again and again, in comments."""
    monkeypatch.setattr("erllama.server.reply.LOAD_NEWS_S", 0.02)
    async with serving() as scene:
        scene.hold_load = trio.Event()
        text = ""
        async with scene.client.stream("POST", path, json=chat_body(stream=True, max_tokens=5)) as reply:
            async for part in reply.aiter_text():
                text += part
                if text.count(": loaded 50%\n\n") >= 3:
                    scene.hold_load.set()
        assert text.count(": loaded 50%\n\n") >= 3
        assert '"H' in text, "the answer follows"


async def test_a_failed_load_reaches_each_who_waited_once_and_can_be_tried_again():
    """A typed error for a whole reply, an error event for a stream; the next request loads anew."""
    async with serving() as scene:
        real = scene.pool._load

        async def fail(spec, progress):
            await trio.sleep(0.05)
            raise LoadFailed("broken")

        scene.pool._load = fail
        whole = await scene.client.post(CHAT, json=chat_body())
        stream = await scene.client.post(CHAT, json=chat_body(stream=True))
        assert whole.status_code == 500
        assert whole.json()["error"]["code"] == "load_failed"
        assert stream.status_code == 200
        assert json.loads(sse_events(stream.text)[0])["error"]["code"] == "load_failed"
        scene.pool._load = real
        assert (await scene.client.post(CHAT, json=chat_body())).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["loading", "queued", "decoding"])
async def test_a_client_that_leaves_frees_its_place(phase, stream):
    """In every phase, streamed or not: nothing runs on, and the next one is served."""
    async with serving(SLOW, **one_lane()) as scene:
        if phase == "loading":
            scene.hold_load = trio.Event()
        async with trio.open_nursery() as nursery:
            if phase == "queued":
                nursery.start_soon(partial(scene.client.post, CHAT, json=chat_body(max_tokens=60)))
                await trio.sleep(0.2)
            with trio.move_on_after(0.3):
                async with httpx.AsyncClient(base_url=scene.url) as leaving:
                    await leaving.post(CHAT, json=chat_body("x", stream=stream, max_tokens=400))
            if phase == "loading":
                scene.hold_load.set()
                await trio.sleep(0.05)
            if phase == "queued":
                await trio.sleep(0.05)
                assert scene.entry().n_inside == 1
        await scene.wait_idle()
        assert (await scene.client.post(CHAT, json=chat_body(max_tokens=2))).status_code == 200


async def test_a_full_queue_refuses_and_a_long_wait_ends():
    """One runs, one waits, the third gets 429; who waits too long gets 504."""
    async with serving(SLOW, queue={"depth": 1, "timeout_s": 0.3}, **one_lane()) as scene:
        await scene.client.post(CHAT, json=chat_body(max_tokens=1))
        statuses = []

        async def ask(n: int) -> None:
            reply = await scene.client.post(CHAT, json=chat_body(max_tokens=n))
            statuses.append((reply.status_code, reply.json().get("error", {}).get("code")))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 60)
            await trio.sleep(0.1)
            nursery.start_soon(ask, 2)
            await trio.sleep(0.1)
            await ask(2)
            assert statuses == [(429, "queue_full")]
        assert statuses[1:] == [(504, "queue_timeout"), (200, None)]


async def test_counting_tokens_takes_nobodys_place(monkeypatch):
    """A model whose text is only counted is free for the one who wants an answer, also without a queue."""
    async with serving(queue={"depth": 0}, **one_lane()) as scene:
        await scene.client.post(CHAT, json=chat_body(max_tokens=1))
        model, may_go_on = scene.entry().model, trio.Event()
        tokenize = model.tokenize_async

        async def slow(*arguments):
            await may_go_on.wait()
            return await tokenize(*arguments)

        monkeypatch.setattr(model, "tokenize_async", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(scene.client.post, "/tokenize", json={"content": "x"}))
            await until(lambda: scene.entry().n_inside)
            assert (await scene.client.post(CHAT, json=chat_body(max_tokens=1))).status_code == 200
            may_go_on.set()


async def test_what_the_settings_leave_open_is_what_the_guide_says():
    """H23, H28: as many places as sequences (4), a line of 100 and 30 s; the engine's own is never used."""
    slow = partial(ScriptedChat, says="word " * 40, n_slots=4, threaded=True, step_delay_s=0.005)
    async with serving(slow) as scene:
        settings, seen = scene.service.settings, []
        assert (settings.queue.depth, settings.queue.timeout_s) == (100, 30)
        assert scene.pool.resolver.resolve("fake").concurrency == 4

        async def ask():
            reply = await scene.client.post(CHAT, json=chat_body(max_tokens=60))
            assert reply.status_code == 200

        async with trio.open_nursery() as nursery:
            for _ in range(9):
                nursery.start_soon(ask)
            await until(lambda: bool(scene.pool.all_entries()) and scene.entry().n_waiting > 0)
            while len(nursery.child_tasks):
                entry = scene.entry()
                seen.append((entry.n_running, entry.n_waiting, entry.model.queue_depth()))
                await trio.sleep(0.002)
    assert max(running for running, _, _ in seen) == 4
    assert max(waiting for _, waiting, _ in seen) == 5
    assert max(engine for _, _, engine in seen) <= 5  # with one that ends in this step


async def test_those_who_wait_are_served_in_order():
    """First come, first served."""
    async with serving(SLOW, **one_lane()) as scene:
        await scene.client.post(CHAT, json=chat_body(max_tokens=1))
        done = []

        async def ask(n: int) -> None:
            await scene.client.post(CHAT, json=chat_body(str(n), max_tokens=3))
            done.append(n)

        async with trio.open_nursery() as nursery:
            for n in range(5):
                nursery.start_soon(ask, n)
                await trio.sleep(0.05)
        assert done == [0, 1, 2, 3, 4]


async def test_one_who_never_reads_does_not_stop_the_others():
    """A stalled client is left after its time; meanwhile another one is answered."""
    async with serving(partial(SLOW, n_slots=2), limits={"slow_client_s": 0.5}) as scene:
        await scene.client.post(CHAT, json=chat_body(max_tokens=1))
        app = make_app(scene.service)
        body = json.dumps(chat_body(stream=True, max_tokens=4000)).encode()
        sent = []

        async def send(message) -> None:
            sent.append(message)
            if len(sent) > 2:
                await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(app, asgi_scope(CHAT), receiver(body), send)
            await trio.sleep(0.2)
            assert scene.entry().n_inside == 1
            reply = await scene.client.post(CHAT, json=chat_body("y", max_tokens=5))
            assert reply.status_code == 200
        await scene.wait_idle()
        assert sent[-1]["more_body"]


async def test_a_long_silence_is_filled_with_pings():
    """While the prompt is computed a stream says that it is alive."""
    make = partial(ScriptedChat, says="Hi", threaded=True, step_delay_s=0.5)
    async with serving(make, limits={"ping_s": 0.1}) as scene:
        reply = await scene.client.post(CHAT, json=chat_body(stream=True))
        assert reply.text.count(": ping\n\n") >= 2
        assert sse_events(reply.text)[-1] == "[DONE]"


async def test_limits_of_time_end_a_request():
    """A prefill over its limit is 504 and names the limit."""
    make = partial(ScriptedChat, threaded=True, step_delay_s=1)
    async with serving(make, limits={"prefill_s": 0.2}) as scene:
        reply = await scene.client.post(CHAT, json=chat_body())
        assert reply.status_code == 504
        assert "limits.prefill_s" in reply.json()["error"]["message"]


async def test_idle_models_are_unloaded_and_come_back():
    """After their time, counted from the end of the last answer; never during one."""
    async with serving(SLOW, keep_alive_s=0.1) as scene:
        assert (await scene.client.post(CHAT, json=chat_body(max_tokens=20))).status_code == 200
        await until(lambda: scene.pool.statistics().n_unloads == 1)
        assert (await scene.client.post(CHAT, json=chat_body(max_tokens=1))).status_code == 200
        assert scene.loads == ["fake", "fake"]


async def test_idle_models_make_room_for_others():
    """The one unused for longest goes; when nothing can go the request fails and says so."""
    async with serving(names=("a", "b", "c", "d"), memory_aware_loading=True) as scene:
        real, room = scene.pool._load, 2

        async def load(spec, progress):
            if sum(e.is_loaded for e in scene.pool.all_entries()) >= room:
                raise ModelWouldOom("no room")
            return await real(spec, progress)

        scene.pool._load = load
        for name in ("a", "b", "a", "c"):
            reply = await scene.client.post(CHAT, json=chat_body() | {"model": name})
            assert reply.status_code == 200
        assert {e.spec.name for e in scene.pool.entries()} == {"a", "c"}
        room = 0
        reply = await scene.client.post(CHAT, json=chat_body() | {"model": "d"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_would_oom")


async def test_a_session_has_one_turn_at_a_time():
    """The second one is told to come back; another session is not concerned."""
    async with serving(partial(SLOW, n_slots=3)) as scene:
        await scene.client.post(CHAT, json=chat_body(max_tokens=1))
        header = {"x-conversation-id": "me"}
        async with trio.open_nursery() as nursery:
            first = partial(scene.client.post, CHAT, json=chat_body(max_tokens=30), headers=header)
            nursery.start_soon(first)
            await trio.sleep(0.1)
            busy = await scene.client.post(CHAT, json=chat_body(), headers=header)
            assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
            other = await scene.client.post(CHAT, json=chat_body(max_tokens=1, prompt_cache_key="you"))
            assert other.status_code == 200


async def test_a_shared_session_stays_with_its_first_turn(monkeypatch):
    """H18: a second request that runs without the session, and whose client leaves, does not end it."""
    async with serving(partial(SLOW, n_slots=3), session_busy="share") as scene:
        await scene.client.post(CHAT, json=chat_body(max_tokens=1))
        model, ended = scene.entry().model, []

        async def end_session(session_id, *, salt):
            ended.append(session_id)

        monkeypatch.setattr(model, "end_session", end_session)
        header = {"x-conversation-id": "me"}
        first = partial(scene.client.post, CHAT, json=chat_body(max_tokens=40), headers=header)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            await until(lambda: model.statistics().n_decoding == 1)  # it has its session
            with trio.move_on_after(0.3):
                await scene.client.post(CHAT, json=chat_body("other", max_tokens=400), headers=header)
        await scene.wait_idle()
        assert ended == []
        with trio.move_on_after(0.3):
            await scene.client.post(CHAT, json=chat_body(max_tokens=400), headers=header)
        await scene.wait_idle()
        assert ended == ["me"], "its own session ends with a client that leaves"


async def test_strangers_with_one_first_message_are_both_served():
    """H18: what was not named is no session."""
    async with serving(partial(SLOW, n_slots=3)) as scene:
        await scene.client.post(CHAT, json=chat_body(max_tokens=1))
        statuses = []

        async def ask():
            statuses.append((await scene.client.post(CHAT, json=chat_body(max_tokens=20))).status_code)

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(ask)
            await until(lambda: scene.entry().n_running == 2)
        assert statuses == [200, 200]


async def test_a_history_that_is_too_long_loses_its_oldest_turns():
    """The system message and the last question stay, and the reply says how many messages went."""
    backends = []

    def make():
        backends.append(ScriptedChat(n_ctx=1))
        backends[-1].n_ctx = 600
        return backends[-1]

    turns = [{"role": r, "content": f"{r} {i} " + "x" * 100} for i in range(5) for r in ("user", "assistant")]
    messages = [
        {"role": "system", "content": "Be kind."},
        *turns,
        {"role": "user", "content": "last question"},
    ]
    async with serving(make) as scene:
        reply = await scene.client.post(CHAT, json={"model": "fake", "messages": messages})
        assert reply.status_code == 200, reply.text
        assert int(reply.headers["x-erllama-dropped-messages"]) >= 4
        (prompt,) = backends[0].prompts
        assert "Be kind." in prompt
        assert "last question" in prompt
        assert "user 0" not in prompt
        one = await scene.client.post(CHAT, json=chat_body("x" * 900))
        assert (one.status_code, one.json()["error"]["code"]) == (400, "context_length_exceeded")


def small():
    backend = ScriptedChat(n_ctx=1)
    backend.n_ctx = 600
    return backend


HISTORY = [{"role": r, "content": f"{r} {i} " + "x" * 100} for i in range(5) for r in ("user", "assistant")]
LONG = {"model": "fake", "messages": [*HISTORY, {"role": "user", "content": "last question"}]}


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
async def test_a_stream_tells_what_its_history_lost(path):
    """In a header; where a load was told before, so that headers are out, in a comment before the answer."""
    said = {"input": LONG["messages"]} if path.endswith("responses") else {"messages": LONG["messages"]}
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    body = {"model": "fake", "stream": True, limit: 20, **said}
    async with serving(small) as scene:
        cold, warm = [await scene.client.post(path, json=body) for _ in range(2)]
        dropped = int(warm.headers["x-erllama-dropped-messages"])
        assert dropped >= 4
        assert ": x-erllama-dropped" not in warm.text
        assert "x-erllama-dropped-messages" not in cold.headers
        comment = f": x-erllama-dropped-messages: {dropped}\n\n"
        assert cold.text.count(comment) == 1
        assert cold.text.index(comment) < cold.text.index('"H')


@pytest.mark.parametrize("streamed", [False, True])
async def test_ollamas_last_object_tells_what_was_lost(streamed):
    """It has no comments, so a field does, whole and streamed; without a loss there is none."""
    async with serving(small) as scene:
        for body, is_there in ((LONG, True), (chat_body(), False)):
            reply = await scene.client.post("/api/chat", json={**body, "stream": streamed})
            last = json.loads(reply.text.splitlines()[-1])
            assert ("dropped_messages" in last) == is_there
            assert not is_there or last["dropped_messages"] >= 4


ANSWERS = {
    CHAT: chat_body(),
    "/v1/messages": chat_body(max_tokens=9),
    "/v1/responses": {"model": "fake", "input": "Hello"},
    "/api/chat": chat_body(),
}


def told_of_failure(path, text):
    """The error of a reply, whole or the last event of a stream, which also checks its shape."""
    found = json.loads([e for e in sse_events(text) or text.splitlines() if e != "[DONE]"][-1])
    if path == "/api/chat":
        assert found.keys() == {"error", "reason"}
        return found["error"]
    if path == "/v1/messages":
        assert (found["type"], found["error"]["type"]) == ("error", "api_error")
    elif "response" in found:
        assert found["type"] == "response.failed"
        return found["response"]["error"]["message"]
    else:
        assert found["error"].keys() == {"message", "type", "param", "code"}
    return found["error"]["message"]


@pytest.mark.parametrize("path", ANSWERS)
@pytest.mark.parametrize("streamed", [False, True])
async def test_failures_of_the_engine_are_errors_of_the_request(path, streamed):
    """H46: a step that fails is a 500 in the dialect's shape, or an event, without what went wrong inside."""
    broken = True

    def make():
        def fail(step):
            if broken:
                raise RuntimeError("secret of the machine")

        return ScriptedChat(before_step=fail)

    async with serving(make) as scene:
        reply = await scene.client.post(path, json=ANSWERS[path] | {"stream": streamed})
        assert reply.status_code == (200 if streamed else 500)
        assert told_of_failure(path, reply.text)
        assert "secret" not in reply.text
        broken = False
        await until(lambda: not scene.entry().is_loaded)
        assert (await scene.client.post(path, json=ANSWERS[path])).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "x"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/messages/count_tokens", chat_body()),
        ("/v1/embeddings", {"model": "fake", "input": "x"}),
        ("/api/show", {"model": "fake"}),
        ("/api/tags", None),
    ],
)
async def test_what_nobody_expected_has_the_dialects_shape(path, body, monkeypatch, caplog):
    """A 500 with an id, also for a page of another origin; the log has it once, the client nothing of it."""

    async def fail(*arguments, **options):
        raise RuntimeError("secret of the machine")

    def fail_at_once(*arguments):
        raise RuntimeError("secret of the machine")

    for name in ("listed", "shown"):
        monkeypatch.setattr(f"erllama.server.ollama_routes.{name}", fail_at_once)
    page = {"origin": "https://a.example"}
    async with serving(cors={"origins": ["https://a.example"]}) as scene:
        monkeypatch.setattr(scene.pool, "_loaded", fail)
        reply = await scene.client.request("POST" if body else "GET", path, json=body, headers=page)
        assert reply.status_code == 500
        shape = {"/v1/messages/count_tokens": "/v1/messages"}.get(path, path)
        assert told_of_failure("/api/chat" if path.startswith("/api") else shape, reply.text)
        assert "secret" not in reply.text
        assert reply.headers["x-request-id"].startswith("req_")
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        assert (await scene.client.get("/health")).status_code == 200
    logged = [r for r in caplog.records if r.exc_info]
    assert [r.name for r in logged] == ["erllama.server"]


async def test_text_prompts_are_text_or_ids():
    """Bytes are the tokens of this model, so ids and text give the same answer."""
    async with serving(FakeBackend) as scene:
        body = {"model": "fake", "max_tokens": 5, "temperature": 0}
        text = await scene.client.post("/v1/completions", json=body | {"prompt": "abc"})
        ids = await scene.client.post("/v1/completions", json=body | {"prompt": [97, 98, 99]})
        assert text.json()["choices"] == ids.json()["choices"]
        assert (
            await scene.client.post("/v1/completions", json=body | {"prompt": ["a", "b"]})
        ).status_code == 400
        tokens = (await scene.client.post("/tokenize", json={"content": "abc"})).json()["tokens"]
        assert tokens == [97, 98, 99]
        back = await scene.client.post("/detokenize", json={"tokens": tokens})
        assert back.json() == {"content": "abc"}


async def test_a_load_that_fails_tells_no_paths(caplog):
    """Whatever it raises; the log has it."""
    async with serving() as scene:

        async def fail(spec, progress):
            raise FileNotFoundError(2, "No such file", "/home/secret/model.gguf")

        scene.pool._load = fail
        reply = await scene.client.post(CHAT, json=chat_body())
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "load_failed")
        assert "secret" not in reply.text
    assert "/home/secret/model.gguf" in caplog.text


@pytest.mark.parametrize("raw", [None, b"\xff"])
async def test_a_template_that_cannot_be_read_fails_the_load(raw, tmp_path, caplog):
    """Its file is not there, or is no text: typed, named in the log only."""
    file = tmp_path / "secret.jinja"
    if raw is not None:
        file.write_bytes(raw)
    async with erllama.open_engine() as engine:
        models = {"m": {"path": "m.gguf", "chat_template_file": str(file)}}
        (spec,) = ConfiguredModels(make_settings({"models": models})).specs()
        with pytest.raises(LoadFailed, match="template") as failed:
            await loader(engine, tier="ram", policy=erllama.SavePolicy())(spec, lambda _: None)
        assert "secret" not in str(failed.value)
    assert "models.m.chat_template_file" in caplog.text


@pytest.mark.parametrize("crashed", [False, True])
async def test_a_model_that_is_still_being_freed_is_waited_for(crashed):
    """One that ended by itself keeps its name until it has saved and freed everything: then it is loaded."""
    n_made, hold, broken = 0, trio.Event(), False

    def fail(step):
        if broken:
            raise RuntimeError("broken")

    async with erllama.open_engine() as engine:
        real = engine.load_model

        async def load_model(file=None, **options):
            nonlocal n_made
            n_made += 1
            return await real(backend=FakeBackend(before_step=fail), model_id="m")

        engine.load_model = load_model
        (spec,) = ConfiguredModels(make_settings({"models": {"m": {"path": "m.gguf"}}})).specs()
        load = loader(engine, tier="ram", policy=erllama.SavePolicy())
        old = await load(spec, lambda _: None)
        old.handle.actor.flush = hold.wait
        if crashed:
            broken = True
            with pytest.raises(erllama.EngineError):
                await old.complete("x")
            broken = False
        else:
            old.handle.stop()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load, spec, lambda _: None)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert n_made == 1
            hold.set()
        assert n_made == 2
        assert (await engine.model("m").complete("x", max_tokens=2)).stats.n_generated == 2


async def test_a_slow_admission_is_logged(caplog, monkeypatch):
    """With the model's name, once; and the histogram counts every one."""
    monkeypatch.setattr("erllama.server.generation.SLOW_ADMISSION_S", 0.0)
    async with serving() as scene:
        with caplog.at_level("WARNING", "erllama.server"):
            await scene.client.post(CHAT, json=chat_body())
        assert [r.getMessage() for r in caplog.records if "handing a request to fake" in r.getMessage()]
        text = (await scene.client.get("/metrics")).text
        assert 'erllama_engine_admit_duration_seconds_count{op="infer"} 1.0' in text


@pytest.mark.parametrize(
    ("path", "more", "told"),
    [
        ("/v1/chat/completions", {"stream": True}, '"code":"shutting_down"'),
        ("/v1/responses", {"stream": True}, "event: response.failed"),
        ("/v1/messages", {"stream": True, "max_tokens": 900}, "event: error"),
        ("/api/chat", {}, '"reason":"shutting_down"'),
        ("/v1/chat/completions", {"stream": False}, '"code":"shutting_down"'),
    ],
)
async def test_an_answer_that_the_end_cuts_off_says_so(
    path: str, more: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """When there is no more time for it: its dialect's error, and the log has it; nothing runs on."""
    caplog.set_level("INFO", "erllama.access")
    slow = partial(ScriptedChat, says="word " * 400, threaded=True, step_delay_s=0.01)
    body = chat_body() | more
    if path == "/v1/responses":
        body["input"] = body.pop("messages")
    async with serving(slow) as scene, trio.open_nursery() as nursery:
        replies = []

        async def ask() -> None:
            replies.append(await scene.client.post(path, json=body))

        nursery.start_soon(ask)
        await until(lambda: bool(scene.pool.all_entries()) and scene.entry().n_running == 1)
        await until(lambda: any(r.n_generated > 3 for r in scene.entry().model.requests()))
        scene.service.generator.end_answers()
        await until(lambda: bool(replies))
        (reply,) = replies
        assert reply.status_code == (503 if more.get("stream") is False else 200)
        assert told in reply.text
        assert "the server is ending" in reply.text
        await until(lambda: bool(caplog.records))
        assert caplog.records[-1].getMessage().endswith("error=shutting_down")
        await scene.wait_idle()
        late = await scene.client.post(path, json=body)
        assert "the server is ending" in late.text
