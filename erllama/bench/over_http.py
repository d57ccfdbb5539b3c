"""P13: what HTTP costs: throughput, agents, the first byte, and streams that only wait."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from .answer import Answer, wall_s
from .arithmetic import N_SEQ_MAX, open_behind_http, open_here
from .figure import Bar, against, single
from .http import first_byte_s
from .own import Own, open_own, together
from .own_server import PATH, OwnServer, open_server
from .peer import open_peer
from .sharing import N_AGENTS, prompts_of_agents
from .spread import take_turns
from .workload import Found, NotMeasured, Workload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .answer import Side
    from .settings import Settings

API_BAR, PEER_BAR = Bar(">=", 0.97), Bar("<=", 1.0)
BYTE_BAR = Bar("<=", 5, "value")
IDLE_BAR, CPU_BAR = Bar(">=", 0.97), Bar("<=", 1.05)
TOKEN_BAR = Bar("<=", 0.1, "value")
API = "the Python API"
LOOK_S = 0.002
OPENED_S = 1.5  # a stream that waits gets its headers after a second


async def measure(settings: Settings, found: Found) -> None:
    """P1 and P6 as they are, asked over HTTP; then what only a server has."""
    await _throughput(settings, found)
    await _agents(settings, found)
    await _waiting(settings, found)
    await _token(settings, found)


# --- P1 ---


async def _throughput(settings: Settings, found: Found) -> None:
    n_prompt, n_out = settings.pick((256, 128), (32, 16))
    for n in settings.pick((1, 4, 8, 16), (1, 4)):
        settings.say(f"{n} at once")
        n_ctx = n * (n_prompt + n_out + 32)
        async with AsyncExitStack() as stack:
            own = await stack.enter_async_context(open_own(settings, n_ctx=n_ctx, n_seq_max=n))
            opened = open_server(settings, own.banned, n_ctx=n_ctx, n_seq_max=n)
            server = await stack.enter_async_context(opened)
            ask = partial(_distinct, own, n, n_prompt, n_out)
            http, api = await take_turns(settings.n_runs, partial(ask, server), partial(ask, own))
        rates = [[sum(a.n_generated for a in run) / wall_s(run) for run in side] for side in (http, api)]
        many = f"{n} request{'s' if n > 1 else ''}, prefill included"
        await found.add(against(many, "tokens/s", rates[0], rates[1], API, API_BAR, at=n))


async def _distinct(own: Own, n: int, n_prompt: int, n_out: int, side: Side, run: int) -> list[Answer]:
    prompts = [own.prompts.prompt(n_prompt, 13, run, i) for i in range(n)]
    return await together([partial(side.ask, p, n_out, cache=False) for p in prompts])


# --- P6 ---


async def _agents(settings: Settings, found: Found) -> None:
    n_head, n_tail, n_out = settings.pick((2048, 64, 32), (200, 16, 8))
    own_ctx, peer_ctx = settings.pick(4096, 640), N_AGENTS * (n_head + n_tail + n_out + 128)
    settings.say(f"{N_AGENTS} agents")
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(open_own(settings, n_ctx=own_ctx, n_seq_max=N_AGENTS))
        opened = open_server(settings, own.banned, n_ctx=own_ctx, n_seq_max=N_AGENTS)
        sides: list[Side] = [await stack.enter_async_context(opened), own]
        if settings.programs is not None:
            peer = open_peer(settings, n_ctx=peer_ctx, n_seq_max=N_AGENTS, kv_unified=False)
            sides.append(await stack.enter_async_context(peer))

        async def ask(side: Side, run: int) -> float:
            prompts = prompts_of_agents(own, n_head, n_tail, run)
            return wall_s(await together([partial(side.ask, p, n_out, cache=True) for p in prompts]))

        asks = [partial(ask, side) for side in sides]
        http, api, *peers = await take_turns(settings.runs(2), *asks, warm_up=False)
    name = f"{N_AGENTS} agents, wall time"
    await found.add(against(f"{name}, as speed", "s", http, api, API, API_BAR, inverted=True))
    others = peers[0] if peers else []
    await found.add(against(name, "s", http, others, "llama-server over HTTP", PEER_BAR))


# --- the first byte, and streams that wait ---


@dataclass(frozen=True, slots=True)
class _Run:
    """One active stream: its speed, and the server's CPU time for each of its tokens."""

    rate: float
    cpu_ms: float


