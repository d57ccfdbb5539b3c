"""What the engine costs: the public API against a bare loop over the binding, and the event loop's lateness.

    python tools/bench_step.py [--runs 7] [--tokens 96] [--model PATH] [--json FILE]

Both sides do the same work: same prompts, same greedy tokens (compared), same options, whole wall clock.
Runs are interleaved, and the ratio is the median over neighbouring pairs, so a machine that slows down
halfway slows both. The heartbeat is a task that wants to wake every 10 ms while a model loads,
prefills and decodes; its lateness is what any other task in the program would see.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trio

import erllama
from erllama import llama, models

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BEAT_S = 0.010
N_CTX = 2048
PROMPTS = tuple(
    f"Once upon a time, a {who} went to"
    for who in ("king", "queen", "miller", "fox", "sailor", "baker", "giant", "mouse")
)
LONG_PROMPT = "The quick brown fox jumps over the lazy dog. " * 120


@dataclass(frozen=True)
class Comparison:
    """Tokens per second of both sides. `ratio` is API over bare, median over pairs of runs."""

    name: str
    bare_per_s: float
    api_per_s: float
    ratio: float
    spread: float  # half the distance between the quartiles of the ratio


@dataclass(frozen=True)
class Lateness:
    """How late a 10 ms heartbeat was, in milliseconds."""

    phase: str
    n_beats: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class Bare:
    """The loop anybody would write over the binding: prefill, then a row per sequence and step."""

    def __init__(self, path: Path, n_seq: int) -> None:
        options = erllama.ContextOptions(n_ctx=N_CTX).resolved()
        assert options.n_threads is not None
        self.n_threads = options.n_threads
        self.model = llama.Model.open(str(path), erllama.ModelOptions())
        params = llama.ContextParams(
            n_ctx=N_CTX, n_batch=options.n_batch, n_ubatch=options.n_ubatch, n_seq_max=n_seq + 1,
            n_outputs_max=n_seq, n_threads=options.n_threads, n_threads_batch=options.n_threads_batch,
        )  # fmt: skip
        self.context = llama.Context.open(self.model, params)
        self.batch = llama.Batch(options.n_batch, n_seq + 1)

    def run(self, prompts: list[list[int]], n_tokens: int, banned: dict[int, float]) -> list[list[int]]:
        """The generated ids of each prompt."""
        context, batch = self.context, self.batch
        params = llama.SamplerParams(
            temperature=0.0, top_k=40, top_p=0.95, min_p=0.05, repetition_penalty=1.0, seed=1,
            logit_bias=tuple(sorted(banned.items())),
        )  # fmt: skip
        chains = [llama.SamplerChain(self.model.vocab, params) for _ in prompts]
        generated: list[list[int]] = [[] for _ in prompts]
        last = [prompt[-1] for prompt in prompts]
        pos = [len(prompt) - 1 for prompt in prompts]
        for seq_id in range(len(prompts)):
            context.memory.rm(seq_id)
        batch.clear()
        for seq_id, prompt in enumerate(prompts):
            batch.add(seq_id, prompt[:-1], 0, output="none")
        assert context.decode(batch) == 0
        for _ in range(n_tokens):
            batch.clear()
            rows = [batch.add(i, (last[i],), pos[i]) for i in range(len(prompts))]
            assert context.decode(batch) == 0
            for i, row in enumerate(rows):
                last[i] = chains[i].sample(context, row)
                generated[i].append(last[i])
                pos[i] += 1
        for chain in chains:
            chain.close()
        return generated

    def close(self) -> None:
        self.context.close()
        self.model.close()


async def _api(
    model: erllama.Model, prompts: list[list[int]], n_tokens: int, banned: dict[int, float]
) -> list[list[int]]:
    generated: list[list[int]] = [[] for _ in prompts]

    async def ask(i: int) -> None:
        # Without cache: the bare loop computes every prompt, every time.
        done = await model.complete(
            prompts[i], max_tokens=n_tokens, temperature=0.0, logit_bias=banned, cache="off"
        )
        generated[i] = done.generated

    async with trio.open_nursery() as nursery:
        for i in range(len(prompts)):
            nursery.start_soon(ask, i)
    return generated


async def compare(path: Path, n_seq: int, n_runs: int, n_tokens: int) -> Comparison:
    """Interleaved runs of both sides."""
    bare = Bare(path, n_seq)
    vocab = bare.model.vocab
    prompts = [vocab.tokenize(text, add_special=True, parse_special=True) for text in PROMPTS[:n_seq]]
    # Ended early, a run would do less work: end-of-generation tokens are forbidden to both.
    banned = {t: -math.inf for t in range(bare.model.facts.n_vocab) if vocab.is_eog(t)}
    seconds: dict[str, list[float]] = {"bare": [], "api": []}
    # As many threads as the bare loop has, fixed: its pool still spins for a moment after each of its runs,
    # which the engine would take for a busy machine.
    context = erllama.ContextOptions(n_ctx=N_CTX, n_seq_max=n_seq, n_threads=bare.n_threads)
    async with erllama.open_engine() as engine:
        model = await engine.load_model(path, context=context)
        for run in range(n_runs + 1):
            gc.collect()
            started = time.perf_counter()
            expected = bare.run(prompts, n_tokens, banned)
            between = time.perf_counter()
            got = await _api(model, prompts, n_tokens, banned)
            ended = time.perf_counter()
            if n_seq == 1 and got != expected:  # co-batched steps differ in shape, so texts may too
                raise SystemExit(f"the two sides disagree: {got[0][:8]} and {expected[0][:8]}")
            if run > 0:  # the first run warms both up
                seconds["bare"].append(between - started)
                seconds["api"].append(ended - between)
    bare.close()
    ratios = [b / a for b, a in zip(seconds["bare"], seconds["api"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    total = n_seq * n_tokens
    return Comparison(
        name=f"{n_seq} sequence{'s' if n_seq > 1 else ''}",
        bare_per_s=total / statistics.median(seconds["bare"]),
        api_per_s=total / statistics.median(seconds["api"]),
        ratio=statistics.median(ratios),
        spread=(quartiles[2] - quartiles[0]) / 2,
    )


async def _beat(lateness_ms: list[float]) -> None:
    while True:
        due = trio.current_time() + BEAT_S
        await trio.sleep_until(due)
        lateness_ms.append((trio.current_time() - due) * 1000)


@asynccontextmanager
async def _heartbeat(phase: str, into: list[Lateness]) -> AsyncIterator[None]:
    beats: list[float] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_beat, beats)
        await trio.lowlevel.checkpoint()
        yield
        nursery.cancel_scope.cancel()
    beats.sort()
    n = len(beats)
    if n:
        p50, p99 = beats[n // 2], beats[min(n - 1, math.ceil(n * 0.99) - 1)]
        into.append(Lateness(phase, n, p50, p99, beats[-1]))


async def heartbeat(path: Path) -> list[Lateness]:
    """Lateness during load, prefill and decode, and idle for comparison."""
    found: list[Lateness] = []
    async with _heartbeat("idle", found):
        await trio.sleep(1)
    async with erllama.open_engine() as engine:
        async with _heartbeat("load", found):
            model = await engine.load_model(path, context=erllama.ContextOptions(n_ctx=4096))
        async with _heartbeat("prefill", found):
            await model.complete(LONG_PROMPT, max_tokens=1, temperature=0.0)
        async with _heartbeat("decode", found):
            await model.complete(PROMPTS[0], max_tokens=128, temperature=0.0)
        async with _heartbeat("unload", found):
            await model.unload()
    return found


def report(comparisons: list[Comparison], beats: list[Lateness], load: float) -> None:
    """Two tables, and a word of warning where others were computing too."""
    if load > 0.5:
        print(f"The machine was not idle (load {load:.1f}): figures of a busy machine say little.\n")
    print(f"{'':<14}{'bare':>12}{'API':>12}{'API/bare':>12}{'±':>8}")
    for c in comparisons:
        print(f"{c.name:<14}{c.bare_per_s:>8.1f} t/s{c.api_per_s:>8.1f} t/s{c.ratio:>12.3f}{c.spread:>8.3f}")
    print(f"\n{'heartbeat':<14}{'beats':>12}{'p50':>12}{'p99':>12}{'max':>12}")
    for b in beats:
        print(f"{b.phase:<14}{b.n_beats:>12}{b.p50_ms:>9.2f} ms{b.p99_ms:>9.2f} ms{b.max_ms:>9.2f} ms")


async def bench(args: argparse.Namespace) -> dict[str, object]:
    """Everything, once."""
    path = args.model or models.default_model()
    load = os.getloadavg()[0]
    comparisons = [await compare(path, n_seq, args.runs, args.tokens) for n_seq in (1, 8)]
    beats = await heartbeat(path)
    report(comparisons, beats, load)
    return {
        "model": path.name,
        "n_tokens": args.tokens,
        "n_runs": args.runs,
        "load_before": load,
        "throughput": [asdict(c) for c in comparisons],
        "heartbeat": [asdict(b) for b in beats],
    }


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="What the engine costs on top of the binding.")
    parser.add_argument("--runs", type=int, default=7, help="pairs of runs (7)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens per sequence and run (96)")
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the default model)")
    parser.add_argument("--json", type=Path, help="write the result there as well as printing it")
    args = parser.parse_args(argv)
    text = json.dumps(trio.run(bench, args), indent=1)
    print(f"\n{text}")
    if args.json:
        args.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
