"""What prefill costs is measured while answering, and decides whose KV leaves first."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

import erllama
from erllama import SavePolicy
from erllama.testing import FakeBackend

if TYPE_CHECKING:
    from erllama import Engine
    from erllama.backend import BackendFacts, Step, StepResult

POLICY = SavePolicy(min_tokens=64, cold_min_tokens=64, block_tokens=256)
N = 3000
PROMPT = [(i * 7919 + i // 251) % 256 for i in range(N)]


@dataclass
class Timed(FakeBackend):
    """A model of its own that says it takes so long per token."""

    token_s: float = 0.001

    def open(self) -> BackendFacts:
        return dataclasses.replace(super().open(), shape_hash=f"{self.token_s}".encode())

    def step(self, step: Step) -> StepResult:
        return dataclasses.replace(super().step(step), compute_s=step.n_tokens * self.token_s)


async def keep(engine: Engine, token_s: float) -> tuple[erllama.Model, set[str]]:
    """A model that has read the prompt; the names of what is kept of it."""
    before = {node["name"] for node in engine.cache.dump()}
    model = await engine.load_model(backend=Timed(token_s=token_s), policy=POLICY)
    await model.complete(PROMPT, max_tokens=1)
    await engine.cache.flush()
    return model, {node["name"] for node in engine.cache.dump()} - before


@pytest.mark.parametrize("costs", [(0.02, 0.001), (0.001, 0.02)])
async def test_the_kv_of_the_quick_model_goes_first(costs: tuple[float, float]) -> None:
    """Equal bytes, equally used, in one store: what takes twenty times as long to compute again stays."""
    async with erllama.open_engine() as engine:
        kept = {token_s: (await keep(engine, token_s))[1] for token_s in costs}
        n_bytes = sum(part["bytes"] for node in engine.cache.dump() for part in node["parts"].values())
        await engine.cache.evict_bytes(n_bytes // 3)
        left = {node["name"] for node in engine.cache.dump()}
        assert left >= kept[0.02]
        assert 0 < len(left & kept[0.001]) < len(kept[0.001])


async def test_the_seconds_saved_are_those_that_were_measured() -> None:
    """A hit of n tokens saves n times what a token took."""
    async with erllama.open_engine() as engine:
        model, _ = await keep(engine, 0.25)
        await model.complete([1] * 70, max_tokens=1, cache="off")  # nothing of it stays in live cells
        before = engine.cache.counters()
        answer = await model.complete(PROMPT, max_tokens=1)
        after = engine.cache.counters()
    assert answer.cache_delta.read == N - 1
    matched = after.tokens_matched - before.tokens_matched
    assert matched >= N - 1
    assert after.prefill_saved_s - before.prefill_saved_s == pytest.approx(0.25 * matched)
