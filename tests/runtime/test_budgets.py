"""What an answer may cost, in counts: the regression guard for speed that cannot flake.

A budget that is exceeded says that a step, a token or a save does more work than it did. Where that is
meant, raise the number in the table, with the reason in the commit; where a change does less, lower it.
"""

from __future__ import annotations

import gc
import math
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import trio

import erllama
from erllama.testing import FakeBackend

from .counting import Meter, Moved

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MARKS = 20, 60  # between these tokens of a stream its objects are counted
N_RUNS = 4
N_PROMPT, N_OUT = 40, 65  # the first token comes out of the prompt's last row


@dataclass(frozen=True)
class Budget:
    """At most, for one decoding sequence and for eight; `None`: the fake has none of it."""

    native_a_step: float | None  # calls into the binding
    hops_a_step: float | None  # crossings to the model's thread
    entries_a_step: float  # the actor's turn: once begun, once gone on with when the step is computed
    calls_a_token: float  # Python functions of erllama entered, on all threads
    kept_blocks_a_token: float | None  # Python objects that live on while a stream runs
    left_blocks_a_token: float | None  # those that live on when it is over


# How many turns the actor gets while steps follow each other depends on the machine: `calls` has room for
# as many as `entries` allows.
#                           native   hops  entries  calls   kept  left
BUDGETS = {
    ("fake", 1): Budget(None, None, 3.2, 118, None, None),
    ("fake", 8): Budget(None, None, 3.2, 44, None, None),
    ("tiny", 1): Budget(1.4, 0.12, 0.4, 102, 3.0, 0.2),
    ("tiny", 8): Budget(2.4, 0.12, 0.4, 42, 3.0, 0.2),
}
# Bytes, of the KV that is new (exported, written) or asked back (imported); what is above 1 are headers.
COPIES = {"exported": 1.06, "imported": 1.06, "written": 1.06}
FAKE_TOKEN_BYTES = 8  # `FakeBackend.export_bytes`


@asynccontextmanager
async def served(
    kind: str, n: int, tiny_gguf: object, **config: object
) -> AsyncIterator[tuple[erllama.Engine, erllama.Model]]:
    """An engine, and on it a model with n sequences."""
    # No step is cut short because this machine is slow.
    context = erllama.ContextOptions(n_ctx=2048, n_seq_max=n, n_threads=1, step_target_s=1000)
    policy = erllama.SavePolicy(min_tokens=64, cold_min_tokens=64)
    given = {"context": context, "policy": policy, "tier": "kv" if config else "ram"}
    with trio.fail_after(240):
        async with erllama.open_engine(**config) as engine:
            if kind == "fake":
                yield engine, await engine.load_model(backend=FakeBackend(n_slots=n), **given)
            else:
                yield engine, await engine.load_model(tiny_gguf("dense"), **given)


