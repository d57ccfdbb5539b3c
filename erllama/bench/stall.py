"""P9, P10: what others notice while the engine computes: the event loop, and a running stream."""

from __future__ import annotations

import math
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

import trio

from .answer import longest_gap_s
from .figure import Bar, against, single
from .own import Own, open_own, together
from .peer import open_peer
from .spread import take_turns
from .workload import Found, Workload

if TYPE_CHECKING:
    from .answer import Side
    from .settings import Settings

BEAT_S = 0.010
P99_BAR, MAX_BAR = Bar("<=", 5, "value"), Bar("<=", 20, "value")
GAP_BAR = Bar("<=", 1.3)


async def measure_loop(settings: Settings, found: Found) -> None:
    """Lateness of a task that wants to wake every 10 ms, at full load."""
    n_decoding, n_out, n_filling, n_long = settings.pick((8, 192, 4, 2000), (2, 24, 1, 300))
    n_ctx = n_decoding * (64 + n_out) + n_filling * (n_long + 64)
    late_ms: list[float] = []
    async with open_own(settings, n_ctx=n_ctx, n_seq_max=n_decoding + n_filling) as own:
        await own.displace()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_beat, late_ms)
            await together(
                [
                    *(
                        partial(own.ask, own.prompts.prompt(48, 9, i), n_out, cache=True)
                        for i in range(n_decoding)
                    ),
                    *(
                        partial(own.ask, own.prompts.prompt(n_long, 9, 9, i), 1, cache=True)
                        for i in range(n_filling)
                    ),
                ]
            )
            nursery.cancel_scope.cancel()
    late_ms.sort()
    p99 = late_ms[max(0, math.ceil(len(late_ms) * 0.99) - 1)]
    await found.add(
        single("lateness of a 10 ms heartbeat, p99", "ms", [p99], P99_BAR),
        single("… and its largest", "ms", [late_ms[-1]], MAX_BAR),
        notes=(f"{len(late_ms)} beats.",),
    )


async def _beat(late_ms: list[float]) -> None:
    while True:
        due = trio.current_time() + BEAT_S
        await trio.sleep_until(due)
        late_ms.append((trio.current_time() - due) * 1000)


async def measure_gap(settings: Settings, found: Found) -> None:
    """A stream runs, a long prompt comes: the longest time without a token until that prompt is done."""
    n_long, n_out = settings.pick((6000, 400), (700, 60))
    n_ctx = n_long + n_out + 256
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(
            open_own(settings, n_ctx=n_ctx, n_seq_max=2, prefill_chunk_size=settings.n_batch)
        )
        default = await stack.enter_async_context(open_own(settings, n_ctx=n_ctx, n_seq_max=2))
        sides: list[Side] = [own, default]
        if settings.programs is not None:
            sides.append(await stack.enter_async_context(open_peer(settings, n_ctx=n_ctx, n_seq_max=2)))
        ask = partial(_gap_and_prefill, own, n_long, n_out)
        runs = await take_turns(settings.runs(2), *(partial(ask, side) for side in sides), warm_up=False)
    gaps = [[gap for gap, _ in side] for side in runs]
    fills = [[fill for _, fill in side] for side in runs]
    figures = []
    for i, name, bar in ((0, f"chunks of {settings.n_batch}", GAP_BAR), (1, "default chunks", None)):
        for what, values, judged in (("longest gap", gaps, bar), ("prefill beside it", fills, None)):
            others = values[2] if len(values) > 2 else []
            figures.append(against(f"{name}: {what}", "s", values[i], others, "llama-server", judged))
    knob = (
        "prefill_chunk_size is the knob: smaller chunks give shorter gaps and a slower "
        "prefill beside a running stream."
    )
    await found.add(*figures, notes=(knob,))


async def _gap_and_prefill(own: Own, n_long: int, n_out: int, side: Side, run: int) -> tuple[float, float]:
    """Seconds of the longest gap, and until the long prompt's first token."""
    seen: list[float] = []
    gap = fill = 0.0
    async with trio.open_nursery() as nursery:
        short = own.prompts.prompt(32, 10, run)
        # More tokens than it will get to: it runs for as long as the long prompt is computed.
        nursery.start_soon(partial(side.ask, short, n_out, cache=False, seen=seen))
        while len(seen) < 8:  # noqa: ASYNC110  # the peer's tokens come as readings of a clock, not as events
            await trio.sleep(BEAT_S)
        long = await side.ask(own.prompts.prompt(n_long, 10, 10, run), 1, cache=False)
        fill = long.first_token_s
        over = len(seen) >= n_out  # it ended meanwhile; what came after is no gap
        gap = longest_gap_s(seen, long.began, min(long.times[0], seen[-1]) if over else long.times[0])
        nursery.cancel_scope.cancel()
    return gap, fill


LOOP = Workload(
    id="P9",
    title="event-loop stall at full load",
    compared="how late a task wakes while eight streams decode and four long prompts prefill; no peer",
    measure=measure_loop,
)
GAP = Workload(
    id="P10",
    title="longest gap of a running stream beside a 6k prefill",
    compared="longest time between two tokens; the bar holds for chunks as large as llama-server's batch",
    measure=measure_gap,
)
