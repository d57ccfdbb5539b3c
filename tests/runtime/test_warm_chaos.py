"""Requests by the hundred over one warm cache: whatever happens, an answer is right (X2, X3, X10)."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

import erllama
from erllama import DiskTier, SavePolicy
from erllama.backend import MemoryKind
from erllama.testing import FakeBackend

from .scenes import loaded, wait_idle
from .watched import Moody, Watched

if TYPE_CHECKING:
    from pathlib import Path

POLICY = SavePolicy(min_tokens=16, cold_min_tokens=16, block_tokens=16, continued_interval=16)
BLOCK_BYTES = 4096  # what the arena gives for a block of 16 tokens
HEADS = [[65 + h] * n for h, n in enumerate((40, 100, 163, 16, 1))]


@pytest.fixture
def inline_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """File work in the trio thread: mock clocks and threads do not mix."""

    class Inline:
        def __init__(self, n_threads: int) -> None: ...

        async def __call__(self, fn, *args):
            await trio.lowlevel.checkpoint()
            return fn(*args)

    monkeypatch.setattr("erllama.kvcache.store.ThreadRunner", Inline)


def prompt_of(coin: random.Random) -> list[int]:
    """A head that others have, perhaps a middle that some have, an end of its own."""
    prompt = list(coin.choice(HEADS))
    if coin.random() < 0.5:
        prompt += [coin.randint(97, 99)] * coin.randint(1, 50)
    return prompt + [coin.randint(100, 120) for _ in range(coin.randint(0, 30))]


async def nothing_is_left(engine: erllama.Engine, model: erllama.Model, backend: Watched) -> None:
    """Every gauge is back where it was."""
    await engine.cache.flush()
    await wait_idle(model)
    counters = engine.cache.counters()
    assert (counters.leases, counters.loads_in_flight, counters.writes_queued) == (0, 0, 0)
    actor = model.handle.actor
    lanes = actor._lanes
    assert lanes.reading.total() == 0
    assert lanes._n_reserved == 0
    assert (len(actor._saver._planned), len(actor._saver._names), len(actor._saver._places)) == (0, 0, 0)
    assert backend.live_samplers == set()
    assert await engine.cache.check() == []
    assert counters.arena.used_bytes <= counters.arena.max_bytes
    assert counters.arena.lost == 0
    assert set(lanes._empty).isdisjoint(lanes.residents)
    assert sorted([*lanes._empty, *lanes.residents]) == list(range(lanes.n_slots))


SCENES = {
    "roomy": {"n_cells": 5000, "ram": 1 << 24, "moody": False},
    "few cells": {"n_cells": 420, "ram": 1 << 24, "moody": False},
    "few cells, moody": {"n_cells": 600, "ram": 1 << 24, "moody": True},
    "tiny RAM": {"n_cells": 1000, "ram": 24 * BLOCK_BYTES, "moody": True},
    "no RAM": {"n_cells": 1000, "ram": BLOCK_BYTES // 2, "moody": False},
}


DENSE, OTHERS = MemoryKind.DENSE, (MemoryKind.WINDOW, MemoryKind.HYBRID, MemoryKind.RECURRENT)
CASES = [
    *itertools.product([1, 2], [DENSE], ["roomy", "tiny RAM"], ["disk"]),
    *itertools.product([1, 2], [DENSE], ["few cells", "few cells, moody"], ["ram", "disk"]),
    *itertools.product([1, 2], [DENSE], ["no RAM"], ["ram"]),
    *itertools.product([3], OTHERS, ["roomy", "few cells", "few cells, moody", "tiny RAM"], ["disk"]),
]


@pytest.mark.parametrize(("seed", "kind", "scene", "tier"), CASES)
@pytest.mark.usefixtures("inline_files")
async def test_every_answer_is_the_one_its_request_gets_alone(
    autojump_clock, seed: int, kind: MemoryKind, scene: str, tier: str, tmp_path: Path
):
    """Shared heads, cancellations, preemptions, aborts, refused imports, evictions: never another answer."""
    coin = random.Random(f"{seed} {scene} {tier}")
    settings = SCENES[scene]
    shape = {"n_slots": 5, "n_cells": settings["n_cells"], "n_ctx": 300, "step_delay_s": 0.01}
    shape |= {"memory_kind": kind}
    backend = Moody(coin, **shape) if settings["moody"] else Watched(**shape)
    outcomes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    answers: list[tuple[list[int], dict, erllama.Completion]] = []

    async def client(engine: erllama.Engine, model: erllama.Model, i: int) -> None:
        await trio.sleep(coin.uniform(0, 12))
        if coin.random() < 0.03:
            await engine.cache.evict_bytes(coin.choice([1, 1 << 14, 1 << 30]))
        if coin.random() < 0.01:
            await engine.cache.gc()
        prompt = prompt_of(coin)
        options = {"max_tokens": coin.randint(1, 40), "seed": i, "temperature": coin.choice([0.0, 1.0])}
        cache = coin.choice(["on"] * 8 + ["read", "off"])
        with trio.move_on_after(coin.choice([0.05, 0.5, 1000, 1000, 1000])):
            for _ in range(coin.randint(1, 3)):  # turns
                try:
                    async with model.stream(prompt, cache=cache, **options) as events:
                        if coin.random() < 0.1:
                            events.cancel()
                        if coin.random() < 0.1:
                            await trio.sleep(coin.uniform(1, 6))  # a reader that lags is parked
                        answer = await erllama.collect(events)
                except erllama.ErllamaError as error:
                    outcomes[error.reason] += 1
                    return
                outcomes[answer.finish_reason] += 1
                kinds[answer.cache_hit_kind] += 1
                answers.append((prompt, options, answer))
                prompt = [*answer.context_tokens, coin.randint(65, 90)]
                if len(prompt) > 250 or answer.finish_reason == "cancelled":
                    return

    config = {"ram_max_bytes": settings["ram"], "stream_buffer_events": 16}
    if tier == "disk":
        config["tiers"] = [DiskTier("kv", str(tmp_path), max_bytes=1 << 18)]
    with trio.fail_after(600):
        async with erllama.open_engine(**config) as engine:
            model = await engine.load_model(
                backend=backend, model_id="fake", policy=POLICY, tier="kv" if tier == "disk" else "ram"
            )
            backend.actor = model.handle.actor
            async with trio.open_nursery() as nursery:
                for i in range(120):
                    nursery.start_soon(client, engine, model, i)
            await trio.sleep(1)
            await nothing_is_left(engine, model, backend)
            counters = engine.cache.counters()
            assert backend.n_compared > 50
            if not settings["moody"]:
                assert backend.n_refused == 0
                assert sum(counters.damage.values()) == 0
    assert kinds["partial"] > 10
    assert set(outcomes) <= {
        *("length", "cancelled", "decode_failed", "decode_timeout", "decode_aborted", "exception")
    }, outcomes
    async with loaded(FakeBackend(n_ctx=300, memory_kind=kind)) as calm:
        for prompt, options, answer in answers:
            if answer.finish_reason == "length":
                alone = await calm.complete(prompt, **options)
                assert alone.generated == answer.generated
                assert answer.cache_delta.read == answer.stats.n_cached < len(prompt)
                if not counters.evictions and not settings["moody"]:  # else blocks are stored again
                    assert answer.cache_delta.created <= len(answer.context_tokens)
