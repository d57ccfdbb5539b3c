"""`erllama demo`: an answer, eight prompts that show batching, a long one in six situations for the cache."""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

import erllama
from erllama.machine import busy_load

from . import chart
from .progress import bar, default_path, show_warnings
from .warm_demo import HEADS, N_CTX, TIER, Row, cells, first_life, notes, second_life

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from erllama.types import Completion

QUESTION = "Explain in three sentences why the sky is blue."
TOPICS = (
    "the moon",
    "a violin",
    "the sea",
    "bread",
    "a bicycle",
    "winter",
    "a library",
    "honey bees",
)
N_SEQUENCES = len(TOPICS)
N_ANSWER = 160  # tokens of the first answer at most
N_TOKENS = 48  # per prompt in the comparison
AFTER_AGAIN = 2  # where the restart stands in the table


@dataclass(frozen=True, slots=True)
class Round:
    """Eight answers, and the wall-clock time they took together."""

    name: str
    elapsed_s: float
    n_tokens: int

    @property
    def per_second(self) -> float:
        return self.n_tokens / self.elapsed_s


def run(arguments: argparse.Namespace) -> None:
    """Load the default model and show it."""
    with show_warnings():
        trio.run(_demo)


async def _demo() -> None:
    path = await default_path()
    load = busy_load()
    with tempfile.TemporaryDirectory(prefix="erllama-demo-") as folder:
        rounds, rows, first = await _first_life(path, folder)
        rows.insert(AFTER_AGAIN, await second_life(path, folder, first))
    print()
    chart.print_table(*_rounds_table(rounds))
    print()
    chart.print_table(HEADS, cells(rows))
    print(notes(load))
    print()
    chart.print_bars("time to the first token", [(row.name, row.first_token_s) for row in rows])


async def _first_life(path: Path, folder: str) -> tuple[list[Round], list[Row], Completion]:
    context = erllama.ContextOptions(n_ctx=N_CTX, n_seq_max=N_SEQUENCES)
    started = time.perf_counter()
    async with erllama.open_engine(tiers=[erllama.DiskTier(TIER, folder)]) as engine:
        with bar(f"Loading {path.name}") as draw:
            model = await engine.load_model(path, context=context, tier=TIER, progress=draw)
        print(f"{model.model_id} loaded in {time.perf_counter() - started:.1f} s\n")
        await _answer(model)
        rounds = [await _one_by_one(model), await _together(model)]
        return rounds, *await first_life(engine, model)


def _chat(text: str) -> str:
    """The prompt in the form this model was trained on."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


async def _answer(model: Any) -> None:
    print(f"> {QUESTION}\n")
    async with model.stream(_chat(QUESTION), max_tokens=N_ANSWER, temperature=0.0) as events:
        async for event in events:
            match event:
                case erllama.Token(text=text):
                    print(text, end="", flush=True)
                case erllama.Done(completion=completion):
                    print(f"\n\n{_speed(completion)}\n")


def _speed(completion: Completion) -> str:
    stats = completion.stats
    n_decoded = stats.n_generated - 1  # the first token comes out of the prefill
    rate = n_decoded / stats.decode_s if stats.decode_s else 0.0
    first = f"first token after {stats.first_token_s * 1000:.0f} ms"
    return f"{stats.n_generated} tokens, {rate:.1f} tokens/s, {first}"


async def _one_by_one(model: Any) -> Round:
    with _counting("Eight prompts one by one") as count:
        started = time.perf_counter()
        for topic in TOPICS:
            await _short_answer(model, topic, count)
        return Round("one by one", time.perf_counter() - started, count.n_tokens)


async def _together(model: Any) -> Round:
    with _counting("The same eight together") as count:
        started = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for topic in TOPICS:
                nursery.start_soon(_short_answer, model, topic, count)
        return Round("together", time.perf_counter() - started, count.n_tokens)


@contextmanager
def _counting(title: str) -> Iterator[Counter]:
    """A bar on a terminal; in a log, one line when the round begins and one when it is over."""
    if not sys.stderr.isatty():
        print(f"{title} …", flush=True)
    with bar(title) as draw:
        count = Counter(draw)
        yield count
    if not sys.stderr.isatty():
        print(f"  {count.n_tokens} tokens", flush=True)


class Counter:
    """Counts tokens and draws how many of those to come have come."""

    def __init__(self, draw: Callable[[float], None]) -> None:
        self.n_tokens = 0
        self._draw = draw

    def add(self) -> None:
        self.n_tokens += 1
        self._draw(self.n_tokens / (N_SEQUENCES * N_TOKENS))


async def _short_answer(model: Any, topic: str, count: Counter) -> None:
    prompt = _chat(f"Write a short poem about {topic}.")
    # Without cache: the second round must not profit from the first.
    async with model.stream(prompt, max_tokens=N_TOKENS, temperature=0.0, cache="off") as events:
        async for event in events:
            if isinstance(event, erllama.TokenId):
                count.add()


def _rounds_table(rounds: list[Round]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and cells: what both rounds took."""
    heads = (f"{N_SEQUENCES} prompts", "tokens", "seconds", "tokens/s", "speed-up")
    return heads, [
        (
            r.name,
            str(r.n_tokens),
            f"{r.elapsed_s:.1f}",
            f"{r.per_second:.1f}",
            f"{r.per_second / rounds[0].per_second:.2f} x",
        )
        for r in rounds
    ]
