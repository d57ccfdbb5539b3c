"""P3, P4, P17: what is kept comes back, from RAM, from disk after a restart, and with a sliding window."""

from __future__ import annotations

import os
import statistics
import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import trio

from erllama import models

from .figure import Bar, against, single
from .importing import Layout, shares_of_memcpy
from .own import MIN_TOKENS, Own, memcpy_bytes_per_s, open_own, together
from .peer import LlamaServer, open_peer
from .spread import take_turns
from .workload import Found, NotMeasured, Workload

if TYPE_CHECKING:
    from .answer import Answer, Side
    from .figure import Figure
    from .settings import Settings

FASTER_BARS = {512: Bar(">=", 80), 2048: Bar(">=", 150)}
MEMCPY_BAR = Bar(">=", 0.7, "value")
DISK_TO_RAM_BAR, DISK_TO_PEER_BAR = Bar("<=", 2.0), Bar("<=", 1.0)
WINDOW_BAR = Bar(">=", 150)
NONE_BAR = Bar("<=", 0, "value")
N_WARM = 3  # restores after each cold run; their median counts
N_OUT = 4
PEER_CACHE_MIB = 4096
HEAD_START_S = 1.0  # of the prompt that is computed


async def measure_ram(settings: Settings, found: Found) -> None:
    """Cold, then again after another prompt took the only sequence."""
    lengths = settings.pick((512, 2048, 6000), (128, 256))
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(open_own(settings, n_ctx=max(lengths) + 64))
        peer = None
        if settings.programs is not None:
            opened = open_peer(settings, n_ctx=max(lengths) + 64, cache_ram_mib=PEER_CACHE_MIB)
            peer = await stack.enter_async_context(opened)
        for n in lengths:
            settings.say(f"{n} tokens")
            await _ram(settings, own, peer, n, found)
        is_dense, tokens = own.memory_kind == "dense", own.prompts.prompt(max(lengths), 5)
    await _beside(settings, found)
    if is_dense:  # elsewhere a block has several parts, and only some of its bytes come back
        await _imports(settings, tokens, lengths, found)


async def _imports(settings: Settings, tokens: list[int], lengths: tuple[int, ...], found: Found) -> None:
    """The native calls alone, by how the cells lie."""
    n, n_ctx = lengths[1], settings.pick(131_072, 1024)
    for name, sizes, layout in (
        ("", lengths, Layout()),
        (" into fragmented cells", (n,), Layout(fragmented=True)),
        (" with transposed V (no flash attention)", (n,), Layout(flash_attn=False)),
        (f" in a context of {n_ctx:,}", (n,), Layout(n_ctx=n_ctx)),
    ):
        settings.say(f"import{name}")
        shares = await trio.to_thread.run_sync(
            shares_of_memcpy, settings, tokens, sizes, layout, settings.runs(5)
        )
        bar = None if name else MEMCPY_BAR
        for size, values in shares.items():
            await found.add(single(f"{size} tokens: importing{name}, as a share of memcpy", "×", values, bar))


async def _beside(settings: Settings, found: Found) -> None:
    """The same while another prompt is computed: what comes back should not wait for that."""
    n, n_other = settings.pick((2048, 6000), (128, 512))
    n_ctx = n + n_other + 192
    settings.say(f"{n} tokens beside a prompt of {n_other}")
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(open_own(settings, n_ctx=n_ctx, n_seq_max=2))
        sides: list[Side] = [own]
        if settings.programs is not None:
            opened = open_peer(settings, n_ctx=n_ctx, n_seq_max=2, cache_ram_mib=PEER_CACHE_MIB)
            sides.append(await stack.enter_async_context(opened))
        asks = [partial(_warm_beside_cold, own, side, n, n_other) for side in sides]
        ours, *others = await take_turns(settings.runs(2), *asks, warm_up=False)
    name = f"{n} tokens, first token while {n_other} others are computed"
    first_s = [[run.again.first_token_s for run in runs] for runs in (ours, *others)]
    await found.add(
        against(name, "s", first_s[0], first_s[1] if others else [], "llama-server, its cache in RAM"),
        notes=tuple(_was_beside(name, side, runs) for side, runs in zip(sides, (ours, *others), strict=True)),
    )


class _Beside(NamedTuple):
    again: Answer
    others_ran: bool  # else that was over when the first token came


def _was_beside(name: str, side: Side, runs: list[_Beside]) -> str:
    n_beside, computed = sum(run.others_ran for run in runs), max(run.again.n_computed for run in runs)
    sources = sorted({run.again.source for run in runs if run.again.source is not None})
    came = f", from {', '.join(sources)}" if sources else ""
    what = f"{computed} computed{came}, the other prompt still ran in {n_beside} of {len(runs)} runs"
    return f"{name}, {side.name}: {what}."


