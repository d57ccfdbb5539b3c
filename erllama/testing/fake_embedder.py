"""Embeddings made of arithmetic: a vector is a hash of every token that its lane was given."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from erllama.backend import EmbedResult, EmbedRow, StepStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from erllama.types import EmbeddingFacts


def fake_vector(tokens: Sequence[int], n_embd: int) -> npt.NDArray[np.float32]:
    """What an input becomes: numbers from -1 to 1, (n_embd,)."""
    digest = hashlib.shake_128(repr(list(tokens)).encode()).digest(2 * n_embd)
    return (np.frombuffer(digest, "<i2") / 32768).astype(np.float32)


@dataclass
class FakeEmbedder:
    """Lanes, and what was asked. `before_call` sees each call first and may answer it, or raise."""

    facts: EmbeddingFacts
    delay_s: float = 0.0
    before_call: Callable[[list[EmbedRow]], EmbedResult | None] | None = None
    calls: list[list[EmbedRow]] = field(default_factory=list, init=False)
    _lanes: dict[int, list[int]] = field(default_factory=dict, init=False)
    _abort: threading.Event = field(default_factory=threading.Event, init=False)

    def embed(self, rows: Sequence[EmbedRow], budget_s: float | None = None) -> EmbedResult:
        """Check what llama.cpp would assert on, then compute. See `OptionalBackend.embed`."""
        facts = self.facts
        self.calls.append(list(rows))
        lanes = [row.lane for row in rows]
        assert len(set(lanes)) == len(lanes) <= facts.n_lanes, f"lanes {lanes} of {facts.n_lanes}"
        assert 0 < sum(len(row.tokens) for row in rows) <= facts.n_rows
        assert all(row.pos == 0 for row in rows) or len(rows) == 1
        assert not facts.whole or all(row.pos == 0 and row.is_last for row in rows)
        answer = self.before_call(list(rows)) if self.before_call else None
        if answer is None and self.delay_s and self._abort.wait(self.delay_s):
            answer = EmbedResult(status=StepStatus.ABORTED)
        if answer is not None:
            return answer
        return EmbedResult(status=StepStatus.OK, vectors=tuple(map(self._vector, rows)))

    def _vector(self, row: EmbedRow) -> npt.NDArray[np.float32] | None:
        held = self._lanes.get(row.lane, []) if row.pos else []
        assert len(held) == row.pos, f"lane {row.lane} holds {len(held)} tokens, the row starts at {row.pos}"
        self._lanes[row.lane] = [*held, *row.tokens]
        return fake_vector(self._lanes[row.lane], self.facts.n_embd) if row.is_last else None

    def abort(self) -> None:
        """See `OptionalBackend.abort_embed`."""
        self._abort.set()

    def clear_abort(self) -> None:
        """See `OptionalBackend.clear_abort_embed`."""
        self._abort.clear()
