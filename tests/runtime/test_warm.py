"""The cache on a real model: whatever was computed is not computed again, and the answer does not change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

import erllama
from erllama import ContextOptions, DiskTier, RamFileTier, SavePolicy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from erllama.runtime.engine import EngineOverrides

pytestmark = [pytest.mark.model, pytest.mark.slow]

POLICY = SavePolicy(min_tokens=64, cold_min_tokens=64, block_tokens=64)
LONG = " ".join(f"Item {i} costs {i * 7919 % 1000} coins." for i in range(40))  # about 400 tokens
OTHER = "Completely different words about the sea and its ships. " * 12
GREEDY = {"max_tokens": 8, "temperature": 0.0, "logprobs": 3}


@pytest.fixture
async def smol(smollm2_path: Path) -> AsyncIterator[erllama.Model]:
    """One sequence, RAM tier."""
    async with erllama.open_engine() as engine:
        yield await engine.load_model(
            smollm2_path, context=ContextOptions(n_threads=1, n_ctx=2048), policy=POLICY
        )


def tiers_of(kind: str, root: Path) -> tuple[EngineOverrides, str]:
    """Engine options with a tier of that kind, and the tier's name."""
    if kind == "ram":
        return {}, "ram"
    made = DiskTier("kv", str(root)) if kind == "disk" else RamFileTier("kv", str(root))
    return {"tiers": [made]}, "kv"


def n_computed(model: erllama.Model) -> int:
    """Prompt tokens that went through the model so far, their last ones not counted."""
    return model.statistics().n_prefill_tokens


async def test_the_same_prompt_again_is_all_there(smol: erllama.Model) -> None:
    """A live sequence answers the same prompt with no prefill at all, and with the same bits."""
    cold = await smol.complete(LONG, **GREEDY)
    before = n_computed(smol)
    again = await smol.complete(LONG, **GREEDY)
    assert n_computed(smol) == before
    assert (cold.cache_hit_kind, again.cache_hit_kind, again.cache_source) == ("cold", "exact", "live")
    assert again.stats.n_cached == cold.stats.n_prompt - 1
    assert again.generated == cold.generated
    assert again.logprobs == cold.logprobs


@pytest.mark.parametrize("kind", ["ram", "ram_file", "disk"])
async def test_restored_from_a_tier_the_bits_are_the_same(
    smollm2_path: Path, tmp_path: Path, kind: str
) -> None:
    """E2: after another prompt took the only slot, the first one is restored and answers bit for bit."""
    overrides, tier = tiers_of(kind, tmp_path)
    async with erllama.open_engine(**overrides) as engine:
        context = ContextOptions(n_threads=1, n_ctx=2048)
        model = await engine.load_model(smollm2_path, context=context, policy=POLICY, tier=tier)
        cold = await model.complete(LONG, **GREEDY)
        await model.complete(OTHER, max_tokens=1)
        before = n_computed(model)
        warm = await model.complete(LONG, **GREEDY)
        assert n_computed(model) == before
        assert warm.cache_hit_kind == "exact"
        assert warm.cache_source in ("ram", tier)  # a file tier keeps hot copies in RAM
        assert warm.generated == cold.generated
        assert warm.logprobs == cold.logprobs


@pytest.mark.parametrize("kind", ["ram_file", "disk"])
async def test_a_restart_forgets_nothing(smollm2_path: Path, tmp_path: Path, kind: str) -> None:
    """E2 across processes' lives: a new engine on the same folder answers warm, bit for bit."""
    overrides, tier = tiers_of(kind, tmp_path)
    answers = []
    for _ in range(2):
        async with erllama.open_engine(**overrides) as engine:
            context = ContextOptions(n_threads=1, n_ctx=2048)
            model = await engine.load_model(smollm2_path, context=context, policy=POLICY, tier=tier)
            answers.append(await model.complete(LONG, **GREEDY))
            computed = n_computed(model)
    cold, warm = answers
    assert computed == 0
    assert (warm.cache_hit_kind, warm.cache_source) == ("exact", "kv")
    assert warm.generated == cold.generated
    assert warm.logprobs == cold.logprobs


async def test_the_next_turn_computes_only_what_is_new(smol: erllama.Model) -> None:
    """The answer's own tokens are part of the history: the next turn prefills its new words only."""
    first = await smol.complete(LONG, max_tokens=20, temperature=0.0)
    turn = [*first.context_tokens, *smol.tokenize(" And what costs most?", add_special=False)]
    before = n_computed(smol)
    second = await smol.complete(turn, **GREEDY)
    assert second.cache_hit_kind == "partial"
    assert n_computed(smol) - before <= len(turn) - len(first.context_tokens) + 1