async def _warm_beside_cold(own: Own, side: Side, n: int, n_other: int, run: int) -> _Beside:
    """The first token of a prompt that was asked before and lost both its places."""
    prompts, others_seen = own.prompts, list[float]()
    await side.ask(prompts.prompt(n, 5, run), 1, cache=True)
    await own.engine.cache.flush()
    pushing = [partial(side.ask, prompts.prompt(MIN_TOKENS, 96, run, i), 8, cache=True) for i in range(2)]
    await together(pushing)
    async with trio.open_nursery() as nursery:
        other = partial(side.ask, prompts.prompt(n_other, 97, run), 1, cache=False, seen=others_seen)
        nursery.start_soon(other)
        await trio.sleep(HEAD_START_S)
        again = await side.ask(prompts.prompt(n, 5, run), 1, cache=True)
        nursery.cancel_scope.cancel()
    await trio.sleep(HEAD_START_S)  # a peer notices that its client left when its step ends
    others_ran = not others_seen or others_seen[0] > again.times[0]
    return _Beside(again, others_ran)


async def _ram(settings: Settings, own: Own, peer: LlamaServer | None, n: int, found: Found) -> None:
    sides = [partial(_cold_and_warm, own, n)]
    if peer is not None:
        sides.append(partial(_peer_again, peer, own, n))
    rounds = await take_turns(settings.runs(3), *sides, warm_up=False)
    cold = [pair[0].first_token_s for pair in rounds[0]]
    warm = [statistics.median(a.first_token_s for a in pair[1:]) for pair in rounds[0]]
    theirs = [pair[1].first_token_s for pair in rounds[1]] if peer is not None else []
    name = f"{n} tokens, first token"
    faster, bar = f"{name}: times faster than cold", FASTER_BARS.get(n)
    figures = [against(faster, "s", warm, cold, "cold", bar, at=n, inverted=True)]
    if theirs:
        figures.append(against(name, "s", warm, theirs, "llama-server, its cache in RAM"))
    if own.memory_kind == "dense":  # with a window only a part of the tokens' bytes comes back
        figures.append(_against_memcpy(own, n, rounds[0]))
    await found.add(*figures, notes=_what_came_from_elsewhere(n, rounds[0]))


async def _cold_and_warm(own: Own, n: int, run: int) -> list[Answer]:
    """The cold answer, and those after it. The next token's text tells whether they agree."""
    prompt = own.prompts.prompt(n, 3, n, run)
    answers = [await own.ask(prompt, N_OUT, cache=True)]
    await own.engine.cache.flush()
    for i in range(N_WARM):
        await own.displace(run, i)
        answers.append(await own.ask(prompt, N_OUT, cache=True))
    return answers


async def _peer_again(peer: LlamaServer, own: Own, n: int, run: int) -> list[Answer]:
    prompt, other = own.prompts.prompt(n, 3, n, run), own.prompts.prompt(64, 98, n, run)
    cold = await peer.ask(prompt, N_OUT, cache=True)
    await peer.ask(other, 1, cache=True)
    return [cold, await peer.ask(prompt, N_OUT, cache=True)]


def _against_memcpy(own: Own, n: int, rounds: list[list[Answer]]) -> Figure:
    n_bytes = round(own.kv_bytes_per_token * n)
    memcpy = memcpy_bytes_per_s(n_bytes)
    shares = [n_bytes / a.restore_s / memcpy for r in rounds for a in r[1:] if a.restore_s > 0]
    name = f"{n} tokens: restoring, look-up and hand-overs included, as a share of memcpy"
    return single(name, "×", shares or [0.0])


def _what_came_from_elsewhere(n: int, rounds: list[list[Answer]]) -> tuple[str, ...]:
    warm = [a for r in rounds for a in r[1:]]
    computed = max(a.n_computed for a in warm)
    sources = sorted({str(a.source) for a in warm})
    notes = [f"{n} tokens: {computed} computed when warm, from {', '.join(sources)}."]
    if any(a.generated != r[0].generated for r in rounds for a in r[1:]):
        notes.append(f"{n} tokens: WRONG: a warm answer differs from the cold one.")
    return tuple(notes)


async def measure_disk(settings: Settings, found: Found) -> None:
    """Cold in one process life, warm in the next one."""
    for n in settings.pick((512, 2048), (192,)):
        settings.say(f"{n} tokens")
        sides = [partial(_disk_lives, settings, n)]
        if settings.programs is not None:
            sides.append(partial(_peer_lives, settings, n))
        rounds = await take_turns(settings.runs(3), *sides, warm_up=False)
        ram, disk, dropped = (list(values) for values in zip(*rounds[0], strict=True))
        theirs = [lives[0] for lives in rounds[1]] if len(rounds) > 1 else []
        name = f"{n} tokens after a restart, first token"
        figures = [
            against(f"{name} from disk", "s", disk, ram, "from RAM", DISK_TO_RAM_BAR),
            against(name, "s", disk, theirs, "slot restore + request", DISK_TO_PEER_BAR),
        ]
        if dropped[0] > 0:
            figures.append(against(f"{name}, page cache dropped", "s", dropped, ram, "from RAM"))
        await found.add(*figures)


