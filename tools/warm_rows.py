"""The rows of the warm benchmark: each a function that measures one workload through the public API.

Ratios are taken inside one run; a timing is the median of several. Counts need no repetition.
"""

from __future__ import annotations

import math
import os
import time
from itertools import chain
from typing import TYPE_CHECKING, Any

import bench_store
import psutil
import trio
from warm_bench import (
    TIER,
    Bench,
    Figure,
    NotWarm,
    ask,
    counted,
    displace,
    ids,
    kv_token_bytes,
    memcpy_s,
    must_be_warm,
    served,
    timed,
)

import erllama

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from erllama.types import Completion

SIZES = (512, 2048, 6000)
QUICK_SIZES = (96, 300)
MIB = 1 << 20
HEADER_BYTES = 128  # of an exported state, at most (llama.cpp: state_write of a recurrent memory)


def _sizes(bench: Bench) -> tuple[int, ...]:
    return QUICK_SIZES if bench.quick else SIZES


async def p3(bench: Bench) -> list[Figure]:
    """Warm from RAM: look-up, check, import and the last token, against computing all of it."""
    bars = {512: 80.0, 2048: 150.0}
    figures = []
    async with served(bench.path, max(_sizes(bench)) + 64) as (engine, model):
        per_token = kv_token_bytes(model)
        for n in _sizes(bench):
            ratios, rates, warm_ms = [], [], []
            for run in range(bench.n_runs):
                prompt = ids(model, n, 100 * n + run)
                cold = await ask(model, prompt)
                await engine.cache.flush()
                await displace(model)
                warm = must_be_warm(await ask(model, prompt), "ram").stats
                ratios.append(cold.stats.first_token_s / warm.first_token_s)
                warm_ms.append(1000 * warm.first_token_s)
                rates.append(memcpy_s(int(warm.n_cached * per_token)) / warm.restore_s)
            what = f"warm from RAM, {n} tokens: faster than cold"
            figures.append(timed(bench, "P3", what, ratios, least=bars.get(n, 0.0), warm_ms=warm_ms))
            what = f"restore of {n} tokens against memcpy, look-up and check included"
            figures.append(timed(bench, "P3", what, rates, least=0.7))
    return figures


async def p4(bench: Bench) -> list[Figure]:
    """Warm from disk after a restart, against RAM: file pages in memory, and dropped where they can be."""
    folder, n_ctx = bench.subfolder("p4"), max(_sizes(bench)) + 64
    ram: dict[tuple[int, int], float] = {}
    async with served(bench.path, n_ctx, folder=folder) as (engine, model):
        prompts = {
            (n, run): ids(model, n, 100 * n + run) for n in _sizes(bench) for run in range(bench.n_runs)
        }
        for key, prompt in prompts.items():
            await ask(model, prompt)
            await engine.cache.flush()
            await displace(model)
            ram[key] = must_be_warm(await ask(model, prompt), "ram", TIER).stats.first_token_s
    figures = []
    for name, drop in (("page cache warm", False), ("page cache dropped", True)):
        if drop and not _drop_pages(folder):
            continue
        disk: dict[tuple[int, int], float] = {}
        async with served(bench.path, n_ctx, folder=folder) as (_, model):
            for key, prompt in prompts.items():
                disk[key] = must_be_warm(await ask(model, prompt), TIER).stats.first_token_s
        for n in _sizes(bench):
            ratios = [disk[key] / ram[key] for key in prompts if key[0] == n]
            what = f"warm from disk after a restart, {n} tokens, {name}: against RAM"
            times = [1000 * disk[key] for key in prompts if key[0] == n]
            figures.append(timed(bench, "P4", what, ratios, most=0.0 if drop else 2.0, disk_ms=times))
    return figures


