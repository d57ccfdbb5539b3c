"""The second half of `erllama demo`: a long prompt cold, again, continued, and after a restart from disk."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

import erllama

if TYPE_CHECKING:
    from pathlib import Path

    from erllama.types import Completion

N_FACTS = 70  # sentences of the long prompt: about 1,000 tokens
N_ANSWER = 8


@dataclass(frozen=True, slots=True)
class Row:
    """What one request cost."""

    name: str
    n_prompt: int
    n_computed: int
    first_token_s: float

    @classmethod
    def of(cls, name: str, answer: Completion) -> Row:
        stats = answer.stats
        return cls(name, stats.n_prompt, stats.n_computed, stats.first_token_s)


def long_prompt(n_facts: int) -> str:
    """A document that no model can have seen, and a question about it."""
    facts = " ".join(f"Room {i} holds {i * 7919 % 1000} books." for i in range(1, n_facts + 1))
    return f"{facts} Room 1 holds"


async def run_warm(path: Path) -> list[Row]:
    """Ask the same long prompt in four situations; the cache lies in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="erllama-demo-") as folder:
        rows, first = await _first_life(path, folder)
        rows.append(await _second_life(path, folder, first))
        return rows


async def _first_life(path: Path, folder: str) -> tuple[list[Row], Completion]:
    async with erllama.open_engine(tiers=[erllama.DiskTier("kv", folder)]) as engine:
        model = await _load(engine, path)
        _say("A long prompt, cold …")
        cold = await model.complete(long_prompt(N_FACTS), max_tokens=N_ANSWER, temperature=0.0)
        again = await model.complete(long_prompt(N_FACTS), max_tokens=N_ANSWER, temperature=0.0)
        more = model.tokenize(" And room 2 holds", add_special=False)
        turn = await model.complete([*again.context_tokens, *more], max_tokens=N_ANSWER, temperature=0.0)
        return [Row.of("cold", cold), Row.of("again", again), Row.of("next turn", turn)], cold


async def _second_life(path: Path, folder: str, first: Completion) -> Row:
    _say("The same after a restart …")
    async with erllama.open_engine(tiers=[erllama.DiskTier("kv", folder)]) as engine:
        model = await _load(engine, path)
        answer = await model.complete(long_prompt(N_FACTS), max_tokens=N_ANSWER, temperature=0.0)
        if answer.generated != first.generated:
            raise erllama.EngineError("the answer after the restart differs from the first one")
        return Row.of("after restart", answer)


async def _load(engine: erllama.Engine, path: Path) -> erllama.Model:
    context = erllama.ContextOptions(n_ctx=2048)
    return await engine.load_model(path, context=context, tier="kv")


def _say(text: str) -> None:
    if not sys.stderr.isatty():
        print(text, flush=True)


def warm_table(rows: list[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and cells; the last column compares with the first row."""
    heads = ("a long prompt", "tokens", "computed", "first token", "faster")
    return heads, [
        (
            row.name,
            str(row.n_prompt),
            str(row.n_computed),
            f"{row.first_token_s * 1000:.0f} ms",
            f"{rows[0].first_token_s / row.first_token_s:.0f} x",
        )
        for row in rows
    ]