async def _disk_lives(settings: Settings, n: int, run: int) -> tuple[float, float, float]:
    """Seconds to the first token: from RAM, from disk after a restart, from disk with its pages dropped."""
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        disk = Path(folder)
        async with open_own(settings, n_ctx=n + 64) as own:
            warm = (await _cold_and_warm(own, n, run))[1:]
        async with open_own(settings, n_ctx=n + 64, disk=disk) as own:
            prompt = own.prompts.prompt(n, 3, n, run)
            await own.ask(prompt, N_OUT, cache=True)
            await own.engine.cache.flush()
        after = []
        for drop in (False, True):
            dropped = not drop or await trio.to_thread.run_sync(_drop_pages, disk)
            async with open_own(settings, n_ctx=n + 64, disk=disk) as own:
                # As in the other lives: the engine's first step is not what is measured.
                await own.displace(run)
                again = await own.ask(prompt, N_OUT, cache=True)
            after.append(again.first_token_s if dropped else 0.0)
    return statistics.median(a.first_token_s for a in warm), after[0], after[1]


def _drop_pages(folder: Path) -> bool:
    """Ask the kernel to forget the files' pages; False where it has no such call."""
    if not hasattr(os, "posix_fadvise"):
        return False
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    return True


async def _peer_lives(settings: Settings, n: int, run: int) -> tuple[float, float, float]:
    """The server's way by hand: save the slot, restart, restore the slot, ask."""
    async with open_own(settings, n_ctx=n + 64) as own:
        prompt, other = own.prompts.prompt(n, 3, n, run), own.prompts.prompt(64, 98, n, run)
    file = f"slot-{n}.bin"
    async with open_peer(settings, n_ctx=n + 64) as peer:
        await peer.ask(prompt, N_OUT, cache=True)
        await peer.slot("save", file)
    async with open_peer(settings, n_ctx=n + 64) as peer:
        await peer.ask(other, 1, cache=False)
        restore_s = await peer.slot("restore", file)
        again = await peer.ask(prompt, N_OUT, cache=True)
    return restore_s + again.first_token_s, restore_s, again.first_token_s


async def measure_window(settings: Settings, found: Found) -> None:
    """As P3, on a model with a sliding window."""
    n = settings.pick(3840, 600)
    async with open_own(settings, n_ctx=n + 64) as own:
        if own.memory_kind != "window":
            raise NotMeasured(f"{settings.model.name} has no sliding window; leave --model out")
        rounds = await take_turns(settings.runs(3), partial(_cold_and_warm, own, n), warm_up=False)
        cold = [pair[0].first_token_s for pair in rounds[0]]
        warm = [statistics.median(a.first_token_s for a in pair[1:]) for pair in rounds[0]]
        name = f"{n} tokens, first token: times faster than cold"
        faster = against(name, "s", warm, cold, "cold", WINDOW_BAR, inverted=True)
        await found.add(faster, notes=_what_came_from_elsewhere(n, rounds[0]))
        await found.add(*await _exactness(own, n, rounds[0]))


async def _exactness(own: Own, n: int, rounds: list[list[Answer]]) -> list[Figure]:
    """Answers that differ: in ids as restored by default, in any bit of a logit where bits are promised."""
    other_ids = sum(a.generated != r[0].generated for r in rounds for a in r[1:])
    prompt = own.prompts.prompt(n, 17, n)
    answers = []
    for _ in range(2):
        answers.append(
            await own.model.complete(prompt, max_tokens=N_OUT, temperature=0.0, logprobs=0, exact="cold")
        )
        await own.engine.cache.flush()
        await own.displace(17)
    cold, warm = answers
    other_bits = (cold.generated, cold.logprobs) != (warm.generated, warm.logprobs)
    return [
        single("answers with other ids than the cold one", "", [float(other_ids)], NONE_BAR),
        single('answers of exact="cold" with other bits', "", [float(other_bits)], NONE_BAR),
        single(
            '… tokens that exact="cold" restored',
            "tokens",
            [float(warm.stats.n_cached)],
            Bar(">=", 1, "value"),
        ),
    ]


async def fetch_window_model() -> Path:
    """gemma-3-270m. Raises: `FetchFailed`."""
    return await models.fetch_async(models.GEMMA3_270M)


RAM = Workload(
    id="P3",
    title="warm restore from RAM",
    compared=(
        "first token of a prompt whose sequence went to another one meanwhile: look-up, check, import and "
        "last token, against the same prompt cold; llama-server with its own prompt cache in RAM beside, "
        "also while another prompt is computed; the native import of its blocks against memcpy"
    ),
    measure=measure_ram,
)
DISK = Workload(
    id="P4",
    title="warm restore from disk after a restart",
    compared=(
        "first token in a new engine from files, against the same from RAM, and against llama-server's "
        "slot file saved and restored by hand plus its request"
    ),
    measure=measure_disk,
)
WINDOW = Workload(
    id="P17",
    title="warm restore with a sliding window",
    compared="as P3 on gemma-3-270m, answers compared with the cold ones; no peer",
    measure=measure_window,
    model=fetch_window_model,
)
