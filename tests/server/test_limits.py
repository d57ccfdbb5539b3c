"""Limits of time: each ends what it is about, says its name, and nothing else."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio
from runtime.chat_scenes import ScriptedChat

import erllama
from erllama.server.metrics import Metrics
from erllama.server.serving import serve_pool
from erllama.server.settings import LimitsTable, make_settings
from server.scenes import chat_body, serving, sse_events
from server.test_connection import CHAT, connect, read_all

if TYPE_CHECKING:
    from erllama.backend import Step

SLOW = partial(ScriptedChat, says="word " * 400, threaded=True, step_delay_s=0.02)
STALL_S = 1.5


def test_the_limits_that_nobody_sets() -> None:
    """In seconds: long enough for slow machines, and none is endless."""
    told = {name: value for name, value in LimitsTable().model_dump().items() if name.endswith("_s")}
    assert told == {
        "engine_call_s": 120,
        "prefill_s": 300,
        "generation_idle_s": 60,
        "total_s": 1800,
        "slow_client_s": 60,
        "idle_connection_s": 1800,
        "drain_s": 5,
        "ping_s": 5,
    }


def _stalls(step: Step) -> None:
    """Computes some tokens, and then nothing for a while."""
    if any(row.pos > 100 and row.sampler is not None for row in step.rows):
        time.sleep(STALL_S)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("make", "limit", "seconds"),
    [
        (partial(ScriptedChat, threaded=True, step_delay_s=1), "prefill_s", 0.2),
        (
            partial(ScriptedChat, says="word " * 40, threaded=True, before_step=_stalls),
            "generation_idle_s",
            0.3,
        ),
        (SLOW, "total_s", 0.5),
    ],
)
async def test_a_limit_ends_the_request_and_is_named(
    make: Any, limit: str, seconds: float, stream: bool
) -> None:
    """504, or an event where the stream has begun; the place is free again."""
    async with serving(make, limits={limit: seconds}) as scene:
        began = trio.current_time()
        reply = await scene.client.post(CHAT, json=chat_body(stream=stream, max_tokens=380))
        assert trio.current_time() - began < seconds + STALL_S + 5
        if reply.status_code == 200:
            assert stream
            (told,) = (event for event in sse_events(reply.text) if '"error"' in event)
            error = json.loads(told)["error"]
        else:
            assert reply.status_code == 504
            error = reply.json()["error"]
        assert error["code"] == ("timeout" if limit == "total_s" else "engine_unresponsive")
        assert f"limits.{limit}" in error["message"]
        await scene.wait_idle()


@dataclass(eq=False)
class Wedged(ScriptedChat):
    """A model whose tokenizer stops for a while, once it is told to; the event loop never waits for it."""

    may_go: threading.Event = field(default_factory=threading.Event)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """See `FakeBackend`."""
        if threading.current_thread() is not threading.main_thread():
            assert self.may_go.wait(60)
        return super().tokenize(text, add_special=add_special, parse_special=parse_special)


async def test_a_call_of_the_engine_that_does_not_return_is_given_up() -> None:
    """504 after its limit; its place is free, and when the engine is back others are served."""
    backend = Wedged()
    backend.may_go.set()
    async with serving(lambda: backend, limits={"engine_call_s": 1.5}) as scene:
        assert (await scene.client.post(CHAT, json=chat_body())).status_code == 200
        backend.may_go.clear()
        began = trio.current_time()
        reply = await scene.client.post(CHAT, json=chat_body("Another"))
        assert trio.current_time() - began < 30
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "engine_unresponsive")
        await scene.wait_idle()
        backend.may_go.set()
        assert (await scene.client.post(CHAT, json=chat_body("A third"))).status_code == 200


async def test_a_connection_is_idle_between_requests_only() -> None:
    """An answer that takes longer is whole; the connection on which nothing is asked then is closed."""
    async with serving(SLOW, limits={"idle_connection_s": 0.3}) as scene:
        await scene.client.post(CHAT, json=chat_body(max_tokens=1))
        began = trio.current_time()
        client = await connect(scene.url, chat_body(stream=True, max_tokens=40))
        with trio.fail_after(30):
            data = await read_all(client)
        assert b"data: [DONE]" in data
        assert trio.current_time() - began > 0.7


async def test_who_still_answers_at_the_end_has_the_time_to_drain() -> None:
    """An answer that takes longer than that is broken off, and the server is gone soon after."""
    values = {"listen": {"port": 0}, "models": {"fake": {"path": "fake.gguf"}}, "limits": {"drain_s": 0.4}}
    stop, broke_off = trio.Event(), trio.Event()
    async with erllama.open_engine() as engine, trio.open_nursery() as nursery:

        async def load(spec: Any, progress: Any) -> erllama.Model:
            return await engine.load_model(backend=SLOW(), model_id=spec.name)

        (url,) = await nursery.start(
            partial(serve_pool, make_settings(values), load, metrics=Metrics(), stop=stop.wait)
        )
        async with httpx.AsyncClient(base_url=url) as client:

            async def ask() -> None:
                with contextlib.suppress(httpx.HTTPError):  # the connection ends, or it is told
                    assert (await client.post(CHAT, json=chat_body(max_tokens=380))).status_code >= 500
                broke_off.set()

            assert (await client.post(CHAT, json=chat_body(max_tokens=1))).status_code == 200
            nursery.start_soon(ask)
            await trio.sleep(1)
            began = trio.current_time()
            stop.set()
            with trio.fail_after(6):
                await broke_off.wait()
            assert trio.current_time() - began > 0.3
