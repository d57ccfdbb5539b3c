"""`python -m erllama.cli.second_life`: ask one prompt in a process that knows nothing but a cache folder.

The demo starts it to show that what the first process read is still there. Standard input is a `Life`,
standard output an `Answer`, both as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

import trio

import erllama
from erllama.types import Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What to load, where its cache is, what to ask."""

    path: str
    folder: str
    tier: str
    n_ctx: int
    n_answer: int
    prompt: str

    def to_json(self) -> bytes:
        """As the process reads it."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the demo needs of a `Completion`."""

    generated: list[int]
    cache_source: str | None
    stats: Stats

    @classmethod
    def from_json(cls, data: bytes) -> Answer:
        """As the process wrote it."""
        fields = json.loads(data)
        return cls(**fields | {"stats": Stats(**fields["stats"])})


async def ask(life: Life) -> Answer:
    """Load the model, ask once."""
    tiers = [erllama.DiskTier(life.tier, life.folder)]
    context = erllama.ContextOptions(n_ctx=life.n_ctx)
    async with erllama.open_engine(tiers=tiers) as engine:
        model = await engine.load_model(life.path, context=context, tier=life.tier)
        done = await model.complete(life.prompt, max_tokens=life.n_answer, temperature=0.0)
    return Answer(generated=done.generated, cache_source=done.cache_source, stats=done.stats)


def main() -> None:
    """Read, ask, write."""
    life = Life(**json.load(sys.stdin))
    print(json.dumps(asdict(trio.run(ask, life))))


if __name__ == "__main__":
    main()