def _drop_pages(folder: str) -> bool:
    """Ask the kernel to forget the content of the files; False where that cannot be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for entry in os.scandir(os.path.join(folder, "nodes")):
        fd = os.open(entry.path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return True


async def p5(bench: Bench) -> list[Figure]:
    """A chat of 20 turns growing to 6,000 tokens: bytes written per turn against its new tokens' KV."""
    n_turns, n_user, n_answer = bench.size(20, 3), bench.size(240, 60), bench.size(60, 8)
    ratios, written = [], 0
    n_ctx = n_turns * (n_user + n_answer) + 64
    async with served(bench.path, n_ctx, folder=bench.subfolder("p5")) as (engine, model):
        per_token = kv_token_bytes(model)
        history: list[int] = []
        for turn in range(n_turns):
            before = len(history)
            asked = [*history, *ids(model, n_user, turn + 1)]
            history = (await ask(model, asked, n_answer=n_answer)).context_tokens
            await engine.cache.flush()
            now = engine.cache.counters().bytes_written[TIER]
            ratios.append((now - written) / ((len(history) - before) * per_token))
            written = now
    what = f"{n_turns}-turn chat to {len(history):,} tokens: bytes written per turn / new tokens' KV, most"
    return [counted("P5", what, round(max(ratios), 3), 1.1, ratios=ratios, bytes_written=written)]


async def p6(bench: Bench) -> list[Figure]:
    """Eight agents with one head arrive together in 4,096 cells: the head is computed once."""
    n_head, n_tail, n_answer, n_agents = bench.size(2048, 300), 40, bench.size(32, 4), 8
    answers: list[Completion] = []
    n_ctx = bench.size(4096, 1024)
    async with served(bench.path, n_ctx, n_seq_max=n_agents) as (_, model):
        began = time.perf_counter()
        await ask(model, ids(model, n_head + n_tail, 50), n_answer=n_answer)
        one_s = time.perf_counter() - began
        head = ids(model, n_head, 51)

        async def agent(number: int) -> None:
            answers.append(await ask(model, [*head, *ids(model, n_tail, number)], n_answer=n_answer))

        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for number in range(n_agents):
                nursery.start_soon(agent, number)
        wall_s = time.perf_counter() - began
    n_computed = sum(answer.stats.n_computed for answer in answers)
    times = round((n_computed - n_agents * n_tail) / n_head, 3)
    what = f"{n_agents} agents, one head of {n_head} tokens, {n_ctx} cells: times the head is computed"
    details = {"n_computed": n_computed, "wall_s": wall_s, "one_alone_s": one_s}
    return [
        counted("P6", what, times, 1.0, **details),
        timed(bench, "P6", "the eight together against one alone: wall time", [wall_s / one_s]),
    ]


async def p7(bench: Bench) -> list[Figure]:
    """Turn 5 of 10 changed: what is behind it is computed again, and at most a token more."""
    n_turn = bench.size(200, 30)
    figures = []
    async with served(bench.path, 10 * n_turn + 128) as (engine, model):
        turns = [ids(model, n_turn, i + 1) for i in range(10)]
        await ask(model, list(chain(*turns)))
        await engine.cache.flush()
        for live in (True, False):
            if not live:
                await displace(model)
            changed = [*turns[:4], ids(model, n_turn - 10, 60 + live), *turns[5:]]
            answer = await ask(model, list(chain(*changed)))
            tail = n_turn - 10 + 5 * n_turn
            what = f"turn 5 of 10 changed, {'live' if live else 'from RAM'}: computed behind the changed tail"
            extra = answer.stats.n_computed - tail
            figures.append(counted("P7", what, extra, 1, n_computed=answer.stats.n_computed, tail=tail))
    return figures


async def p8(bench: Bench) -> list[Figure]:
    """Look-up of a 30,000-token prompt among 100,000 nodes; the index alone, no model can fill it in time."""
    results: dict[str, float] = {}
    bench_store.bench_lookup(results)
    small, large = results["lookup_30k_among_117_ms"], results["lookup_30k_among_100k_ms"]
    return [
        timed(bench, "P8", "look-up of 30,000 tokens among 100,000 nodes", [large], most=1.0, unit="ms"),
        timed(bench, "P8", "the same against 117 nodes", [large / small], most=1.5),
    ]


