"""P1: decode throughput of concurrent requests. P1b: two models, and a busy neighbour."""

from __future__ import annotations

import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .answer import Answer, rate_together, wall_s
from .figure import Bar, against, single
from .own import Own, open_own, together
from .peer import open_peer
from .process import running
from .spread import take_turns
from .workload import Found, Workload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .answer import Side
    from .figure import Figure
    from .settings import Settings

BAR = Bar(">=", 1.0)
TURNS_BAR = Bar(">=", 0.9)


@dataclass(frozen=True, slots=True)
class Load:
    """`n` requests at once, in one KV layout; `label` names a layout that is not the default."""

    n: int
    n_prompt: int
    n_out: int
    type_kv: str = "f16"
    kv_unified: bool = True
    label: str = ""

    @property
    def n_ctx_each(self) -> int:
        """Cells of one request; separate streams come in multiples of 256 (llama.cpp pads them)."""
        need = self.n_prompt + self.n_out + 32
        return need if self.kv_unified else need + -need % 256


async def measure_decode(settings: Settings, found: Found) -> None:
    """Distinct prompts, nothing cached, all started at once; whole wall clock and decode alone."""
    n_prompt, n_out = settings.pick((256, 128), (32, 16))
    beside = settings.pick(8, 4)
    loads = [
        *(Load(n, n_prompt, n_out) for n in settings.pick((1, 4, 8, 16), (1, 4))),
        Load(beside, n_prompt, n_out, kv_unified=False, label=", separate streams"),
        Load(beside, n_prompt, n_out, type_kv="q8_0", label=", q8_0 KV"),
    ]
    for load in loads:
        settings.say(f"{load.n} at once{load.label}")
        await _measure_load(settings.with_kv(load.type_kv), load, found)


async def _measure_load(settings: Settings, load: Load, found: Found) -> None:
    n, cells = load.n, load.n * load.n_ctx_each
    async with AsyncExitStack() as stack:
        opened = open_own(
            settings,
            n_ctx=cells if load.kv_unified else load.n_ctx_each,
            n_seq_max=n,
            kv_unified=load.kv_unified,
        )
        own = await stack.enter_async_context(opened)
        sides: list[Side] = [own]
        if settings.programs is not None:
            peer = open_peer(settings, n_ctx=cells, n_seq_max=n, kv_unified=load.kv_unified)
            sides.append(await stack.enter_async_context(peer))
        ask = partial(_ask, own, n, load.n_prompt, load.n_out)
        runs = await take_turns(settings.n_runs, *(partial(ask, side) for side in sides))
        await found.add(*_figures(load, runs))
        if not load.label:
            await found.add(*await _overhead(own, n, partial(ask, own)))


async def _ask(own: Own, n: int, n_prompt: int, n_out: int, side: Side, run: int) -> list[Answer]:
    prompts = [own.prompts.prompt(n_prompt, run, i) for i in range(n)]
    return await together([partial(side.ask, p, n_out, cache=False) for p in prompts])


def _figures(load: Load, runs: list[list[list[Answer]]]) -> list[Figure]:
    """The figures of one load; `runs` holds the answers of each side's runs. Only the default is judged."""
    peer, many = "llama-server", f"{load.n} request{'s' if load.n > 1 else ''}{load.label}"
    bar, at = (None, None) if load.label else (BAR, load.n)
    walls = [[sum(a.n_generated for a in run) / wall_s(run) for run in side] for side in runs]
    rates = [[rate for run in side if (rate := rate_together(run)) is not None] for side in runs]
    figures = [against(f"{many}, prefill included", "tokens/s", walls[0], _second(walls), peer, bar)]
    if all(len(side) == len(runs[0]) for side in rates):  # else one was done before the last one began
        decoding = against(f"{many}, decoding", "tokens/s", rates[0], _second(rates), peer, bar, at=at)
        figures.insert(0, decoding)
    return figures


def _second(sides: list[list[float]]) -> list[float]:
    return sides[1] if len(sides) > 1 else []


async def _overhead(own: Own, n: int, ask: Callable[[int], Awaitable[list[Answer]]]) -> list[Figure]:
    """What a step takes besides `llama_decode`, prefill steps among them: sampling, and everything else."""
    before, began = own.statistics, time.perf_counter()
    await ask(-1)
    after, elapsed_s = own.statistics, time.perf_counter() - began
    n_steps, sample_s = after.n_steps - before.n_steps, after.sample_s - before.sample_s
    rest_s = elapsed_s - sample_s - (after.compute_s - before.compute_s)
    return [
        single(f"{n}: sampling, a step", "ms", [1000 * sample_s / n_steps]),
        single(f"{n}: all but decode and sampling, a step", "ms", [1000 * rest_s / n_steps]),
    ]


async def measure_neighbours(settings: Settings, found: Found) -> None:
    """Two models at once against turns; one model beside a program that keeps a core busy."""
    n_prompt, n_out = settings.pick((64, 128), (16, 16))
    # Threads follow the machine here, as they do for users.
    async with (
        open_own(settings, n_ctx=1024, n_threads=None) as first,
        open_own(settings, n_ctx=1024, n_threads=None) as second,
    ):

        async def one(side: Own, run: int) -> Answer:
            return await side.ask(side.prompts.prompt(n_prompt, run), n_out, cache=False)

        async def both(run: int) -> float:
            return _rate(await together([partial(one, first, run), partial(one, second, run)]))

        async def turns(run: int) -> float:
            return _rate([await one(first, run), await one(second, run)])

        at_once, in_turn = await take_turns(settings.n_runs, both, turns)
    await found.add(against("two models at once", "tokens/s", at_once, in_turn, "taking turns", TURNS_BAR))
    if settings.n_threads > 1:
        await found.add(await _beside_busy(settings, n_prompt, n_out))
    else:
        note = "One core: what a busy neighbour leaves of it is the scheduler's to say, not ours."
        await found.add(notes=(note,))


async def _beside_busy(settings: Settings, n_prompt: int, n_out: int) -> Figure:
    """A neighbour takes one core of n; what is left is what n - 1 threads reach alone."""
    async with (
        open_own(settings, n_ctx=1024, n_threads=None) as adapting,
        open_own(settings, n_ctx=1024, n_threads=settings.n_threads - 1) as smaller,
    ):

        async def beside(run: int) -> float:
            async with running([sys.executable, "-c", "while True: pass"]):
                return _rate([await adapting.ask(adapting.prompts.prompt(n_prompt, run), n_out, cache=False)])

        async def alone(run: int) -> float:
            return _rate([await smaller.ask(smaller.prompts.prompt(n_prompt, run), n_out, cache=False)])

        busy, free = await take_turns(settings.n_runs, beside, alone)
    return against("beside a busy program", "tokens/s", busy, free, "one thread fewer, alone", TURNS_BAR)


def _rate(answers: list[Answer]) -> float:
    return sum(a.n_generated for a in answers) / wall_s(answers)


DECODE = Workload(
    id="P1",
    title="decode throughput of concurrent requests",
    compared=(
        "Python API in this process against llama-server asked over HTTP on loopback, both streaming; "
        "distinct prompts of 256 tokens, 128 out, equal cells, no cache; unified KV is judged; "
        "separate streams and q8_0 KV stand beside"
    ),
    measure=measure_decode,
)
NEIGHBOURS = Workload(
    id="P1b",
    title="two models at once; one model beside a busy program",
    compared="summed tokens/s of two models asked at once against asking one after the other; no peer",
    measure=measure_neighbours,
)
