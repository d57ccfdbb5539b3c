"""Requests by the hundred that end in every way there is, in random order: every gauge comes back (R7)."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
import trio

import erllama
from erllama.backend import MemoryKind, Step, StepResult, StepStatus
from erllama.engine.actor import UNASKED_ABORTS
from erllama.testing import FakeBackend

from .scenes import loaded, wait_idle


class Moody(FakeBackend):
    """Refuses, aborts, times out and fails now and then, by a seeded coin.

    The context is lost `n_losses` times at most.
    """

    def __init__(self, coin: random.Random, n_losses: int = 1000, **settings: object) -> None:
        super().__init__(**settings)
        self._coin = coin
        self._losses_left = n_losses
        self._n_aborts = 0  # in a row; as many as the engine takes for a loss are one
        self.before_step = self._decide

    def _decide(self, step: Step) -> StepResult | None:
        mood = self._coin.random()
        if mood < 0.05 and len(step.rows) > 1:
            return StepResult(status=StepStatus.NO_ROOM, rc=1)
        if mood < 0.07 and self._n_aborts < UNASKED_ABORTS - 1:
            self._n_aborts += 1
            for row in step.rows[: self._coin.randint(0, len(step.rows))]:
                self._remember(row)
            return StepResult(status=StepStatus.ABORTED, rc=2)
        self._n_aborts = 0
        if 0.07 <= mood < 0.076 and self._losses_left:
            self._losses_left -= 1
            if mood < 0.073:
                return StepResult(status=StepStatus.TIMEOUT)
            raise erllama.NativeError("now and then")
        return None


@pytest.mark.parametrize("kind", [MemoryKind.DENSE, MemoryKind.HYBRID])
@pytest.mark.parametrize("seed", [1, 2])
async def test_nothing_leaks_and_no_answer_is_wrong(autojump_clock, seed: int, kind: MemoryKind):
    """Whatever happened around it, an answer that came is the one its request gets alone."""
    coin = random.Random(seed)
    shape = {"n_slots": 5, "n_cells": 900, "n_ctx": 300, "memory_kind": kind}
    backend = Moody(coin, step_delay_s=0.01, **shape)
    outcomes = await _storm(backend, [Ask.drawn(coin, i) for i in range(250)], seconds=20)
    assert {"length", "cancelled", "seq_capacity"} <= set(outcomes)
    assert {"decode_timeout", "exception"} & set(outcomes)
    assert backend.n_rebuilt >= 1
    assert min(outcomes["aborted step"], outcomes["preempted"]) >= 1


@pytest.mark.parametrize("kind", [MemoryKind.DENSE, MemoryKind.WINDOW, MemoryKind.HYBRID])
async def test_nothing_leaks_and_no_answer_is_wrong_on_threads(kind: MemoryKind):
    """The same on a thread that runs ahead, where chance decides who comes when.

    How many come through is no chance: who has all the time there is ends with a whole answer, unless it
    was in memory when the context was lost.
    """
    n_slots, n_losses = 5, 2
    shape = {"n_slots": n_slots, "n_cells": 900, "n_ctx": 300, "memory_kind": kind}
    backend = Moody(random.Random(3), n_losses, step_delay_s=0.0005, threaded=True, **shape)
    asks = [Ask.drawn(random.Random(3 + i), i) for i in range(80)]
    n_patient = sum(ask.patience is None and not ask.cancels and ask.on_full == "block" for ask in asks)
    outcomes = await _storm(backend, asks, seconds=0.6)
    assert n_patient - n_slots * n_losses >= 5
    assert outcomes["length"] >= n_patient - n_slots * n_losses, outcomes


@dataclass(frozen=True)
class Ask:
    """One request. `comes` and `patience` are shares of the storm's time; None: it waits for its answer."""

    i: int
    n_prompt: int
    n: int
    comes: float
    patience: float | None
    on_full: str
    cancels: bool

    @classmethod
    def drawn(cls, coin: random.Random, i: int) -> Ask:
        """Some request."""
        return cls(
            i=i,
            n_prompt=coin.randint(1, 250),
            n=coin.randint(1, 40),
            comes=coin.random(),
            patience=coin.choice([0.0025, 0.025, None]),
            on_full=coin.choice(["block", "block", "block", "error"]),
            cancels=coin.random() < 0.1,
        )


async def _storm(backend: Moody, asks: list[Ask], *, seconds: float) -> Counter[str]:
    """How the requests ended, and how often steps and sequences were broken off; answers were right."""
    outcomes: Counter[str] = Counter()
    answers: dict[Ask, list[int]] = {}

    async def client(model: erllama.Model, ask: Ask) -> None:
        await trio.sleep(ask.comes * seconds)
        with trio.move_on_after(math.inf if ask.patience is None else ask.patience * seconds):
            try:
                async with model.stream(
                    [ask.i % 200] * ask.n_prompt, max_tokens=ask.n, seed=ask.i, on_full=ask.on_full
                ) as events:
                    if ask.cancels:
                        events.cancel()
                    answer = await erllama.collect(events)
                    outcomes[answer.finish_reason] += 1
                    if answer.finish_reason == "length":
                        answers[ask] = answer.generated
            except erllama.ErllamaError as error:
                outcomes[error.reason] += 1

    async with loaded(backend) as model:
        async with trio.open_nursery() as nursery:
            for ask in asks:
                nursery.start_soon(client, model, ask)
        await wait_idle(model)
        assert backend.live_samplers == set()
        outcomes["aborted step"] = model.statistics().n_aborted_steps
        outcomes["preempted"] = model.statistics().n_preempted
        backend.before_step = None
        assert (await model.complete("after all", seed=1)).stats.n_generated == 64
        assert model.statistics().n_rebuilt == backend.n_rebuilt  # only now: who was lost did not wait for it
    async with loaded(FakeBackend(n_ctx=300)) as calm:
        for ask, generated in answers.items():
            alone = await calm.complete([ask.i % 200] * ask.n_prompt, max_tokens=ask.n, seed=ask.i)
            assert alone.generated == generated, ask
    return outcomes
