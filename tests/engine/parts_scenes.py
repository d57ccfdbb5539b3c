"""A backend whose sequences are taken apart and put together again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from erllama.backend import PartKind, Row, SamplingParams, Step, StepStatus
from erllama.engine.llama_backend import LlamaBackend
from erllama.options import ContextOptions, ModelOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

    OpenApart = Callable[..., "Apart"]

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=1)
KINDS = ["dense", "window", "hybrid", "hybrid_window", "recurrent"]  # tiny models whose sequences have parts
Saved = dict[tuple[int, int, PartKind], bytes]


class Apart:
    """One slot's worth of moves: computing, exporting at block ends, importing what a resume needs."""

    def __init__(self, path: Path, **options: object) -> None:
        values: dict[str, object] = {"n_ctx": 1024, "n_batch": 256, "n_seq_max": 3, "n_threads": 1, **options}
        self.backend = LlamaBackend(str(path), ModelOptions(), ContextOptions(**values).resolved())  # type: ignore[arg-type]
        self.facts = self.backend.open()
        assert self.facts.layout is not None
        self.layout = self.facts.layout
        self.greedy = self.backend.new_sampler(GREEDY)

    def tokens(self, n: int, *, seed: int = 0) -> list[int]:
        """`n` ordinary tokens, the same every time."""
        rng = np.random.default_rng(seed)
        return [int(t) for t in rng.integers(10, self.facts.n_vocab - 10, n)]

    def feed(self, slot: int, tokens: Sequence[int], pos: int) -> npt.NDArray[np.float32]:
        """Compute one piece; the logits of its last row."""
        self.backend.clear_abort()
        result = self.backend.step(Step((Row(slot, pos, tokens, self.greedy),)))
        assert result.status is StepStatus.OK
        return self.backend._live_context().logits(-1)

    def kinds(self) -> list[PartKind]:
        """Which parts this model's blocks have, in the order of their import."""
        layout = self.layout
        has = {PartKind.BASE: layout.base, PartKind.WINDOW: layout.window > 0, PartKind.STATE: layout.state}
        return [kind for kind, there in has.items() if there]

    def export(self, slot: int, start: int, end: int, part: PartKind) -> bytes:
        """The part's bytes; empty if memory has not all of it."""
        n = self.backend.export_bytes(slot, start, end, part)
        into = bytearray(n + 3)
        assert self.backend.export(slot, start, end, memoryview(into), part) == n
        assert into[n:] == b"\0\0\0"
        return bytes(into[:n])

    def compute(self, slot: int, tokens: Sequence[int], block: int) -> Saved:
        """Prefill block by block, and export every part as soon as it is there."""
        saved: Saved = {}
        for start in range(0, len(tokens), block):
            end = min(start + block, len(tokens))
            for at in range(start, end, self.facts.n_batch):
                self.feed(slot, tokens[at : min(at + self.facts.n_batch, end)], at)
            for part in self.kinds():
                saved[start, end, part] = self.export(slot, start, end, part)
                assert saved[start, end, part]
        return saved

    def needed(self, saved: Saved, n: int) -> Saved:
        """What a resume at `n`, the end of a block, needs, in the order of import."""
        first = {PartKind.BASE: 0, PartKind.WINDOW: max(0, n - self.layout.window + 1), PartKind.STATE: n - 1}
        parts = sorted(key for key in saved if key[1] <= n and key[1] > first[key[2]])
        return {key: saved[key] for kind in self.kinds() for key in parts if key[2] is kind}

    def restore(self, slot: int, saved: Saved, n: int) -> bool:
        """Import what is needed for `n` tokens; whether all was taken."""
        return all(
            self.backend.import_(slot, (start, end), (start, end), memoryview(data), part)
            for (start, end, part), data in self.needed(saved, n).items()
        )

    def go_on(self, slot: int, pos: int, n: int = 4) -> list[npt.NDArray[np.float32]]:
        """Feed the same few tokens one by one; their logits."""
        return [self.feed(slot, [token], pos + i) for i, token in enumerate(self.tokens(n, seed=9))]

    def close(self) -> None:
        """Free everything."""
        self.greedy.close()
        self.backend.close()


def equal(a: Sequence[npt.NDArray[np.float32]], b: Sequence[npt.NDArray[np.float32]]) -> bool:
    """Whether two runs gave the same bits."""
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
