"""What reuse saves on each kind of memory, in counts: agents with one head, a growing chat (P5, P6, X2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

import erllama
from erllama import ContextOptions, DiskTier, SavePolicy

from .kind_scenes import GREEDY, agree, kept, some_tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.slow]

N_HEAD, N_OWN, N_AGENTS = 1000, 40, 8
POLICY = SavePolicy(min_tokens=64, cold_min_tokens=64)


@pytest.mark.parametrize(
    ("kind", "most_heads"),
    [("dense", 1.0), ("window", 2.0), ("hybrid", 2.0), ("recurrent", 2.0), ("hybrid_window", 2.0)],
)
@pytest.mark.parametrize("named", [True, False])
async def test_eight_agents_with_one_head(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str, most_heads: float, named: bool
) -> None:
    """P6: they arrive together; their head is computed once, where memory cannot be cut at most twice.

    `named`: each says how long the head is.
    """
    head = some_tokens(N_HEAD)
    prompts = [[*head, *some_tokens(N_OWN, i + 1)] for i in range(N_AGENTS)]
    answers: dict[int, erllama.Completion] = {}
    shape = {"n_ctx": 4096, "n_seq_max": N_AGENTS, "policy": POLICY}
    options = {**GREEDY, "prefix_checkpoint_len": N_HEAD} if named else GREEDY
    async with kept(tiny_gguf(kind), "ram", tmp_path, reference=True, **shape) as scene:

        async def ask(i: int) -> None:
            answers[i] = await scene.model.complete(prompts[i], **options)

        async with trio.open_nursery() as nursery:
            for i in range(N_AGENTS):
                nursery.start_soon(ask, i)
        own = N_AGENTS * N_OWN
        n_heads = (scene.n_prefilled - own) / N_HEAD
        print(f"{kind}, named {named}: {scene.n_prefilled} computed, {n_heads:.2f} heads")
        assert n_heads <= most_heads
        for i, prompt in enumerate(prompts):
            assert agree(answers[i], await scene.uninterrupted(prompt))


TURNS = 8  # 20 turns to 6,000 tokens take minutes here: ERLLAMA_LONG=1
CHAT_TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


async def test_a_growing_chat_on_a_real_model(smollm2_path: Path, tmp_path: Path) -> None:
    """P5: each turn computes its new tokens and one, and writes at most 1.1 times their KV."""
    table = await grow_chat(smollm2_path, tmp_path, TURNS, n_words=30, max_tokens=30)
    assert len(table) == TURNS


async def grow_chat(
    path: Path, root: Path, n_turns: int, *, n_words: int, max_tokens: int
) -> list[tuple[int, int, int, int, int, float]]:
    """(turn, tokens, new ones, computed, bytes written, of the new tokens' KV) per turn."""
    table = []
    async with erllama.open_engine(tiers=[DiskTier("kv", str(root))]) as engine:
        context = ContextOptions(n_ctx=8192)
        model = await engine.load_model(path, context=context, policy=POLICY, tier="kv")
        token_bytes = 0.0
        history: list[int] = []
        for turn in range(n_turns):
            goods = " ".join(f"Item {i} costs {(turn * 31 + i) * 7919 % 1000} coins." for i in range(n_words))
            question = CHAT_TURN.format(f"{goods} What costs most?")
            new = model.tokenize(("<|im_end|>\n" if turn else "") + question, add_special=False)
            computed = model.statistics().n_prefill_tokens
            written = engine.cache.counters().bytes_written.get("kv", 0)
            answer = await model.complete([*history, *new], max_tokens=max_tokens, temperature=0.0)
            await engine.cache.flush()
            n_computed = model.statistics().n_prefill_tokens - computed
            n_written = engine.cache.counters().bytes_written["kv"] - written
            n_new = answer.committed_tokens - len(history)
            if turn == 0:
                token_bytes = n_written / (answer.committed_tokens - 1)  # the last one is pending
            share = n_written / (n_new * token_bytes)
            table.append((turn + 1, answer.committed_tokens, n_new, n_computed, n_written, share))
            assert n_computed <= len(new) + 1
            assert share <= 1.1
            history = answer.context_tokens
        # 30 layers, 3 heads of 64, K and V in 16 bits: what a token takes, and little more.
        assert token_bytes <= 1.1 * 30 * 3 * 64 * 2 * 2
    return table
