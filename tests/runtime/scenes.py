"""An engine with one arithmetic model, for tests of what users call."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio
import trio.testing

import erllama
from erllama.testing import FakeBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from erllama import Engine, Event, Model


HANGS_S = 240


@asynccontextmanager
async def loaded(backend: FakeBackend | None = None, **config: object) -> AsyncIterator[Model]:
    """A model on an engine, for the block; who hangs fails, after so long that a busy machine does not."""
    with trio.fail_after(HANGS_S):
        async with erllama.open_engine(**config) as engine:
            yield await load(engine, backend)


async def load(engine: Engine, backend: FakeBackend | None = None, model_id: str = "fake") -> Model:
    """Load an arithmetic model."""
    return await engine.load_model(backend=backend or FakeBackend(), model_id=model_id)


async def events_of(model: Model, prompt: str | list[int], **generation: object) -> list[Event]:
    """Everything a stream delivers."""
    async with model.stream(prompt, **generation) as events:
        return [event async for event in events]


async def wait_idle(model: Model) -> None:
    """Let the actor sweep, then assert that nothing waits or runs.

    A task whose step runs in a thread is blocked too: such a step gets some time to end.
    """
    await trio.testing.wait_all_tasks_blocked()
    for _ in range(2000):
        if not model.queue_depth():
            break
        await trio.sleep(0.01)
    s = model.statistics()
    assert (s.n_waiting, s.n_prefilling, s.n_decoding) == (0, 0, 0)
    assert s.n_available + s.n_pinned_idle == s.n_slots
    assert model.queue_depth() == model.pending_len() == 0
    assert model.phase() == "idle"
