"""What the cache is for, in counts: tokens computed, bytes written, nodes kept (P3-P8, P15, P16, X1)."""

from __future__ import annotations

from contextlib import asynccontextmanager
from itertools import chain
from typing import TYPE_CHECKING

import pytest
import trio

import erllama
from erllama import DiskTier, SavePolicy
from erllama.testing import FakeBackend

from .scenes import wait_idle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

POLICY = SavePolicy(min_tokens=64, cold_min_tokens=64)
TOKEN_BYTES = 8  # the fake's KV


@asynccontextmanager
async def served(
    backend: FakeBackend | None = None, policy: SavePolicy = POLICY, tier: str = "ram", **config: object
) -> AsyncIterator[tuple[erllama.Engine, erllama.Model]]:
    """An engine with a fake on it."""
    backend = backend or FakeBackend(n_ctx=8192)
    with trio.fail_after(240):
        async with erllama.open_engine(**config) as engine:
            model = await engine.load_model(backend=backend, model_id="fake", policy=policy, tier=tier)
            yield engine, model
            await engine.cache.flush()
            await wait_idle(model)
            assert await engine.cache.check() == []
            assert engine.cache.counters().leases == 0


def text(n: int, seed: int) -> list[int]:
    """That many tokens, different for each seed from the first one on."""
    return [33 + (i * i * 7 + i * seed + seed) % 90 for i in range(n)]


async def test_a_growing_chat_writes_its_new_tokens_only(tmp_path: Path) -> None:
    """P5: 20 turns to 6,000 tokens; bytes written per turn at most 1.1 times the new tokens' KV."""
    async with served(tier="kv", tiers=[DiskTier("kv", str(tmp_path))]) as (engine, model):
        history: list[int] = []
        for turn in range(20):
            before = engine.cache.counters().bytes_written.get("kv", 0)
            computed = model.statistics().n_prefill_tokens
            history += text(240, turn + 1)
            answer = await model.complete(history, max_tokens=60, temperature=0.0)
            await engine.cache.flush()
            n_new = 240 + 60
            assert engine.cache.counters().bytes_written["kv"] - before <= 1.1 * n_new * TOKEN_BYTES
            assert model.statistics().n_prefill_tokens - computed <= 240
            assert answer.stats.n_cached >= len(history) - 241
            history = answer.context_tokens
        assert len(history) == 6000
        total = sum(node["n_tokens"] for node in engine.cache.dump())
        assert total == 6000 - 1  # the pending token
        assert engine.cache.counters().bytes_written["kv"] == total * TOKEN_BYTES


async def test_a_conversation_edited_in_the_middle_computes_the_changed_tail() -> None:
    """P7: turn 5 of 10 changed, live and from RAM."""
    async with served() as (_, model):
        turns = [text(200, i + 1) for i in range(10)]
        await model.complete(list(chain(*turns)), max_tokens=1)
        for live in (True, False):
            if not live:
                await model.complete(text(100, 99), max_tokens=1)
            edited = [*turns[:4], text(150, 50 + live), *turns[5:]]
            before = model.statistics().n_prefill_tokens
            await model.complete(list(chain(*edited)), max_tokens=1)
            assert model.statistics().n_prefill_tokens - before <= 150 + 5 * 200 + 1


async def test_a_change_near_the_end_costs_what_is_behind_it() -> None:
    """A 2,000-token prompt with token 1,950 changed computes 50, live or stored: no stride."""
    async with served() as (_, model):
        prompt = text(2000, 1)
        await model.complete(prompt, max_tokens=1)
        for live in (True, False):
            if not live:
                await model.complete(text(100, 99), max_tokens=1)
            before = model.statistics().n_prefill_tokens
            await model.complete([*prompt[:1950], 32 - live, *prompt[1951:]], max_tokens=1)
            assert model.statistics().n_prefill_tokens - before == 49


async def test_a_new_chat_with_a_stored_head_and_back_again() -> None:
    """P15 and P16: a 1,000-token head of a 5,500-token chat after two other prompts; then the chat + 20."""
    async with served() as (_, model):
        chat = text(5500, 1)
        await model.complete(chat, max_tokens=1)
        for other in (2, 3):
            await model.complete(text(1200, other), max_tokens=1)
        before = model.statistics().n_prefill_tokens
        await model.complete([*chat[:1000], *text(200, 7)], max_tokens=1)
        middle = model.statistics().n_prefill_tokens
        await model.complete([*chat, *text(20, 8)], max_tokens=1)
        assert middle - before <= 240
        assert model.statistics().n_prefill_tokens - middle <= 84