async def p11(bench: Bench) -> list[Figure]:
    """Four prompts at once, saved to disk while they are answered, against the same without cache."""
    n_prompt, n_answer, n_requests = bench.size(256, 70), bench.size(128, 8), 4
    rates: dict[str, list[float]] = {"on": [], "off": []}
    seeds = iter(range(1, 10_000))
    folder = bench.subfolder("p11")
    async with served(bench.path, 4096, folder=folder, n_seq_max=n_requests) as (engine, model):
        for run in range(bench.n_runs + 1):
            for cache, found in rates.items():
                prompts = [ids(model, n_prompt, next(seeds)) for _ in range(n_requests)]
                rate = await _tokens_per_s(model, prompts, n_answer, cache)
                await engine.cache.flush()
                if run or bench.quick:  # the first run warms both up
                    found.append(rate)
        n_saved = sum(engine.cache.counters().saves.values())
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    what = "throughput of 4 requests, saving to disk, against none"
    return [timed(bench, "P11", what, ratios, least=0.97, n_saved=n_saved, **rates)]


async def _tokens_per_s(model: erllama.Model, prompts: list[list[int]], n_answer: int, cache: str) -> float:
    n_generated = 0

    async def one(prompt: list[int]) -> None:
        nonlocal n_generated
        n_generated += (await ask(model, prompt, n_answer=n_answer, cache=cache)).stats.n_generated

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(one, prompt)
    return n_generated / (time.perf_counter() - began)


