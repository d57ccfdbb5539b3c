"""What the cache is worth: one long prompt in six situations, the tokens that each computes, and the wait.

The cold request comes first; what the others reuse is what it left behind. The restart is a real one: another
process, which finds nothing but the folder.
"""

from __future__ import annotations

import os
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

import erllama

from .demo_text import house_rules
from .progress import bar
from .second_life import Answer, Life

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from erllama.types import Completion

N_ROOMS = 60  # of the museum in the prompt: about 2,000 tokens
N_ANSWER = 8
N_AGENTS: Final = 8
N_CTX: Final = 4096  # cells for all sequences together
TIER: Final = "disk"
QUESTION: Final = "\n\nQuestion: What is to be seen in room 1?\nAnswer: In room 1 there are"
NEXT: Final = "\n\nQuestion: And in room 2?\nAnswer: In room 2 there are"
TASK: Final = (
    "\n\nYou are guide number {0}. Tell a visitor about room {0} in one sentence.\nGuide {0}: Room {0}"
)
SOURCES: Final = {"live": "memory", "ram": "RAM", TIER: "disk"}


@dataclass(frozen=True, slots=True)
class Row:
    """What one situation cost; of several requests together, the sums and the longest wait."""

    name: str
    n_prompt: int
    n_computed: int
    first_token_s: float
    sources: tuple[str, ...] = ()  # where the other tokens came from

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens by the time that all have their first token."""
        return self.n_prompt / self.first_token_s

    @classmethod
    def of(cls, name: str, answers: Sequence[Completion | Answer]) -> Row:
        """From what the engine counted."""
        stats = [answer.stats for answer in answers]
        found = {answer.cache_source for answer in answers} - {None}
        return cls(
            name,
            sum(s.n_prompt for s in stats),
            sum(s.n_computed for s in stats),
            max(s.first_token_s for s in stats),
            tuple(sorted(SOURCES.get(str(source), str(source)) for source in found)),
        )


def prompt(seed: int, ending: str, *, changed_room: int | None = None) -> str:
    """A document that no model can have seen, and what is asked about it."""
    return house_rules(N_ROOMS, seed, changed_room=changed_room) + ending


async def first_life(engine: erllama.Engine, model: erllama.Model) -> tuple[list[Row], Completion]:
    """Five of the six, and the first answer. Everything is on disk afterwards."""
    asked = prompt(1, QUESTION)
    cold = await _ask(model, "A long prompt, cold", asked)
    again = await _ask(model, "The same again", asked)
    _must_agree(cold.generated, again.generated, "again")
    more = model.tokenize(NEXT, add_special=False)
    turn = await _ask(model, "The next turn", [*again.context_tokens, *more])
    edited = await _ask(
        model, "A change in its middle", prompt(1, QUESTION, changed_room=max(2, N_ROOMS // 2))
    )
    agents = await _agents(model)
    await engine.cache.flush()
    rows = [
        Row.of("cold", [cold]),
        Row.of("again", [again]),
        Row.of("next turn", [turn]),
        Row.of("edited in the middle", [edited]),
        Row.of(f"{N_AGENTS} agents, one head", agents),
    ]
    return rows, cold


async def second_life(path: Path, folder: str, first: Completion) -> Row:
    """The first prompt again, in a process of its own."""
    _say("The same in a new process")
    life = Life(
        path=str(path),
        folder=folder,
        tier=TIER,
        n_ctx=N_CTX,
        n_answer=N_ANSWER,
        prompt=prompt(1, QUESTION),
    )
    command = [sys.executable, "-m", "erllama.cli.second_life"]
    # The child must find the erllama that runs here, installed or not.
    where = os.pathsep.join([str(Path(erllama.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    with bar("The same in a new process") as draw:
        draw(0.0)
        done = await trio.run_process(
            command,
            stdin=life.to_json(),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            env=os.environ | {"PYTHONPATH": where},
        )
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise erllama.EngineError(f"the second process failed: {said[-1] if said else done.returncode}")
    answer = Answer.from_json(done.stdout)
    _must_agree(first.generated, answer.generated, "after the restart")
    return Row.of("after a restart", [answer])


def _must_agree(first: list[int], now: list[int], when: str) -> None:
    if now != first:
        raise erllama.EngineError(f"the answer {when} differs from the first one")


async def _ask(model: erllama.Model, title: str, asked: str | list[int]) -> Completion:
    async with _watched(model, title):
        return await model.complete(asked, max_tokens=N_ANSWER, temperature=0.0)


async def _agents(model: erllama.Model) -> list[Completion]:
    """Another document as everybody's head, and a task for each; they arrive together."""
    answers: list[Completion] = []

    async def ask(number: int) -> None:
        asked = prompt(2, TASK.format(number))
        answers.append(await model.complete(asked, max_tokens=N_ANSWER, temperature=0.0))

    async with _watched(model, f"{N_AGENTS} agents with one head"), trio.open_nursery() as nursery:
        for number in range(1, N_AGENTS + 1):
            nursery.start_soon(ask, number)
    return answers


@asynccontextmanager
async def _watched(model: erllama.Model, title: str) -> AsyncIterator[None]:
    """On a terminal a bar that follows the prompts into memory; in a log a line."""
    _say(title)
    with bar(title) as draw:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_follow, model, draw)
            yield
            nursery.cancel_scope.cancel()


async def _follow(model: erllama.Model, draw: Any) -> None:
    while True:
        requests = model.requests()
        total = sum(r.n_prompt for r in requests)
        draw(sum(min(r.n_kv, r.n_prompt) for r in requests) / total if total else 0.0)
        await trio.sleep(0.1)


def _say(title: str) -> None:
    if not sys.stderr.isatty():
        print(f"{title} …", flush=True)


HEADS: Final = ("a long prompt", "tokens", "computed", "rest from", "first token", "faster")


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The table; the last column compares prompt tokens per second of waiting with the first row's."""
    return [
        (
            row.name,
            f"{row.n_prompt:,}",
            f"{row.n_computed:,}",
            ", ".join(row.sources) or "-",
            f"{row.first_token_s * 1000:,.0f} ms",
            _factor(row.tokens_per_s / rows[0].tokens_per_s),
        )
        for row in rows
    ]


def _factor(factor: float) -> str:
    """With a decimal only where it means something."""
    return f"{factor:,.0f} x" if factor >= 9.95 else f"{factor:.1f} x"


def notes(load: float | None) -> str:
    """What stands below the table. `load`: that of a machine which was busy when the demo began."""
    said = (
        f"{N_AGENTS} agents: tokens of all of them, and the wait until the last one's first token;\n"
        "faster compares prompt tokens per second of waiting, so a longer wait may be faster."
    )
    if load is not None:
        said += (
            f"\nThe machine was busy when this began (load {load:.1f}): times and factors are worth little."
        )
    return said
