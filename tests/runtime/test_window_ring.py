"""The window cache is a ring of its own, whose cells nobody counts: what happens when it is full."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import trio

import erllama
from erllama import ContextOptions, SavePolicy
from erllama.backend import Step, StepResult, StepStatus

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.model]

POLICY = SavePolicy(min_tokens=16, cold_min_tokens=16, block_tokens=64)
GREEDY = {"max_tokens": 2, "temperature": 0.0}


def prompt(n: int, seed: int = 0) -> list[int]:
    """Tokens of the tiny vocabulary."""
    return [3 + (i * 7 + seed * 11) % 200 for i in range(n)]


async def test_a_shared_head_does_not_fill_the_ring(tiny_gguf: Callable[[str], Path]) -> None:
    """Four requests with one long head run together: nobody is refused or sent away."""
    context = ContextOptions(n_ctx=8192, n_batch=256, n_seq_max=4)
    async with erllama.open_engine() as engine:
        model = await engine.load_model(tiny_gguf("window"), context=context, policy=POLICY)
        head = prompt(1500)
        async with trio.open_nursery() as nursery:
            for i in range(4):
                tail = [20 + i] * 50
                nursery.start_soon(
                    lambda t=tail: model.complete([*head, *t], max_tokens=200, temperature=0.0)
                )
        statistics = model.statistics()
        assert (statistics.n_refused_steps, statistics.n_preempted) == (0, 0)
        assert statistics.n_prefill_tokens < 1500 + 4 * 50 + 2 * 256


async def test_no_room_in_the_ring_is_not_blamed_on_what_is_stored(tiny_gguf: Callable[[str], Path]) -> None:
    """Somebody goes on from a long resident while a stored prompt is restored: nothing is thrown away."""
    context = ContextOptions(n_ctx=8192, n_batch=256, n_seq_max=4)
    async with erllama.open_engine() as engine:
        model = await engine.load_model(tiny_gguf("window"), context=context, policy=POLICY)
        wanted = prompt(640, seed=1)
        await model.complete(wanted, **GREEDY)
        await engine.cache.flush()
        while model.handle.actor._lanes.drop_resident():
            pass
        resident = await model.complete(prompt(720), **GREEDY)
        await engine.cache.flush()
        async with model.stream([*resident.context_tokens, 9], max_tokens=300, temperature=0.0) as events:
            await anext(events)
            answer = await model.complete(wanted, **GREEDY)
        assert answer.stats.n_cached == len(wanted) - 1
        assert sum(engine.cache.counters().damage.values()) == 0


async def test_an_aborted_prefill_costs_the_next_request_nothing(tiny_gguf: Callable[[str], Path]) -> None:
    """Its last ubatches may have recycled cells of its own window: it is not kept where it was."""
    context = ContextOptions(n_ctx=4096, n_batch=1024, n_ubatch=64, n_seq_max=2, prefill_chunk_size=1024)
    async with erllama.open_engine() as engine:
        model = await engine.load_model(tiny_gguf("window"), context=context, policy=POLICY)
        backend = model.handle.backend
        compute, n_steps = backend.step, 0

        def step(planned: Step) -> StepResult:
            nonlocal n_steps
            n_steps += 1
            result = compute(planned)
            if n_steps != 2:
                return result
            time.sleep(0.2)  # until its reader is gone
            return StepResult(status=StepStatus.ABORTED, rc=2)

        model.handle.actor._thread._backend.step = step
        with trio.move_on_after(0.1):
            await model.complete(prompt(3000), **GREEDY)
        assert (await model.complete(prompt(100, seed=3), **GREEDY)).finish_reason == "length"
        assert model.statistics().n_rebuilt == 0


async def test_windows_that_do_not_fit_end_nobody(tiny_gguf: Callable[[str], Path]) -> None:
    """More requests with one head than the ring has windows for: none fails, each answers as if alone."""
    context = ContextOptions(n_ctx=512, n_batch=128, n_seq_max=16, n_threads=1)
    prompts = [[*prompt(200), 20 + i, 21 + i] for i in range(16)]
    async with erllama.open_engine() as engine:
        model = await engine.load_model(tiny_gguf("window"), context=context, policy=POLICY)
        alone = [await model.complete(p, **GREEDY, cache="off", logprobs=1) for p in prompts]
        together: dict[int, erllama.Completion] = {}

        async def ask(i: int) -> None:
            together[i] = await model.complete(prompts[i], **GREEDY, logprobs=1)

        for _ in range(2):  # the second time without sharing
            async with trio.open_nursery() as nursery:
                for i in range(len(prompts)):
                    nursery.start_soon(ask, i)
            for i, expected in enumerate(alone):
                assert together[i].logprobs[0].logprob == pytest.approx(
                    expected.logprobs[0].logprob, abs=0.02
                )
                assert together[i].generated[0] == expected.generated[0]
        assert model.statistics().n_rebuilt == 1