async def p12(bench: Bench) -> list[Figure]:
    """Memory after 1,000 different prompts: what the RAM tier may have, and no more."""
    n_prompts, n_prompt, budget = bench.size(1000, 20), 64, bench.size(64 * MIB, 16 * MIB)
    rss: list[int] = []
    async with served(bench.path, 512, ram_bytes=budget) as (engine, model):
        await ask(model, ids(model, n_prompt, 1), cache="off")
        start = psutil.Process().memory_info().rss
        for i in range(n_prompts):
            await ask(model, ids(model, n_prompt, i + 2))
            rss.append(psutil.Process().memory_info().rss - start)
        await engine.cache.flush()
        used = engine.cache.list_tiers()[0].used_bytes
        evictions = engine.cache.counters().evictions
    half = rss[len(rss) // 2]
    what = f"memory after {n_prompts} prompts, budget {budget // MIB} MiB: growth / budget"
    details = {"evictions": evictions, "used_bytes": used, "rss": rss[:: max(1, n_prompts // 20)]}
    return [
        timed(bench, "P12", what, [rss[-1] / budget], most=1.05, **details),
        timed(bench, "P12", "growth in the second half / budget", [(rss[-1] - half) / budget], most=0.05),
    ]


async def p15(bench: Bench) -> list[Figure]:
    """P15 and P16: a new chat with a long chat's head after two other prompts, then the long chat again."""
    n_chat, n_head, n_other = bench.size(5500, 700), bench.size(1000, 300), bench.size(1200, 150)
    async with served(bench.path, n_chat + 128) as (_, model):
        chat = ids(model, n_chat, 1)
        await ask(model, chat)
        for seed in (2, 3):
            await ask(model, ids(model, n_other, seed))
        new = await ask(model, [*chat[:n_head], *ids(model, 200, 7)])
        back = await ask(model, [*chat, *ids(model, 20, 8)])
    what = f"a new chat with {n_head} tokens of one of {n_chat}, after two others: computed"
    return [
        counted("P15", what, new.stats.n_computed, 240, source=new.cache_source),
        counted(
            "P16", "back to the long chat + 20: computed", back.stats.n_computed, 84, source=back.cache_source
        ),
    ]


async def p17(bench: Bench) -> list[Figure]:
    """A sliding-window model: 3,840 tokens restored, against computing them."""
    n = bench.size(3840, 700)
    ratios, other_ids = [], 0
    async with served(bench.gemma, n + 128) as (engine, model):
        for run in range(bench.n_runs):
            prompt = ids(model, n, 10 + run)
            cold, warm = await _cold_and_warm(engine, model, prompt, "session")
            must_be_warm(warm, "ram")
            ratios.append(cold.stats.first_token_s / warm.stats.first_token_s)
            other_ids += cold.generated != warm.generated
        cold, warm = await _cold_and_warm(engine, model, ids(model, n, 10), "cold")
    other_bits = int((cold.generated, cold.logprobs) != (warm.generated, warm.logprobs))
    what = f"sliding window, {n} tokens from RAM: faster than cold"
    cold_what = f'answers of exact="cold" with other bits; {warm.stats.n_cached} tokens were restored'
    if not warm.stats.n_cached:
        raise NotWarm(f'exact="cold" restored nothing: {warm.miss}')
    return [
        timed(bench, "P17", what, ratios, least=150.0),
        counted("P17", "answers with other ids than the cold ones", other_ids, 0),
        counted("P17", cold_what, other_bits, 0),
    ]


async def _cold_and_warm(
    engine: erllama.Engine, model: erllama.Model, prompt: list[int], exact: str
) -> tuple[Completion, Completion]:
    answers = []
    for _ in range(2):
        answers.append(await ask(model, prompt, n_answer=4, logprobs=0, exact=exact))
        await engine.cache.flush()
        await displace(model)
    return answers[0], answers[1]


async def p18(bench: Bench) -> list[Figure]:
    """What one more place to go on from costs: window parts, or a state."""
    return [await _window_parts(bench), await _state(bench)]


async def _window_parts(bench: Bench) -> Figure:
    n = bench.size(2048, 1100)
    async with served(bench.gemma, n + 256) as (engine, model):
        window = model.info().details["n_swa"]
        chat = ids(model, n, 1)
        await ask(model, chat)
        await engine.cache.flush()
        before = _small_bytes(engine, "window")
        await ask(model, [*chat[: n - n % 256 - 256], *ids(model, 40, 2)])
        await engine.cache.flush()
        after = _small_bytes(engine, "window")
    if not before:
        raise NotWarm("no window part is stored")
    most = math.ceil(window / 256)
    added = (sum(after) - sum(before)) / max(before)
    return counted("P18", f"window of {window}: window parts for one more place", round(added, 3), most)


async def _state(bench: Bench) -> Figure:
    """A tiny hybrid: the state as stored against what llama.cpp holds for one sequence."""
    native = []
    for n_ctx in (512, 1024):
        async with served(bench.hybrid, n_ctx) as (engine, model):
            native.append(model.info().details["memory"].kv_bytes)
            await ask(model, list(range(20, 320)))
            await engine.cache.flush()
            states = _small_bytes(engine, "state")
    if not states:
        raise NotWarm("no state is stored")
    n_sequences = 2  # the user's and the scratch one
    state_bytes = (2 * native[0] - native[1]) / n_sequences
    # A tiny model's state is so small that llama.cpp's own header would be more than 5 % of it.
    most = max(0.05 * state_bytes, HEADER_BYTES)
    what = f"hybrid: bytes of one more place beyond its state of {state_bytes:.0f}"
    return counted("P18", what, max(states) - state_bytes, most, stored=max(states))


def _small_bytes(engine: erllama.Engine, kind: str) -> list[int]:
    return [node["parts"][kind]["bytes"] for node in engine.cache.dump() if kind in node["parts"]]


ROWS: dict[str, Callable[[Bench], Awaitable[list[Figure]]]] = {
    row.__name__.upper(): row for row in (p3, p4, p5, p6, p7, p8, p11, p12, p15, p17, p18)
}  # P16 is measured with P15


async def measure(name: str, bench: Bench) -> list[Figure]:
    """One row; what cannot be measured is missed, and says why."""
    try:
        return await ROWS[name](bench)
    except (NotWarm, erllama.NotSupported) as why:
        what = (ROWS[name].__doc__ or "").split(":")[0]
        details: dict[str, Any] = {"why": str(why)}
        return [Figure(row=name, what=what, bar="warm", figure="cold", met=False, details=details)]
