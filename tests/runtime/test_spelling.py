"""Prompts given as text are found whatever tokens they are stored in; ids stay as given (K1, K2, K25)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

import erllama
from erllama import ContextOptions, SavePolicy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.model]

POLICY = SavePolicy(min_tokens=32, cold_min_tokens=32, block_tokens=32)
TEXT = " ".join(f"Shelf {i} holds {i * 7919 % 1000} letters." for i in range(20))
GREEDY = {"max_tokens": 4, "temperature": 0.0}


@pytest.fixture
async def smol(smollm2_path: Path) -> AsyncIterator[erllama.Model]:
    """Four sequences, RAM tier."""
    async with erllama.open_engine() as engine:
        context = ContextOptions(n_ctx=2048, n_seq_max=4)
        yield await engine.load_model(smollm2_path, context=context, policy=POLICY)


def spelled_out(model: erllama.Model, text: str) -> list[int]:
    """The text in ids that its tokenizer would not choose: word by word, letters where that is possible."""
    return [token for letter in text for token in model.tokenize(letter, add_special=False)]


async def stored(model: erllama.Model, ids: list[int]) -> None:
    """Have a prompt in the store, and not in live cells."""
    await model.prefill_only(ids)
    await model.handle.actor.wait_saved()
    while model.handle.actor._lanes.drop_resident():
        pass


async def test_a_text_is_found_in_other_tokens(smol: erllama.Model) -> None:
    """All of it is there, and the answer tells the ids that were used."""
    ids = spelled_out(smol, TEXT)
    assert ids != smol.tokenize(TEXT)
    await stored(smol, ids)
    answer = await smol.complete(TEXT, **GREEDY)
    assert answer.cache_hit_kind == "exact"
    assert answer.stats.n_cached == len(ids) - 1
    assert answer.context_tokens[: len(ids)] == ids
    assert answer.generated == (await smol.complete(ids, cache="off", **GREEDY)).generated


async def test_what_follows_a_stored_beginning_keeps_the_callers_tokens(smol: erllama.Model) -> None:
    """Token-exact where the stored text ends between two of the caller's tokens."""
    head, tail = TEXT + "\n", "And now something else"
    ids = spelled_out(smol, head)
    await stored(smol, ids)
    answer = await smol.complete(head + tail, **GREEDY)
    own = smol.tokenize(head + tail)
    rest = answer.context_tokens[len(ids) : answer.stats.n_prompt]
    assert answer.stats.n_cached == len(ids)
    assert rest == own[len(own) - len(rest) :]
    assert smol.detokenize(answer.context_tokens[: answer.stats.n_prompt]) == head + tail


async def test_a_beginning_that_ends_inside_a_token(smol: erllama.Model) -> None:
    """Only the rest of that text is tokenised again; not a byte changes."""
    ids = spelled_out(smol, TEXT + " wonder")
    await stored(smol, ids)
    whole = TEXT + " wonderful days"
    answer = await smol.complete(whole, **GREEDY)
    assert answer.stats.n_cached >= len(ids) - 1
    assert smol.detokenize(answer.context_tokens[: answer.stats.n_prompt]) == whole


async def test_ids_are_never_replaced(smol: erllama.Model) -> None:
    """The caller's tokens are what he asked about."""
    ids, own = spelled_out(smol, TEXT), smol.tokenize(TEXT)
    await stored(smol, ids)
    answer = await smol.complete(own, **GREEDY)
    assert answer.stats.n_cached == next(i for i, (a, b) in enumerate(zip(ids, own, strict=False)) if a != b)
    assert answer.context_tokens[: len(own)] == own


async def test_a_conversation_sent_as_text_meets_what_was_sampled(smol: erllama.Model) -> None:
    """The next turn's text goes on from the sampled ids, whatever its tokenizer says."""
    first = await smol.complete(TEXT, max_tokens=40, temperature=1.0, seed=3)
    await smol.handle.actor.wait_saved()
    answer = await smol.complete(TEXT + first.reply + " More?", **GREEDY)
    assert answer.stats.n_cached >= first.stats.n_prompt + 35
    assert answer.context_tokens[: answer.stats.n_cached] == first.context_tokens[: answer.stats.n_cached]


async def test_matching_by_text_can_be_switched_off(smollm2_path: Path) -> None:
    """`match_bytes=False`: only equal tokens count."""
    policy = SavePolicy(min_tokens=32, cold_min_tokens=32, block_tokens=32, match_bytes=False)
    async with erllama.open_engine() as engine:
        model = await engine.load_model(smollm2_path, policy=policy)
        await stored(model, spelled_out(model, TEXT))
        answer = await model.complete(TEXT, **GREEDY)
        assert answer.stats.n_cached < 5
        assert answer.context_tokens[: answer.stats.n_prompt] == model.tokenize(TEXT)


async def test_twins_that_come_together_both_take_over(smol: erllama.Model) -> None:
    """Two requests for one stored text: the same ids, and nothing computed twice."""
    ids = spelled_out(smol, TEXT)
    await stored(smol, ids)
    answers: list[erllama.Completion] = []

    async def ask() -> None:
        answers.append(await smol.complete(TEXT + " So", **GREEDY))

    before = smol.statistics().n_prefill_tokens
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        nursery.start_soon(ask)
    assert [a.context_tokens[: len(ids)] for a in answers] == [ids, ids]
    assert smol.statistics().n_prefill_tokens - before <= 4


async def test_a_text_edited_inside_a_block_resumes_at_the_token(smol: erllama.Model) -> None:
    """Looking it up by its text finds no less than by its tokens (P7), and the miss names the place."""
    text = TEXT + " The end."
    first = await smol.complete(text, **GREEDY)
    await smol.handle.actor.wait_saved()
    while smol.handle.actor._lanes.drop_resident():
        pass
    edited = text.replace("Shelf 13 holds", "Shelf 13 lacks")
    own, kept = smol.tokenize(edited), first.context_tokens
    n_same = next(i for i, (a, b) in enumerate(zip(own, kept, strict=False)) if a != b)
    answer = await smol.complete(edited, **GREEDY)
    assert answer.stats.n_cached == n_same
    assert answer.miss is not None
    assert (answer.miss.reason, answer.miss.index) == ("differs_at", n_same)
    assert answer.miss.stored != answer.miss.asked
