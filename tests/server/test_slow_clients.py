"""Clients that leave while their prompt is computed, and many that read slowly."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio
from runtime.chat_scenes import ScriptedChat

import erllama
from erllama.server.app import make_app
from server.scenes import asgi_scope, chat_body, receiver, serving, until
from server.test_connection import CHAT

if TYPE_CHECKING:
    from erllama.backend import Step

NAMES = ("fake", "other")  # a model has at most 128 sequences
N_STREAMS = 100  # of each
N_BATCH = 64
BUFFER = 32  # events


class Gate:
    """Lets a model's step begin when it is told to, and knows whose prompt each step computed."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._may_go = threading.Semaphore(0)

    def before_step(self, step: Step) -> None:
        """See `FakeBackend`."""
        text = bytes(token for row in step.rows for token in row.tokens if token < 256)
        self.seen += [name for name in "AB" if name.encode() * 8 in text]
        assert self._may_go.acquire(timeout=10)

    def go(self, n: int = 1) -> None:
        """That many steps."""
        self._may_go.release(n)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_its_prompt_is_computed(stream: bool) -> None:
    """In this order: a prompt of many steps, one done, a second client waits, the first leaves in the middle
    of a step. Nothing more is computed of its prompt; the queue is empty, and the other one runs.
    """
    gate = Gate()
    make = partial(ScriptedChat, says="Hi", threaded=True, n_batch=N_BATCH, before_step=gate.before_step)
    async with serving(make, models={"fake": {"context": {"n_seq_max": 1}}}) as scene:
        replies = []

        async def ask_b() -> None:
            replies.append(await scene.client.post(CHAT, json=chat_body("B" * 100)))

        async with trio.open_nursery() as nursery:
            leaving = httpx.AsyncClient(base_url=scene.url)
            scope = trio.CancelScope()

            async def ask_a() -> None:
                with scope:
                    await leaving.post(CHAT, json=chat_body("A" * 1000, stream=stream))

            nursery.start_soon(ask_a)
            await until(lambda: len(gate.seen) == 1)
            gate.go()
            await until(lambda: len(gate.seen) == 2)
            nursery.start_soon(ask_b)
            await until(lambda: scene.entry().n_waiting == 1)
            scope.cancel()
            await until(lambda: scene.entry().n_waiting == 0)  # the place is B's, the step of A is still held
            assert gate.seen == ["A", "A"]
            gate.go(100)
        await leaving.aclose()
        assert gate.seen.count("A") == 2
        assert "B" in gate.seen
        assert replies[0].status_code == 200
        await scene.wait_idle()
        assert scene.entry().model.queue_depth() == 0
        assert scene.entry().n_running == 0
        assert scene.entry().model.statistics().n_available == 1


class Slow:
    """A client on a socket with small buffers that reads only when told to."""

    def __init__(self) -> None:
        self.n_read = 0
        self._socket = trio.socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    async def ask(self, address: tuple[str, int], body: bytes) -> None:
        """Ask, and read nothing."""
        await self._socket.connect(address)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        await trio.SocketStream(self._socket).send_all(head.encode() + body)

    async def read(self, n: int) -> None:
        """At least `n` bytes."""
        goal = self.n_read + n
        while self.n_read < goal:
            more = await self._socket.recv(n)
            assert more
            self.n_read += len(more)

    def close(self) -> None:
        """Leave."""
        self._socket.close()


@pytest.mark.usefixtures("_small_send_buffers")
async def test_what_slow_clients_do_not_read_is_not_generated() -> None:
    """Of 200 streams at once each is ahead of its reader by its buffer of events and the kernel's of bytes,
    and no more; who reads gets on; when all have left nothing is held.
    """
    made: Counter[tuple[int, int]] = Counter()

    def make() -> ScriptedChat:
        def count(step: Step) -> None:
            made.update((id(made_by), row.slot) for row in step.rows if row.sampler is not None)

        made_by = ScriptedChat(
            says="word " * 2000,
            n_slots=N_STREAMS,
            n_cells=N_STREAMS * 16384,
            threaded=True,
            before_step=count,
        )
        return made_by

    models = {name: {"context": {"n_seq_max": N_STREAMS}} for name in NAMES}
    most = BUFFER + 150  # the kernel takes some tens of events
    engine = erllama.EngineConfig(stream_buffer_events=BUFFER)
    async with serving(make, NAMES, models=models, engine=engine, within_s=60) as scene:
        host, _, port = scene.url.removeprefix("http://").partition(":")
        ask = chat_body(stream=True, max_tokens=9000)
        bodies = [httpx.Request("POST", scene.url, json=ask | {"model": name}).content for name in NAMES]

        async def all_stand() -> None:
            n = -1
            while n < sum(made.values()) or len(made) < len(clients):
                n = sum(made.values())
                await trio.sleep(0.3)

        clients = [Slow() for _ in range(N_STREAMS * len(NAMES))]
        async with trio.open_nursery() as nursery:
            for i, client in enumerate(clients):
                nursery.start_soon(client.ask, (host, int(port)), bodies[i % len(NAMES)])
        await all_stand()
        assert max(made.values()) <= most
        before = min(made.values())
        for client in clients:
            await client.read(8 << 10)
        await all_stand()
        assert min(made.values()) > before
        assert max(made.values()) <= most + (16 << 10) // 100  # an event has more than 100 bytes
        for client in clients:
            client.close()
        for name in NAMES:
            await scene.wait_idle(name)


async def test_nothing_comes_behind_the_last_bytes() -> None:
    """A ping that had to wait while they were taken slowly is not sent."""
    async with serving(partial(ScriptedChat, says="Hi"), limits={"ping_s": 0.05}) as scene:
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            if message.get("more_body") is False:
                await trio.sleep(0.3)

        body = json.dumps(chat_body(stream=True)).encode()
        await make_app(scene.service)(asgi_scope(CHAT), receiver(body), send)
        assert sent[-1]["body"].endswith(b"data: [DONE]\n\n")
