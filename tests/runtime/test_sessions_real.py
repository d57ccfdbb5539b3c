"""Sessions on a real model: turn after turn, the same answers as without them, and little computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import erllama
from erllama import ContextOptions, NoSession, SavePolicy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.slow]

POLICY = SavePolicy(min_tokens=64, cold_min_tokens=64, block_tokens=64)
PRICES = " ".join(f"Item {i} costs {i * 7919 % 1000} coins." for i in range(30))  # about 300 tokens
GREEDY = {"max_tokens": 8, "temperature": 0.0}


@pytest.fixture
async def smol(smollm2_path: Path) -> AsyncIterator[erllama.Model]:
    """Three sequences, RAM tier."""
    async with erllama.open_engine() as engine:
        context = ContextOptions(n_ctx=2048, n_seq_max=3)
        yield await engine.load_model(smollm2_path, context=context, policy=POLICY)


def n_computed(model: erllama.Model) -> int:
    """Tokens that went through the model so far."""
    s = model.statistics()
    return s.n_prefill_tokens + s.n_decode_rows


TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = [f"{PRICES} What costs most?", "And what costs least?", "What is Item 7?", "Thank you."]


async def converse(path: Path, way: str) -> list[list[int]]:
    """Four turns on a model of its own; what it said. Each token is computed once if a session is held."""
    said, transcript = [], []
    async with erllama.open_engine() as engine:
        # One thread: on a busy machine their number changes, and with it a row's last bits.
        context = ContextOptions(n_ctx=2048, n_threads=1)
        model = await engine.load_model(path, context=context, policy=POLICY)
        for i, question in enumerate(QUESTIONS):
            close = "<|im_end|>\n" if i else ""  # the answer before was cut at its length
            tail = model.tokenize(close + TURN.format(question), add_special=False)
            if way == "continuation" and i:
                answer = await model.continue_(tail, session_id=1, expect_committed=transcript, **GREEDY)
            else:
                options = {"cache": "off"} if way == "cold" else {"session_id": 1}
                answer = await model.complete([*transcript, *tail], **options, **GREEDY)
            assert answer.cache_hit_kind == (way if i else "cold")
            transcript = answer.context_tokens
            said.append(answer.generated)
        if way != "cold":
            assert n_computed(model) == len(transcript) - 1
    return said


async def test_a_conversation_three_ways(smollm2_path: Path) -> None:
    """S1, S8, E2: whole transcripts, tails only, and no session at all give the same tokens."""
    said = [await converse(smollm2_path, way) for way in ("sticky", "continuation", "cold")]
    assert said[0] == said[1] == said[2]
    assert all(len(answer) > 1 for answer in said[0])


async def test_a_cut_back_turn_has_the_same_bits(smol: erllama.Model) -> None:
    """S1, E2: the same prompt again in its session, cut back in place: one row, and the same bits."""
    first = await smol.complete(PRICES, session_id="s", logprobs=3, **GREEDY)
    before = n_computed(smol)
    again = await smol.complete(PRICES, session_id="s", logprobs=3, **GREEDY)
    assert n_computed(smol) - before == len(again.generated)
    assert again.cache_hit_kind == "sticky"
    assert again.logprobs == first.logprobs


async def test_a_reclaimed_session_answers_the_same(smol: erllama.Model) -> None:
    """S5, S7: three other sessions take its sequence; its next turn comes from the store."""
    first = await smol.complete(PRICES, session_id="s", **GREEDY)
    turn = [*first.context_tokens, *smol.tokenize(" What costs most?", add_special=False)]
    reference = await smol.complete(turn, cache="off", **GREEDY)
    for i in range(3):
        await smol.complete(f"Number {i} is a number", session_id=i, max_tokens=1)
    assert smol.info().pinned_idle_seqs == 3
    with pytest.raises(NoSession):
        await smol.continue_("x", session_id="s")
    answer = await smol.complete(turn, session_id="s", **GREEDY)
    assert (answer.cache_hit_kind, answer.cache_source) == ("partial", "ram")
    assert answer.generated == reference.generated


async def test_prefilled_and_pinned_is_answered_as_cold(smol: erllama.Model) -> None:
    """G19, X7: a prefilled prompt is answered with one row, bit for bit as a cold one."""
    cold = await smol.complete(PRICES, cache="off", logprobs=3, **GREEDY)
    assert await smol.pin(PRICES) == cold.stats.n_prompt
    done = await smol.prefill_only(PRICES, session_id="s")
    assert done.context_tokens == cold.context_tokens[: cold.stats.n_prompt]
    assert done.finish_key is not None
    answer = await smol.complete(PRICES, session_id="s", logprobs=3, parent_key=done.finish_key, **GREEDY)
    assert (answer.cache_hit_kind, answer.stats.n_computed, answer.miss) == ("sticky", 1, None)
    assert answer.logprobs == cold.logprobs
    assert smol.cached_prefix_len(PRICES) == len(PRICES.encode())
    assert await smol.unpin(PRICES)


async def test_a_grammar_holds_in_a_continued_turn(smol: erllama.Model) -> None:
    """S11: only digits, as in a first turn."""
    await smol.complete("Count for me.", session_id="s", max_tokens=4)
    for seed in range(3):
        answer = await smol.continue_(
            " A number:", session_id="s", grammar="root ::= [0-9]+", max_tokens=5, seed=seed, temperature=1.0
        )
        assert answer.reply.isdigit()


async def test_a_miss_shows_both_texts(smol: erllama.Model) -> None:
    """X8: the edit is named with the words around it."""
    await smol.complete(PRICES, max_tokens=1)
    miss = (await smol.complete(PRICES.replace("Item 9 costs", "Item 9 weighs"), max_tokens=1)).miss
    assert miss is not None
    assert miss.reason == "differs_at"
    assert "Item 9 costs" in miss.stored
    assert "weighs" in miss.asked
    assert "weighs" not in miss.stored