class Scenario:
    """n requests at once that answer with exactly N_OUT tokens each."""

    def __init__(self, model: erllama.Model, n: int) -> None:
        self.model, self.n = model, n
        handle = model.handle
        is_eog = handle.optional("is_eog")
        self.banned = {token: -math.inf for token in range(handle.facts.n_vocab) if is_eog(token)}
        self.kept: list[int] = []

    async def run(self) -> None:
        """All of them, once."""
        async with trio.open_nursery() as nursery:
            for i in range(self.n):
                nursery.start_soon(self._one, i)

    async def _one(self, i: int) -> None:
        prompt = [40 + i, *range(60, 60 + N_PROMPT - 1)]
        seen, marks = 0, []
        async with self.model.stream(
            prompt, max_tokens=N_OUT, temperature=0.0, logit_bias=self.banned, cache="off"
        ) as events:
            async for event in events:
                if type(event) is erllama.TokenId:
                    seen += 1
                    if i == 0 and seen in MARKS:
                        marks.append(sys.getallocatedblocks())
        assert seen == N_OUT
        if marks:
            self.kept.append(marks[1] - marks[0])


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n"), BUDGETS, ids=str)
async def test_an_answer_stays_within_its_budget(kind, n, tiny_gguf):
    """Rows, steps, native calls, thread hops, Python calls and objects of n answers."""
    budget = BUDGETS[kind, n]
    with Meter().installed() as meter:
        async with served(kind, n, tiny_gguf) as (_, model):
            scenario = Scenario(model, n)
            for _ in range(2):  # caches fill, free lists grow
                await scenario.run()
            before = model.statistics()
            with meter.counting():
                await scenario.run()
            after = model.statistics()
            left, kept = await _blocks(scenario)
    n_steps, n_tokens = after.n_steps - before.n_steps, n * N_OUT
    # Every token is one row, every prompt token computed once, and all go on together.
    assert after.n_decode_rows - before.n_decode_rows == n_tokens
    assert after.n_prefill_tokens - before.n_prefill_tokens == n * (N_PROMPT - 1)
    assert n_steps <= N_OUT + 4
    found = {
        "native_a_step": sum(meter.native.values()) / n_steps,
        "hops_a_step": meter.hops / n_steps,
        "entries_a_step": meter.entries / n_steps,
        "calls_a_token": meter.calls / n_tokens,
        "kept_blocks_a_token": kept / n / (MARKS[1] - MARKS[0]),
        "left_blocks_a_token": left / (N_RUNS * n_tokens),
    }
    print({name: round(value, 2) for name, value in found.items()})  # for who sets a budget: pytest -s
    assert found["calls_a_token"] > 10  # the meter counts
    for name, limit in vars(budget).items():
        assert limit is None or found[name] <= limit, name


async def _blocks(scenario: Scenario) -> tuple[int, int]:
    """Memory blocks of Python: more of them after a run, and between two tokens of its first stream.

    Without the collector, so that garbage in cycles counts as kept: it costs collections later.
    """
    gc.collect()
    scenario.kept.clear()
    before = sys.getallocatedblocks()
    gc.disable()
    try:
        for _ in range(N_RUNS):
            await scenario.run()
    finally:
        gc.enable()
    gc.collect()
    return sys.getallocatedblocks() - before, min(scenario.kept)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fake", "tiny"])
async def test_kv_is_copied_and_written_once(kind, tiny_gguf, tmp_path):
    """A token's KV is copied out and written once; a next turn adds its own; a restore copies it in once."""
    tiers = [erllama.DiskTier("kv", str(tmp_path))]
    async with served(kind, 1, tiny_gguf, tiers=tiers) as (engine, model):
        moved = Moved(model.handle.backend)
        per_token = FAKE_TOKEN_BYTES if kind == "fake" else _kv_bytes_per_token(model)

        async def shares(prompt: list[int], n_new: int) -> dict[str, float]:
            """Bytes that the request moved, of the KV of `n_new` tokens."""
            before = moved.exported, moved.imported, sum(engine.cache.counters().bytes_written.values())
            await model.complete(prompt, max_tokens=1, temperature=0.0)
            await engine.cache.flush()
            after = moved.exported, moved.imported, sum(engine.cache.counters().bytes_written.values())
            moves = (b - a for a, b in zip(before, after, strict=True))
            return {name: n / (n_new * per_token) for name, n in zip(COPIES, moves, strict=True)}

        first = [40 + i % 80 for i in range(600)]
        second = [*first, *(50 + i % 70 for i in range(300))]
        cold, turn = await shares(first, 600), await shares(second, 300)
        await model.complete([45, 46, 47], max_tokens=1, temperature=0.0, cache="off")  # takes the sequence
        again = await shares(second, 900)
    print(cold, turn, again)
    for found in (cold, turn):
        assert 0.99 <= found["exported"] <= COPIES["exported"]
        assert 0.99 <= found["written"] <= COPIES["written"]
        assert found["imported"] == 0
    assert 0.99 <= again["imported"] <= COPIES["imported"]
    assert (again["exported"], again["written"]) == (0, 0)


def _kv_bytes_per_token(model: erllama.Model) -> float:
    details = model.info().details
    return float(details["memory"].kv_bytes / model.handle.facts.n_cells)
