"""A served model for tests of the engine: open it, ask it, look whether anything is left."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import trio
import trio.testing

from erllama.engine.handle import Handle
from erllama.engine.request import EventStream, open_stream
from erllama.options import ContextOptions, GenerationOptions
from erllama.testing import FakeBackend
from erllama.types import Done

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from erllama.types import Completion


class Bench:
    """A handle whose actor runs, and the fake behind it."""

    def __init__(self, handle: Handle, backend: FakeBackend) -> None:
        self.handle = handle
        self.backend = backend
        self.actor = handle.actor

    def stream(
        self, prompt: str | list[int], *, buffer_events: int = 256, **generation: object
    ) -> AbstractAsyncContextManager[EventStream]:
        """Events of one request; text is its own bytes."""
        ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        return open_stream(self.handle, ids, GenerationOptions(**generation), buffer_events)

    async def complete(self, prompt: str | list[int], **generation: object) -> Completion:
        """The answer to one request."""
        async with self.stream(prompt, **generation) as events:
            return await last(events)

    async def complete_all(
        self, prompts: list[str] | list[list[int]], **generation: object
    ) -> list[Completion]:
        """Answers to requests made at the same moment, arriving in order of `prompts`."""
        answers: dict[int, Completion] = {}

        async def read(i: int, events: EventStream) -> None:
            answers[i] = await last(events)

        async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
            for i, prompt in enumerate(prompts):
                nursery.start_soon(
                    read, i, await stack.enter_async_context(self.stream(prompt, **generation))
                )
        return [answers[i] for i in range(len(prompts))]

    async def wait_idle(self) -> None:
        """Let the actor sweep, then assert that no slot, sampler or sequence is left.

        A task whose step runs in a thread is blocked too: such a step gets some time to end.
        """
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(2000):
            if not self.actor.n_requests:
                break
            await trio.sleep(0.01)
        s = self.actor.statistics()
        assert (s.n_waiting, s.n_prefilling, s.n_decoding) == (0, 0, 0)
        assert s.n_available + s.n_pinned_idle == s.n_slots
        assert self.actor.sequences() == []
        assert self.backend.live_samplers == set()

    @property
    def rows_per_step(self) -> list[int]:
        """How many sequences each step so far held."""
        return [len(step.rows) for step in self.backend.steps]


async def last(events: EventStream) -> Completion:
    """Read a stream to its Done."""
    async for event in events:
        if isinstance(event, Done):
            return event.completion
    raise AssertionError("a stream ended without Done")


@asynccontextmanager
async def serving(backend: FakeBackend | None = None, **context: object) -> AsyncIterator[Bench]:
    """A model served for the block; who hangs fails, after so long that a busy machine does not."""
    backend = backend or FakeBackend()
    handle = await Handle.open("fake", backend, ContextOptions(**context).resolved(), None)
    with trio.fail_after(240):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(handle.serve)
            try:
                yield Bench(handle, backend)
            finally:
                handle.stop()


async def alone(prompts: list[str], **generation: object) -> list[Completion]:
    """Each prompt answered by a model that has nothing else to do."""
    answers = []
    for prompt in prompts:
        async with serving() as bench:
            answers.append(await bench.complete(prompt, **generation))
    return answers


def ids_of(answers: list[Completion]) -> list[list[int]]:
    """What was generated."""
    return [answer.generated for answer in answers]
