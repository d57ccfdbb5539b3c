"""P5, P7, P15, P16: conversations that grow, are edited, branch, and come back."""

from __future__ import annotations

import itertools
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from .figure import Bar, against, single
from .own import open_own
from .peer import open_peer
from .workload import Found, Workload

if TYPE_CHECKING:
    from .answer import Answer, Side
    from .figure import Figure
    from .own import Own
    from .settings import Settings

WRITTEN_BAR = Bar("<=", 1.1, "value")
BRANCH_BAR, RETURN_BAR = Bar("<=", 240, "value"), Bar("<=", 84, "value")
N_TURNS = 20


async def measure_growth(settings: Settings, found: Found) -> None:
    """P5: every turn's prompt is the one before, its answer, and something new."""
    n_turns, n_new, n_out = settings.pick((N_TURNS, 284, 16), (4, 80, 4))
    written: list[float] = []
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        n_ctx = (n_turns + 1) * (n_new + n_out)
        async with open_own(settings, n_ctx=n_ctx, disk=Path(folder)) as own:
            history: list[int] = own.prompts.prompt(n_new, 5)
            computed = []
            for turn in range(1, n_turns + 1):
                answer = await own.ask(history, n_out, cache=True)
                await own.engine.cache.flush()
                written.append(sum(own.engine.cache.counters().bytes_written.values()))
                computed.append(answer.n_computed)
                history += [*answer.generated, *own.prompts.tail(n_new, 5, turn)]
            per_token = own.kv_bytes_per_token
    new_bytes = per_token * (n_new + n_out)
    shares = [(b - a) / new_bytes for a, b in itertools.pairwise([0.0, *written])]
    whole = f"Saving the whole state each turn would write {(n_turns + 1) / 2:.1f} × the new tokens' KV."
    await found.add(
        single("most written in a turn, of its new tokens' KV", "×", [max(shares)], WRITTEN_BAR),
        single("written in all, of all tokens' KV", "×", [sum(shares) / n_turns]),
        single("computed a turn", "tokens", [float(n) for n in computed[1:]]),
        notes=(whole,),
    )


async def measure_edit(settings: Settings, found: Found) -> None:
    """P7: turn 5 of 10 is changed, the rest stays; the conversation was asked turn by turn before."""
    n_turns, n_turn = settings.pick((10, 200), (10, 24))
    async with AsyncExitStack() as stack:
        n_ctx = n_turns * n_turn + 64
        own = await stack.enter_async_context(open_own(settings, n_ctx=n_ctx))
        turns = [
            own.prompts.prompt(n_turn, 7, 0),
            *(own.prompts.tail(n_turn, 7, i) for i in range(1, n_turns)),
        ]
        edited = [*turns[:4], own.prompts.tail(n_turn, 77), *turns[5:]]
        before, after = list(itertools.chain(*turns)), list(itertools.chain(*edited))
        same = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        ours = await _edited(own, turns, after)
        theirs = None
        if settings.programs is not None:
            peer = await stack.enter_async_context(open_peer(settings, n_ctx=n_ctx))
            theirs = await _edited(peer, turns, after)
        stored = await _edited_from_ram(own, turns, same)
        slack = 1 if own.memory_kind == "dense" else 256
    bar = Bar("<=", len(after) - same + slack, "value")
    await found.add(*_counts("computed after the edit", ours, theirs, bar))
    # Stored KV is cut at any token of a block, live KV too: the same bar.
    await found.add(*_counts("computed after an edit, from RAM", stored, None, bar))


async def _edited_from_ram(own: Own, turns: list[list[int]], same: int) -> Answer:
    """Another edit of the same turn, once the sequence was given away."""
    await own.engine.cache.flush()
    await own.displace(7)
    before = list(itertools.chain(*turns))
    # The first token that differs is the one that differed before.
    edited = [*before[:same], *own.prompts.tail(len(turns[4]), 777), *itertools.chain(*turns[5:])]
    return await own.ask(edited[: len(before)], 1, cache=True)


async def _edited(side: Side, turns: list[list[int]], after: list[int]) -> Answer:
    history: list[int] = []
    for turn in turns:
        history += turn
        await side.ask(history, 1, cache=True)
    return await side.ask(after, 1, cache=True)


def _counts(name: str, ours: Answer, theirs: Answer | None, bar: Bar) -> list[Figure]:
    """Computed tokens, judged as they are, and the time they took."""
    peer = "llama-server"
    others = [] if theirs is None else [theirs]
    n_computed, first_s = float(ours.n_computed), ours.first_token_s
    return [
        against(name, "tokens", [n_computed], [float(a.n_computed) for a in others], peer, bar),
        against("… until the first token", "s", [first_s], [a.first_token_s for a in others], peer),
    ]


async def measure_branch(settings: Settings, found: Found) -> None:
    """P15: a long chat, two unrelated prompts, and a new chat with the long one's head."""
    ours, theirs = await _last_answers(settings, slice(0, 4))
    await found.add(*_counts("computed of the new chat", ours, theirs, BRANCH_BAR))


async def measure_return(settings: Settings, found: Found) -> None:
    """P16: the same, and then back to the long chat."""
    ours, theirs = await _last_answers(settings, slice(0, 5))
    await found.add(*_counts("computed of the long chat + 20", ours, theirs, RETURN_BAR))


async def _last_answers(settings: Settings, asked: slice) -> tuple[Answer, Answer | None]:
    """Ask that part of the story of either side, one side after the other; the last answer of each."""
    n_long, n_head, n_new = settings.pick((5500, 1000, 200), (500, 300, 40))
    n_ctx = n_long + n_new + 256
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(open_own(settings, n_ctx=n_ctx))
        prompts = _branches(own, n_long, n_head, n_new)[asked]
        ours, theirs = await _last_answer(own, prompts), None
        if settings.programs is not None:
            peer = await stack.enter_async_context(open_peer(settings, n_ctx=n_ctx, cache_ram_mib=4096))
            theirs = await _last_answer(peer, prompts)
    return ours, theirs


def _branches(own: Own, n_long: int, n_head: int, n_new: int) -> list[list[int]]:
    long = own.prompts.prompt(n_long, 15)
    unrelated = [own.prompts.prompt(300 if n_long > 1000 else 100, 15, i) for i in (1, 2)]
    return [
        long,
        *unrelated,
        [*long[:n_head], *own.prompts.tail(n_new, 15, 3)],
        [*long, *own.prompts.tail(20, 15, 4)],
    ]


async def _last_answer(side: Side, prompts: list[list[int]]) -> Answer:
    return [await side.ask(prompt, 1, cache=True) for prompt in prompts][-1]


GROWTH = Workload(
    id="P5",
    title="a chat of 20 turns: bytes written",
    compared="bytes written to the disk tier against the KV bytes of the tokens that were new; no peer",
    measure=measure_growth,
)
EDIT = Workload(
    id="P7",
    title="a conversation edited in the middle",
    compared="prompt tokens computed after turn 5 of 10 was changed; llama-server with its cache beside",
    measure=measure_edit,
)
BRANCH = Workload(
    id="P15",
    title="a new chat with the head of a saved one",
    compared=(
        "prompt tokens computed of a chat that shares 1,000 tokens with one of 5,500, after two unrelated "
        "prompts, one sequence; llama-server with its prompt cache beside"
    ),
    measure=measure_branch,
)
RETURN = Workload(
    id="P16",
    title="back to the long chat",
    compared="then the long chat with 20 more tokens: prompt tokens computed; llama-server as in P15",
    measure=measure_return,
)