async def test_an_edited_middle_resumes_at_the_edit(smol: erllama.Model) -> None:
    """A change in the middle costs the changed tail, at the very token, live and from RAM."""
    tokens = smol.tokenize(LONG)
    edit = len(tokens) // 2 + 7
    edited = [*tokens[:edit], (tokens[edit] + 1) % 1000, *tokens[edit + 1 :]]
    await smol.complete(tokens, max_tokens=1)
    live = await smol.complete(edited, **GREEDY)
    assert live.stats.n_cached == edit
    await smol.complete(OTHER, max_tokens=1)
    restored = await smol.complete([*tokens[:edit], (tokens[edit] + 2) % 1000, *tokens[edit + 1 :]], **GREEDY)
    assert restored.stats.n_cached == edit
    assert restored.cache_source == "ram"


def test_planted_words_survive_a_kill(smollm2_path: Path, tmp_path: Path) -> None:
    """A process is killed with SIGKILL after a prompt was saved; the next one answers warm and the same."""
    program = textwrap.dedent(
        """
        import sys, trio, erllama
        from erllama import ContextOptions, DiskTier, SavePolicy

        async def main(path, root, text):
            async with erllama.open_engine(tiers=[DiskTier("kv", root)]) as engine:
                policy = SavePolicy(min_tokens=64, cold_min_tokens=64, block_tokens=64)
                model = await engine.load_model(
                    path, context=ContextOptions(n_threads=1, n_ctx=2048), policy=policy, tier="kv"
                )
                answer = await model.complete(text, max_tokens=8, temperature=0.0)
                await engine.cache.flush()
                print(answer.generated, model.statistics().n_prefill_tokens, flush=True)
                await trio.sleep_forever()

        trio.run(main, *sys.argv[1:])
        """
    )
    text = f"The code words are zebra, {LONG} lantern, {LONG[:300]} and marble. The code words are"
    seen = []
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", program, str(smollm2_path), str(tmp_path), text],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ.copy(),
        ) as child:
            assert child.stdout is not None
            line = child.stdout.readline()
            child.send_signal(signal.SIGKILL)
        seen.append(line.rsplit(" ", 1))
    (cold, n_cold), (warm, n_warm) = seen
    assert int(n_cold) > 300
    assert int(n_warm) == 0
    assert warm == cold


async def test_a_common_head_is_computed_once(smollm2_path: Path) -> None:
    """X2: eight requests with one head, arriving together, compute it once."""
    async with erllama.open_engine() as engine:
        context = ContextOptions(n_threads=1, n_ctx=2048, n_seq_max=8)
        model = await engine.load_model(smollm2_path, context=context, policy=POLICY)
        head = model.tokenize(LONG)
        tails = [model.tokenize(f" Question {i}: what costs {i}?", add_special=False) for i in range(8)]
        answers: list[erllama.Completion] = []

        async def ask(tail: list[int]) -> None:
            answers.append(await model.complete([*head, *tail], max_tokens=4, temperature=0.0))

        async with trio.open_nursery() as nursery:
            for tail in tails:
                nursery.start_soon(ask, tail)
        assert len(answers) == 8
        assert n_computed(model) <= len(head) + sum(map(len, tails)) + 8 * 64


async def test_an_interrupted_answer_is_not_lost(smol: erllama.Model) -> None:
    """X6: cancel in the middle of an answer; resending it with what came computes next to nothing."""
    tokens = smol.tokenize(LONG)
    said: list[int] = []
    async with smol.stream(tokens, max_tokens=200, temperature=0.0) as events:
        async for event in events:
            if isinstance(event, erllama.TokenId):
                said.append(event.id)
            if len(said) == 10:
                break
    await trio.testing.wait_all_tasks_blocked()
    before = n_computed(smol)
    more = await smol.complete([*tokens, *said], **GREEDY)
    assert more.stats.n_cached >= len(tokens)
    assert n_computed(smol) - before <= 16


async def test_cache_off_leaves_no_trace(smol: erllama.Model) -> None:
    """X26: `cache="off"` reads nothing and stores nothing."""
    await smol.complete(LONG, max_tokens=2, cache="off")
    await smol.complete(OTHER, max_tokens=2, cache="off")
    again = await smol.complete(LONG, max_tokens=2, temperature=0.0, cache="off")
    assert again.cache_hit_kind == "cold"
    assert again.finish_key is None
    assert again.cache_delta == erllama.CacheDelta()
