"""A prompt that comes back from RAM while another one is computed, on a real model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

import erllama

if TYPE_CHECKING:
    from pathlib import Path

    from erllama.types import Completion

pytestmark = pytest.mark.model


async def test_what_comes_back_does_not_wait_for_who_is_computed(smollm2_path: Path) -> None:
    """X21: thirty blocks, more than the other prompt has steps left: one call a block would come too late."""
    context = erllama.ContextOptions(n_ctx=2048, n_seq_max=2, n_threads=1, prefill_chunk_size=64)
    policy = erllama.SavePolicy(min_tokens=16, cold_min_tokens=16, block_tokens=16)
    warm, other = [1000 + i for i in range(480)], [9000 + i for i in range(900)]
    ended: list[str] = []
    async with erllama.open_engine() as engine:
        model = await engine.load_model(str(smollm2_path), context=context, policy=policy)
        cold = await model.complete(warm, max_tokens=2, temperature=0.0)
        await engine.cache.flush()
        async with trio.open_nursery() as nursery:  # both places are taken by others
            for first in (5, 6):
                ids = [first, *range(2000, 2040)]
                nursery.start_soon(lambda ids=ids: model.complete(ids, max_tokens=4, cache="off"))

        async def ask(name: str, prompt: list[int]) -> Completion:
            answer = await model.complete(prompt, max_tokens=2, temperature=0.0)
            ended.append(name)
            return answer

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "other", other)
            before = model.statistics().n_steps
            while model.statistics().n_steps < before + 2:  # noqa: ASYNC110  # the other one is being computed
                await trio.sleep(0.01)
            again = await ask("warm", warm)
    assert ended == ["warm", "other"]
    assert again.stats.n_computed == 1
    assert again.cache_source == "ram"
    assert again.generated == cold.generated