async def _waiting(settings: Settings, found: Found) -> None:
    n_streams, n_out = settings.pick((200, 640), (20, 256))
    settings.say(f"{n_streams} streams that wait")
    n_ctx = 256 + n_out + 64
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(open_own(settings, n_ctx=n_ctx))
        opened = open_server(settings, own.banned, n_ctx=n_ctx, n_seq_max=1)
        server = await stack.enter_async_context(opened)
        prompt = own.prompts.prompt(256, 13, 13)
        body = server.body(prompt, 1, cache=True)
        await first_byte_s(server.port, PATH, body)  # now it is warm
        bytes_ms = [1000 * await first_byte_s(server.port, PATH, body) for _ in range(settings.n_runs * 4)]
        sides = [partial(_active, own, server, n, n_out) for n in (n_streams, 0)]
        beside, alone = await take_turns(settings.runs(3), *sides)
    await found.add(single("first byte, warm, connecting included", "ms", bytes_ms, BYTE_BAR))
    name = f"one stream beside {n_streams} that wait"
    rates = [[run.rate for run in side] for side in (beside, alone)]
    cpus = [[run.cpu_ms for run in side] for side in (beside, alone)]
    await found.add(against(name, "tokens/s", rates[0], rates[1], "alone", IDLE_BAR))
    await found.add(against(f"{name}: CPU of the server, a token", "ms", cpus[0], cpus[1], "alone", CPU_BAR))


async def _active(own: Own, server: OwnServer, n_streams: int, n_out: int, run: int) -> _Run:
    """One that generates while others wait for its only sequence; counted once all of them have headers."""
    seen: list[float] = []
    async with trio.open_nursery() as waiting:
        async with trio.open_nursery() as active:
            prompt = own.prompts.prompt(64, 13, n_streams, run)
            active.start_soon(partial(server.ask, prompt, n_out, cache=False, seen=seen))
            while len(seen) < 2:  # noqa: ASYNC110  # tokens come as readings of a clock, not as events
                await trio.sleep(LOOK_S)
            for i in range(n_streams):
                prompt = own.prompts.prompt(64, 13, n_streams, run, i)
                waiting.start_soon(partial(server.ask, prompt, 1, cache=False))
            await trio.sleep(OPENED_S)
            began, n, cpu_s = time.perf_counter(), len(seen), await server.cpu_s()
        elapsed_s, n_new = time.perf_counter() - began, n_out - n
        cpu_s = await server.cpu_s() - cpu_s
        waiting.cancel_scope.cancel()
    if n_new < 1:
        raise NotMeasured("the stream was over before the others were open: it is too short for this machine")
    return _Run(n_new / elapsed_s, 1000 * cpu_s / n_new)


# --- what a token costs ---


async def _token(settings: Settings, found: Found) -> None:
    """CPU of a server's process for each token, less that of the same through the API in this process.

    The model computes nothing, or what its tokens cost would hide what HTTP does.
    """
    n_out = settings.pick(600, 60)
    settings.say(f"{N_SEQ_MAX} streams of a model that computes nothing")
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(open_here())
        server = await stack.enter_async_context(open_behind_http(settings, own.banned))
        ask = partial(_distinct, own, N_SEQ_MAX, 64, n_out)

        async def cpu_ms(side: Side, cpu_s: Callable[[], Awaitable[float]], run: int) -> float:
            before = await cpu_s()
            answers = await ask(side, run)
            return 1000 * (await cpu_s() - before) / sum(answer.n_generated for answer in answers)

        sides = partial(cpu_ms, server, server.cpu_s), partial(cpu_ms, own, _own_cpu_s)
        http, api = await take_turns(settings.n_runs, *sides)
    costs = [of_http - of_api for of_http, of_api in zip(http, api, strict=True)]
    await found.add(single("CPU of HTTP, a streamed token", "ms", costs, TOKEN_BAR))


async def _own_cpu_s() -> float:
    """CPU seconds of this process so far."""
    await trio.lowlevel.checkpoint()
    return time.process_time()


OVER_HTTP = Workload(
    id="P13",
    title="the same over HTTP",
    compared=(
        "P1 and P6 through /v1/completions of `erllama serve`, a process of its own, with the token ids of "
        "the Python API in this process; on P6 beside llama-server too; what HTTP itself costs, with a model "
        "that computes nothing"
    ),
    measure=measure,
)
