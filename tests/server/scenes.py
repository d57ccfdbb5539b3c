"""Servers for tests: one with arithmetic or scripted models in this process, on a real socket."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import trio
from runtime.chat_scenes import ScriptedChat

import erllama
from erllama.server.app import make_app
from erllama.server.listener import listen
from erllama.server.metrics import Metrics
from erllama.server.pool import Pool
from erllama.server.registry import ConfiguredModels
from erllama.server.service import Service
from erllama.server.serving import listener_config, with_signing_key
from erllama.server.settings import make_settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from erllama.testing import FakeBackend


@dataclass
class Scene:
    """A running server, its inside, and a client."""

    service: Service
    client: httpx.AsyncClient
    backends: dict[str, FakeBackend]
    url: str
    loads: list[str] = field(default_factory=list)
    hold_load: trio.Event | None = None  # set: loads wait for it

    @property
    def pool(self) -> Pool:
        """The server's."""
        return self.service.pool

    def entry(self, name: str = "fake") -> Any:
        """The pool's entry of a model."""
        return next(e for e in self.pool.all_entries() if e.spec.name == name)

    async def wait_idle(self, name: str = "fake") -> None:
        """Until no request is in the engine or the queue of the model; fails after a minute."""
        entry = self.entry(name)
        await until(lambda: not entry.n_inside and not entry.model.queue_depth())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that nobody tells; fails after a minute."""
    with trio.fail_after(60):
        while True:
            if condition():
                return
            await trio.sleep(0.005)


@asynccontextmanager
async def serving(
    make: Callable[[], FakeBackend] = ScriptedChat,
    names: tuple[str, ...] = ("fake",),
    *,
    within_s: float = 120,
    engine: erllama.EngineConfig | None = None,
    **settings: Any,
) -> AsyncIterator[Scene]:
    """A server whose models are made by `make`, one for each name; its settings as in the file.

    The block has `within_s`.
    """
    tables = settings.pop("models", {})
    values = {
        "listen": {"port": 0},
        "models": {name: {"path": f"{name}.gguf", **tables.get(name, {})} for name in names},
        **settings,
    }
    checked = make_settings(values)
    metrics = Metrics()
    scene: Scene

    config = with_signing_key(engine or erllama.EngineConfig(), checked)
    async with erllama.open_engine(config) as opened, trio.open_nursery() as nursery:

        async def load(spec: Any, progress: Callable[[float], None]) -> erllama.Model:
            scene.loads.append(spec.name)
            progress(0.5)
            if scene.hold_load is not None:
                await scene.hold_load.wait()
            backend = scene.backends[spec.name] = make()
            return await opened.load_model(backend=backend, model_id=spec.name)

        pool = Pool(checked, ConfiguredModels(checked), load)
        metrics.watch(pool)
        metrics.watch_cache(opened.cache)
        service = Service(checked, pool, metrics)
        await nursery.start(pool.run)
        app, config = make_app(service), listener_config(checked)

        (url,) = await nursery.start(partial(listen, app, config, stop=trio.sleep_forever))
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            scene = Scene(service, client, {}, url)
            with trio.fail_after(within_s):
                yield scene
        nursery.cancel_scope.cancel()


def chat_body(text: str = "Hello", **more: Any) -> dict[str, Any]:
    """A small chat request."""
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **more}


def sse_events(text: str) -> list[str]:
    """The data of each server-sent event."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def asgi_scope(path: str) -> dict[str, Any]:
    """A POST without a socket."""
    return {
        "type": "http",
        "asgi": {"spec_version": "2.1", "version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
        "extensions": {},
    }


def receiver(body: bytes) -> Callable[[], Any]:
    """Gives the body, and then waits for a disconnect that does not come."""
    left = [body]

    async def receive() -> dict[str, Any]:
        if not left:
            await trio.sleep_forever()
        return {"type": "http.request", "body": left.pop(), "more_body": False}

    return receive
