"""P6: agents with one common system prompt that arrive together."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from .answer import Answer, wall_s
from .figure import Bar, against, single
from .own import Own, open_own, together
from .peer import open_peer
from .spread import take_turns
from .workload import Found, Workload

if TYPE_CHECKING:
    from .answer import Side
    from .settings import Settings

WALL_BAR = Bar("<=", 0.25)
ONCE_BAR = Bar("<=", 1.05, "value")
N_AGENTS = 8


async def measure(settings: Settings, found: Found) -> None:
    """Every run has a head of its own, so nobody profits from an earlier run."""
    n_head, n_tail, n_out = settings.pick((2048, 64, 32), (200, 16, 8))
    # Ours holds the head once. The peer computes and holds it per agent, so it gets room for that, in the
    # layout in which it is faster: separate streams.
    own_ctx, peer_ctx = settings.pick(4096, 640), N_AGENTS * (n_head + n_tail + n_out + 128)
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(open_own(settings, n_ctx=own_ctx, n_seq_max=N_AGENTS))
        sides: list[Side] = [own]
        if settings.programs is not None:
            opened = open_peer(settings, n_ctx=peer_ctx, n_seq_max=N_AGENTS, kv_unified=False)
            sides.append(await stack.enter_async_context(opened))
        ask = partial(_agents, own, n_head, n_tail, n_out)
        runs = await take_turns(settings.runs(2), *(partial(ask, side) for side in sides), warm_up=False)
        once = [_n_once(prompts_of_agents(own, n_head, n_tail, run)) for run in range(1, len(runs[0]) + 1)]
    walls = [[wall_s(run) for run in side] for side in runs]
    others = walls[1] if len(walls) > 1 else []
    figures = [against("wall time", "s", walls[0], others, "llama-server", WALL_BAR)]
    for side, answers in zip(sides, runs, strict=True):
        computed = [sum(a.n_computed for a in run) / n for run, n in zip(answers, once, strict=True)]
        bar = ONCE_BAR if side is own else None
        figures.append(single(f"{side.name}: computed, of one head and the tails", "×", computed, bar))
    room = f"Ours ran with {own_ctx} cells, llama-server with {peer_ctx}: it needs room for 8 heads."
    await found.add(*figures, notes=(room,))


async def _agents(own: Own, n_head: int, n_tail: int, n_out: int, side: Side, run: int) -> list[Answer]:
    prompts = prompts_of_agents(own, n_head, n_tail, run)
    return await together([partial(side.ask, prompt, n_out, cache=True) for prompt in prompts])


def prompts_of_agents(own: Own, n_head: int, n_tail: int, run: int) -> list[list[int]]:
    """One head for all of a run, and a tail for each."""
    head = own.prompts.prompt(n_head, 6, run)
    return [[*head, *own.prompts.tail(n_tail, 6, run, i)] for i in range(N_AGENTS)]


def _n_once(prompts: list[list[int]]) -> int:
    """Tokens to compute if what all of them share is computed once."""
    shared = next(i for i, tokens in enumerate(zip(*prompts, strict=True)) if len(set(tokens)) > 1)
    return shared + sum(len(prompt) - shared for prompt in prompts)


SHARING = Workload(
    id="P6",
    title="eight agents, one system prompt, arriving together",
    compared=(
        "wall time from the first request to the last token; ours with 4,096 cells in all, llama-server with "
        "separate streams (its faster layout) and cells for eight heads"
    ),
    measure=measure,
)