async def test_agents_with_one_head_in_few_cells_compute_it_once() -> None:
    """P6, X10: eight agents with a 2,000-token head in 4,096 cells, arriving together."""
    backend = FakeBackend(n_ctx=4096, n_cells=4096, n_slots=8)
    async with served(backend) as (_, model):
        head = text(2000, 1)

        async def ask(i: int) -> None:
            await model.complete([*head, *text(100, i + 2)], max_tokens=20)

        async with trio.open_nursery() as nursery:
            for i in range(8):
                nursery.start_soon(ask, i)
        s = model.statistics()
        assert s.n_prefill_tokens <= 2000 + 8 * 100
        assert s.n_preempted == s.n_refused_steps == 0


async def test_nobody_gets_an_error_because_the_cache_is_full() -> None:
    """X10: four times 100 + 200 tokens in 512 cells; all finish, each as it does alone."""
    backend = FakeBackend(n_ctx=512, n_cells=512, n_slots=4)
    prompts = [text(100, i + 1) for i in range(4)]
    answers: dict[int, erllama.Completion] = {}
    async with served(backend) as (_, model):

        async def ask(i: int) -> None:
            answers[i] = await model.complete(prompts[i], max_tokens=200, seed=i)

        async with trio.open_nursery() as nursery:
            for i in range(4):
                nursery.start_soon(ask, i)
        assert model.statistics().n_preempted >= 1
        assert model.statistics().n_prefill_tokens < 2 * 4 * 300
    async with served(FakeBackend(n_ctx=512)) as (_, calm):
        for i, answer in answers.items():
            alone = await calm.complete(prompts[i], max_tokens=200, seed=i)
            assert (answer.finish_reason, answer.generated) == ("length", alone.generated)


@pytest.mark.parametrize("tier", ["ram", "kv"])
async def test_the_shared_head_outlives_six_conversations(tmp_path: Path, tier: str) -> None:
    """Room for three of six conversations with one head: the head stays, and churn is bounded."""
    policy = SavePolicy(min_tokens=64, cold_min_tokens=64, block_tokens=512)
    n_head, n_own = 512, 1536
    node_bytes = 512 * TOKEN_BYTES + 2800  # with its file's head
    budget = 13 * node_bytes
    config = {"tiers": [DiskTier("kv", str(tmp_path), max_bytes=budget)]} if tier == "kv" else {}
    if tier == "ram":
        config["ram_max_bytes"] = 13 * (512 * TOKEN_BYTES) + 40_000
    async with served(policy=policy, tier=tier, **config) as (engine, model):
        head = text(n_head, 1)
        rounds: list[list[int]] = []
        for _ in range(2):
            rounds.append([])
            for i in range(6):
                await model.complete(text(70, 99), max_tokens=1, cache="off")  # takes the only slot
                before = model.statistics().n_prefill_tokens
                await model.complete([*head, *text(n_own, i + 2)], max_tokens=1)
                rounds[-1].append(model.statistics().n_prefill_tokens - before)
                await engine.cache.flush()
        assert rounds[0][0] == n_head + n_own - 1
        assert all(n <= n_own for n in [*rounds[0][1:], *rounds[1]])
        assert any(node["start"] == 0 and node["n_tokens"] == n_head for node in engine.cache.dump())
        counters = engine.cache.counters()
        assert sum(counters.saves.values()) <= 1 + 2 * 6 * 3
        if tier == "kv":
            assert counters.bytes_written["kv"] <= 3 * budget


async def test_a_long_conversation_in_a_small_store_does_not_churn() -> None:
    """A history four times as long as RAM, turn after turn: writes stay below twice its length."""
    async with served(ram_max_bytes=8 * 2048 + 60_000, policy=POLICY) as (engine, model):
        history: list[int] = []
        for turn in range(30):
            history += text(200, turn + 1)
            await model.complete(history, max_tokens=1)
        await engine.cache.flush()
        n_saved = sum(engine.cache.counters().saves.values())
        assert n_saved <= 2 * (len(history) // 256 + 30)


async def test_fifty_chats_store_their_head_once() -> None:
    """X1: the store grows by what is new."""
    async with served() as (engine, model):
        head = text(1000, 1)
        for i in range(50):
            await model.complete([*head, *text(30, i + 2)], max_tokens=1)
        await engine.cache.flush()
        assert sum(node["n_tokens"] for node in engine.cache.dump()) <= 1000 + 50 * (30 + 1000 % 256)
        assert model.statistics().n_prefill_tokens <= 1000 + 50 * 31
