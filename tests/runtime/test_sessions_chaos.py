"""Sessions whose turns come, go on, diverge, are cancelled, ended and reset in random order."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import trio
import trio.testing

import erllama
from erllama import ContextOptions, SavePolicy
from erllama.testing import FakeBackend

from .scenes import loaded, wait_idle
from .test_warm_chaos import inline_files, nothing_is_left
from .watched import Moody, Watched

__all__ = ["inline_files"]  # a fixture of the neighbour's
N_SESSIONS, N_SLOTS, N_TURNS = 8, 4, 30


class Talk:
    """One client that owns a session and checks what it is told about it."""

    def __init__(self, model: erllama.Model, name: int, coin: random.Random) -> None:
        self.model, self.name, self.coin = model, name, coin
        self.transcript: list[int] = []
        self.key: bytes | None = None
        self.outcomes: Counter[str] = Counter()
        self.answers: list[tuple[list[int], list[int], int, int]] = []

    async def run(self) -> None:
        """All its turns."""
        for _ in range(N_TURNS):
            await trio.sleep(self.coin.uniform(0, 0.5))
            try:
                await self.turn()
            except erllama.ErllamaError as error:
                self.outcomes[error.reason] += 1
            if len(self.transcript) > 200:
                self.transcript = []

    async def turn(self) -> None:
        """One of the things a client does."""
        coin, model = self.coin, self.model
        tail = [coin.randrange(250) for _ in range(coin.randint(1, 20))]
        seed, n = coin.randrange(1000), coin.randint(1, 12)
        options = {"seed": seed, "max_tokens": n, "session_id": self.name}
        options["prefix_checkpoint_len"] = coin.choice([None, None, 5, 30])
        keyed = {"parent_key": coin.choice([None, self.key])}
        match coin.choices(["whole", "tail", "other", "prefill", "end", "reset"], [8, 8, 3, 2, 1, 1])[0]:
            case "whole":
                await self.ask(model.stream([*self.transcript, *tail], **keyed, **options), seed, n)
            case "tail":
                expected = coin.choice([None, self.transcript])
                stream = model.continue_stream(tail, expect_committed=expected, **options)
                await self.ask(stream, seed, n, after=self.transcript if expected is not None else None)
            case "other":
                await self.ask(model.stream([self.name, *tail], **options), seed, n)
            case "prefill":
                done = await model.prefill_only([*self.transcript, *tail], session_id=self.name, **keyed)
                self.outcomes[f"prefill {done.cache_hit_kind}"] += 1
                self.transcript = done.context_tokens
            case "end":
                await model.end_session(self.name)
            case "reset":
                await model.reset_session(self.name)

    async def ask(self, stream: object, seed: int, n: int, after: list[int] | None = None) -> None:
        """Read an answer, or leave in the middle."""
        patience = self.coin.choice([0.05, 0.3, 1000, 1000, 1000])
        with trio.move_on_after(patience):
            async with stream as events:
                if self.coin.random() < 0.1:
                    events.cancel()
                answer = await erllama.collect(events)
                self.outcomes[answer.cache_hit_kind] += 1
                self.transcript, self.key = answer.context_tokens, answer.finish_key
                prompt = answer.context_tokens[: answer.stats.n_prompt]
                assert after is None or prompt[: len(after)] == after
                if answer.finish_reason == "length":
                    self.answers.append((prompt, answer.generated, seed, n))
                assert answer.stats.n_cached < answer.stats.n_prompt


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scene", ["roomy", "moody", "crowded", "tiny RAM"])
@pytest.mark.usefixtures("inline_files")
async def test_no_answer_is_wrong_and_no_slot_is_lost(autojump_clock: object, scene: str, seed: int) -> None:
    """S1-S13: an answer is the one its transcript gets alone, whatever was held, taken back or saved."""
    coin = random.Random(f"{scene} {seed}")
    shape = {"n_slots": N_SLOTS, "n_cells": 5000 if scene == "roomy" else 500, "n_ctx": 300}
    backend = (Moody if scene == "moody" else Watched)(
        *([coin] if scene == "moody" else []), step_delay_s=0.01, **shape
    )
    policy = SavePolicy(min_tokens=8, cold_min_tokens=8, block_tokens=16)
    ram = 60_000 if scene == "tiny RAM" else 1 << 24
    async with erllama.open_engine(ram_max_bytes=ram) as engine:
        model = await engine.load_model(backend=backend, policy=policy, context=ContextOptions(n_ctx=300))
        backend.actor = model.handle.actor
        talks = [Talk(model, i, coin) for i in range(N_SESSIONS)]
        with trio.fail_after(500):
            async with trio.open_nursery() as nursery:
                for talk in talks:
                    nursery.start_soon(talk.run)
            await trio.sleep(1)
        await nothing_is_left(engine, model, backend)
        for i in range(N_SESSIONS):
            await model.end_session(i)
        await wait_idle(model)
        assert model.info().available_seqs == N_SLOTS
    outcomes = sum((talk.outcomes for talk in talks), Counter())
    assert {"sticky", "continuation", "partial", "no_session"} <= set(outcomes)
    async with loaded(FakeBackend(n_ctx=300)) as calm:
        for prompt, generated, drawn, n in (answer for talk in talks for answer in talk.answers):
            alone = await calm.complete(prompt, max_tokens=n, seed=drawn, cache="off")
            assert alone.generated == generated
