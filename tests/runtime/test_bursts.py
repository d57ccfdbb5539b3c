"""Steps that follow each other on real models: the same bits, the same saves, memory one can go on from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from erllama import Done, SavePolicy, TokenId
from erllama.engine import actor as actor_module

from .kind_scenes import BLOCK, GREEDY, KINDS, agree, bits, kept, some_tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.model

EVERY_KIND = (*KINDS, "hybrid_window")
# Also what is generated is saved, every two blocks.
POLICY = SavePolicy(min_tokens=16, cold_min_tokens=16, block_tokens=BLOCK, continued_interval=2 * BLOCK)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY_KIND)
async def test_same_bits_and_same_saves(
    monkeypatch: pytest.MonkeyPatch, tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """An answer that passes several blocks: each token with its log-probabilities, each saved node."""

    async def told() -> tuple[list[Any], list[dict[str, Any]]]:
        async with kept(tiny_gguf(kind), "ram", tmp_path, policy=POLICY) as scene:
            answers = [
                await scene.model.complete(some_tokens(100), **{**GREEDY, "max_tokens": 250}),
                await scene.model.complete(some_tokens(70, 1), max_tokens=90, seed=3, logprobs=2),
            ]
            await scene.engine.cache.flush()
            return [bits(answer) for answer in answers], list(scene.engine.cache.dump())

    ahead = await told()
    monkeypatch.setattr(actor_module, "n_steps", lambda *_: 1)
    one_by_one = await told()
    assert ahead == one_by_one
    assert len(ahead[1]) >= 5
    assert any(node["reason"] == "continued" for node in ahead[1])


@pytest.mark.parametrize("kind", EVERY_KIND)
async def test_a_session_goes_on_from_a_cancelled_answer(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """Cancelled at any moment of a burst, memory holds what was delivered and nothing else."""
    async with kept(tiny_gguf(kind), "ram", tmp_path, reference=True) as scene:
        for n in (2, 9, 33, 50):
            session, ids = f"s{n}", list[int]()
            async with scene.model.stream(
                some_tokens(40, n), session_id=session, **{**GREEDY, "max_tokens": 200}
            ) as events:
                async for event in events:
                    if isinstance(event, TokenId):
                        ids.append(event.id)
                        if len(ids) == n:
                            events.cancel()
                    elif isinstance(event, Done):
                        answer = event.completion
            assert answer.finish_reason == "cancelled"
            assert answer.generated == ids
            tail = some_tokens(5, 90 + n)
            again = await scene.model.continue_(tail, session_id=session, **GREEDY)
            assert again.stats.n_cached >= len(answer.context_tokens) - 1
            assert agree(again, await scene.uninterrupted([*answer.context_tokens, *tail]))
            await scene.model.end_session(session)
