"""The scripted client does what its script says."""

from __future__ import annotations

import trio
import trio.testing

import erllama
from erllama.testing import Cancel, FakeBackend, Leave, Pause, Read, scripted_client


async def test_it_reads_sleeps_and_reads_on(autojump_clock):
    """All events arrive, and the time passed is the time it slept."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(backend=FakeBackend())
        began = trio.current_time()
        log = await scripted_client(model, "hello", [Read(3), Pause(10), Read()], max_tokens=20)
        assert trio.current_time() - began == 10
        assert log.completion is not None
        assert len(log.completion.generated) == 20


async def test_it_cancels_and_leaves():
    """A cancelled stream ends with Done; one that was left has no completion."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(backend=FakeBackend())
        cancelled = await scripted_client(model, "hello", [Read(1), Cancel(), Read()], max_tokens=1000)
        assert cancelled.completion is not None
        assert cancelled.completion.finish_reason == "cancelled"
        left = await scripted_client(model, "hello", [Read(2), Leave(), Read()], max_tokens=1000)
        assert len(left.events) == 2
        assert left.completion is None
        await trio.testing.wait_all_tasks_blocked()
        assert model.info().available_seqs == 1


async def test_errors_end_up_in_the_log():
    """What the stream raises is recorded, not raised."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(backend=FakeBackend(n_ctx=8))
        log = await scripted_client(model, "much too long", [Read()])
        assert isinstance(log.error, erllama.ContextOverflow)
