"""Requests by the hundred that end in every way there is, in random order: every gauge comes back (R7)."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import trio
import trio.testing

import erllama
from erllama.backend import MemoryKind, Step, StepResult, StepStatus
from erllama.testing import FakeBackend

from .scenes import loaded, wait_idle


class Moody(FakeBackend):
    """Refuses, aborts, times out and fails now and then, by a seeded coin."""

    def __init__(self, coin: random.Random, **settings: object) -> None:
        super().__init__(**settings)
        self._coin = coin
        self.before_step = self._decide

    def _decide(self, step: Step) -> StepResult | None:
        mood = self._coin.random()
        if mood < 0.05 and len(step.rows) > 1:
            return StepResult(status=StepStatus.NO_ROOM, rc=1)
        if mood < 0.07:
            for row in step.rows[: self._coin.randint(0, len(step.rows))]:
                self._remember(row)
            return StepResult(status=StepStatus.ABORTED, rc=2)
        if mood < 0.073:
            return StepResult(status=StepStatus.TIMEOUT)
        if mood < 0.076:
            raise erllama.NativeError("now and then")
        return None


@pytest.mark.parametrize("kind", [MemoryKind.DENSE, MemoryKind.HYBRID])
@pytest.mark.parametrize("seed", [1, 2])
async def test_nothing_leaks_and_no_answer_is_wrong(autojump_clock, seed: int, kind: MemoryKind):
    """Whatever happened around it, an answer that came is the one its request gets alone."""
    coin = random.Random(seed)
    shape = {"n_slots": 5, "n_cells": 900, "n_ctx": 300, "memory_kind": kind}
    backend = Moody(coin, step_delay_s=0.01, **shape)
    outcomes = await _storm(coin, backend, n_clients=250, seconds=20)
    assert {"length", "cancelled", "seq_capacity"} <= set(outcomes)
    assert {"decode_timeout", "exception"} & set(outcomes)
    assert backend.n_rebuilt >= 1
    assert min(outcomes["aborted step"], outcomes["preempted"]) >= 1


@pytest.mark.parametrize("kind", [MemoryKind.DENSE, MemoryKind.WINDOW, MemoryKind.HYBRID])
async def test_nothing_leaks_and_no_answer_is_wrong_on_threads(kind: MemoryKind):
    """The same on a thread that runs ahead, where chance decides who comes when."""
    coin = random.Random(3)
    shape = {"n_slots": 5, "n_cells": 900, "n_ctx": 300, "memory_kind": kind}
    backend = Moody(coin, step_delay_s=0.0005, threaded=True, **shape)
    assert (await _storm(coin, backend, n_clients=80, seconds=0.6))["length"] >= 3


async def _storm(coin: random.Random, backend: Moody, *, n_clients: int, seconds: float) -> Counter[str]:
    """How the requests ended, and how often steps and sequences were broken off; answers were right."""
    outcomes: Counter[str] = Counter()
    answers: dict[tuple[int, int, int], list[int]] = {}

    async def client(model: erllama.Model, i: int) -> None:
        what = (coin.randint(1, 250), coin.randint(1, 40), i)
        await trio.sleep(coin.uniform(0, seconds))
        with trio.move_on_after(coin.choice([0.0025, 0.025, 50]) * seconds):
            try:
                async with model.stream(
                    [i % 200] * what[0],
                    max_tokens=what[1],
                    seed=i,
                    on_full=coin.choice(["block", "block", "block", "error"]),
                ) as events:
                    if coin.random() < 0.1:
                        events.cancel()
                    answer = await erllama.collect(events)
                    outcomes[answer.finish_reason] += 1
                    if answer.finish_reason == "length":
                        answers[what] = answer.generated
            except erllama.ErllamaError as error:
                outcomes[error.reason] += 1

    async with loaded(backend) as model:
        with trio.fail_after(50):
            async with trio.open_nursery() as nursery:
                for i in range(n_clients):
                    nursery.start_soon(client, model, i)
        await trio.sleep(0.5)
        await wait_idle(model)
        assert backend.live_samplers == set()
        assert model.statistics().n_rebuilt == backend.n_rebuilt
        outcomes["aborted step"] = model.statistics().n_aborted_steps
        outcomes["preempted"] = model.statistics().n_preempted
        backend.before_step = None
        assert (await model.complete("after all", seed=1)).stats.n_generated == 64
    async with loaded(FakeBackend(n_ctx=300)) as calm:
        for (n_prompt, n, i), generated in answers.items():
            alone = await calm.complete([i % 200] * n_prompt, max_tokens=n, seed=i)
            assert alone.generated == generated
    return outcomes
