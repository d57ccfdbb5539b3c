"""Loads, queues and unloads: who hears of them, who shares them, and what must not happen meanwhile."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from runtime.chat_scenes import ScriptedChat

from server.scenes import chat_body, serving, sse_events, until

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SLOW = partial(ScriptedChat, says="word " * 400, threaded=True, step_delay_s=0.02)


@pytest.mark.parametrize(("path", "news"), [(CHAT, ": loading\n\n"), (MESSAGES, "event: ping\n")])
async def test_news_of_a_load_comes_before_the_first_token(path: str, news: str, monkeypatch: Any) -> None:
    """Each of three streams hears of the one load again and again, then gets its answer."""
    monkeypatch.setattr("erllama.server.reply.LOAD_NEWS_S", 0.05)
    async with serving() as scene:
        scene.hold_load = trio.Event()
        texts = ["", "", ""]

        async def ask(i: int) -> None:
            body = chat_body(stream=True, max_tokens=50)
            async with scene.client.stream("POST", path, json=body) as reply:
                assert reply.status_code == 200
                async for piece in reply.aiter_text():
                    texts[i] += piece

        async with trio.open_nursery() as nursery:
            for i in range(3):
                nursery.start_soon(ask, i)
            await until(lambda: all(text.count(news) >= 2 for text in texts))
            with trio.fail_after(20):
                assert (await scene.client.get("/health")).status_code == 200
            assert scene.entry().loading.fraction == 0.5
            scene.hold_load.set()
        assert scene.loads == ["fake"]
        assert scene.pool.statistics().n_loads == 1
        ends = {CHAT: '"finish_reason":"stop"', MESSAGES: "event: message_stop"}
        for text in texts:
            assert text.rindex(news) < text.index('"H')
            assert text.count(ends[path]) == 1
            assert "error" not in text


async def test_a_model_has_its_own_queue() -> None:
    """`queue_depth` and `queue_timeout_s` of its table win; other models have the server's."""
    models = {
        "fake": {"context": {"n_seq_max": 1}, "queue_depth": 0},
        "other": {"context": {"n_seq_max": 1}, "queue_timeout_s": 0.2},
    }
    async with serving(SLOW, ("fake", "other"), models=models) as scene:

        async def ask(name: str, n: int, **more: Any) -> Any:
            body = chat_body(max_tokens=n, **more) | {"model": name}
            return await scene.client.post(CHAT, json=body)

        for name in models:
            await ask(name, 1)
        async with trio.open_nursery() as nursery:
            for name in models:
                nursery.start_soon(ask, name, 300)
            await until(lambda: all(scene.entry(name).n_running for name in models))
            assert (await ask("fake", 1)).status_code == 429
            for stream in (False, True):
                waited = await ask("other", 1, stream=stream)
                assert (waited.status_code, waited.json()["error"]["code"]) == (504, "queue_timeout")
            nursery.cancel_scope.cancel()


async def test_a_stream_that_waited_for_long_is_told_in_an_event() -> None:
    """Its headers are out after a second, so the error comes in the stream."""
    models = {"fake": {"context": {"n_seq_max": 1}, "queue_timeout_s": 1.3}}
    async with serving(SLOW, models=models) as scene:
        await scene.client.post(CHAT, json=chat_body(max_tokens=1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(scene.client.post, CHAT, json=chat_body(max_tokens=380)))
            await until(lambda: scene.entry().n_running == 1)
            late = await scene.client.post(CHAT, json=chat_body(stream=True))
            nursery.cancel_scope.cancel()
        assert late.status_code == 200
        assert '"queue_timeout"' in sse_events(late.text)[0]


async def test_a_long_answer_is_never_unloaded_under() -> None:
    """Its time to live is a tenth of the answer's, and begins when that is over."""
    async with serving(SLOW, keep_alive_s=0.1) as scene:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                partial(scene.client.post, CHAT, json=chat_body(stream=True, max_tokens=50)), name="answer"
            )
            await until(lambda: bool(scene.pool.all_entries()) and scene.entry().n_running == 1)
            while scene.entry().n_running:
                assert scene.entry().is_loaded
                assert scene.pool.statistics().n_unloads == 0
                await trio.sleep(0.02)
        await until(lambda: scene.pool.statistics().n_unloads == 1)


async def test_models_are_told_in_the_order_of_their_last_use() -> None:
    """The latest first; and a gauge says for how long nobody has had each."""
    async with serving(names=("a", "b")) as scene:
        for name in ("a", "b", "a"):
            await scene.client.post(CHAT, json=chat_body() | {"model": name})
            await trio.sleep(0.05)
        assert [entry.spec.name for entry in scene.pool.entries()] == ["a", "b"]
        text = (await scene.client.get("/metrics")).text
        idle = {
            name: float(line.split()[-1])
            for name in ("a", "b")
            for line in text.splitlines()
            if line.startswith(f'erllama_model_idle_seconds{{model="{name}"}}')
        }
        assert 0 < idle["a"] < idle["b"]
        async with scene.pool.lease(scene.service.spec("b")):
            text = (await scene.client.get("/metrics")).text
            assert 'erllama_model_idle_seconds{model="b"} 0.0' in text


async def test_a_model_that_is_being_freed_is_waited_for_and_loaded_again() -> None:
    """Who asks for it meanwhile gets the new one."""
    async with serving() as scene:
        spec = scene.service.spec("fake")
        async with scene.pool.lease(spec) as held:
            old, entry = held.model, held.entry
            assert not await scene.pool.unload(entry)  # it is in use
        go_on, real = trio.Event(), old.unload

        async def unload() -> None:
            await go_on.wait()
            await real()

        old.unload = unload  # type: ignore[method-assign]
        got = []

        async def ask() -> None:
            async with scene.pool.lease(spec) as held:
                got.append(held.model)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.pool.unload, entry)
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert not got
            go_on.set()
        assert got[0] is not old
        assert scene.loads == ["fake", "fake"]


async def test_a_request_and_an_unload_at_the_same_moment() -> None:
    """Whichever comes first, and trio decides that anew each time: nobody has a model that is going."""
    async with serving() as scene:
        spec = scene.service.spec("fake")
        unloaded = set()

        async def ask() -> None:
            async with scene.pool.lease(spec) as held:
                for _ in range(3):
                    assert not held.model.handle.stopping
                    await trio.lowlevel.checkpoint()

        async def unload() -> None:
            unloaded.add(await scene.pool.unload(scene.entry()))

        await ask()
        for _ in range(40):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                nursery.start_soon(unload)
        assert unloaded == {True, False}


@pytest.mark.parametrize("n", [None, 1, 7])
async def test_as_many_run_at_once_as_the_context_has_sequences(n: int | None) -> None:
    """H24: one number for the context that is opened and for the places in line."""
    context = {} if n is None else {"n_seq_max": n}
    async with serving(models={"fake": {"context": context}}) as scene:
        await scene.client.post(CHAT, json=chat_body(max_tokens=1))
        entry = scene.entry()
        assert entry.lanes.total_tokens == entry.spec.table.context_options().n_seq_max == (n or 4)
