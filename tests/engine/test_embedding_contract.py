"""One contract for embedding, every backend: the fake's arithmetic and llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from erllama.backend import EmbedRow, StepStatus
from erllama.engine.llama_backend import LlamaBackend
from erllama.options import ContextOptions, ModelOptions
from erllama.testing import FakeBackend, FakeEmbedder
from erllama.types import EmbeddingFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.model

KINDS = ["fake", "bert", "embedding", "dense", "window", "recurrent", "hybrid"]
OPTIONS = ContextOptions(n_ctx=256, n_batch=128, n_seq_max=4, n_threads=1, embeddings=True).resolved()
FAKE = EmbeddingFacts(n_embd=64, pooling="last", n_ctx=256, n_rows=128, n_lanes=4, whole=False)


@pytest.fixture(params=KINDS)
def backend(
    request: pytest.FixtureRequest, tiny_gguf: Callable[[str], Path]
) -> Iterator[FakeBackend | LlamaBackend]:
    """Each backend, closed."""
    if request.param == "fake":
        made: FakeBackend | LlamaBackend = FakeBackend(embedder=FakeEmbedder(FAKE))
    else:
        made = LlamaBackend(str(tiny_gguf(request.param)), ModelOptions(), OPTIONS)
    yield made
    made.close()


def vectors(backend: FakeBackend | LlamaBackend, *rows: EmbedRow) -> list[np.ndarray | None]:
    backend.clear_abort_embed()
    result = backend.embed(rows)
    assert result.status is StepStatus.OK
    assert len(result.vectors) == len(rows)
    return list(result.vectors)


def near(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    assert a is not None
    assert b is not None
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) > 0.98


def test_facts_hold(backend: FakeBackend | LlamaBackend) -> None:
    """As long, as many rows and as many lanes as they say; the vectors are as wide."""
    facts = backend.open().embeddings
    assert facts is not None
    (vector,) = vectors(backend, EmbedRow(0, 0, [9] * min(facts.n_rows, facts.n_tokens_max)))
    assert vector is not None
    assert vector.shape == (facts.n_embd,)
    rows = [EmbedRow(lane, 0, [20 + lane, 30]) for lane in range(facts.n_lanes)]
    assert facts.n_lanes >= 4
    assert len(vectors(backend, *rows)) == facts.n_lanes


def test_lanes_do_not_touch(backend: FakeBackend | LlamaBackend) -> None:
    """Each input's vector is its own, in any lane, and nothing is left for the next call."""
    backend.open()
    inputs = [[40 + 3 * i + k for k in range(5 + i)] for i in range(4)]
    alone = [vectors(backend, EmbedRow(0, 0, ids))[0] for ids in inputs]
    together = vectors(backend, *(EmbedRow(lane, 0, ids) for lane, ids in enumerate(inputs)))
    swapped = vectors(backend, *(EmbedRow(lane, 0, ids) for lane, ids in enumerate(inputs[::-1])))
    assert all(map(near, alone, together))
    assert all(map(near, alone, swapped[::-1]))
    assert not near(alone[0], alone[1])
    again = vectors(backend, EmbedRow(0, 0, inputs[0]))[0]
    assert again is not None
    assert (again == alone[0]).all()


def test_pieces_are_the_whole(backend: FakeBackend | LlamaBackend) -> None:
    """Where an input need not be computed at once; only the last piece has a vector."""
    facts = backend.open().embeddings
    assert facts is not None
    if facts.whole:
        assert facts.n_tokens_max <= facts.n_rows
        return
    ids = [30 + i % 90 for i in range(100)]
    (whole,) = vectors(backend, EmbedRow(0, 0, ids))
    (first,) = vectors(backend, EmbedRow(0, 0, ids[:70], False))
    assert first is None
    (second,) = vectors(backend, EmbedRow(0, 70, ids[70:]))
    assert near(whole, second)
    vectors(backend, EmbedRow(0, 0, ids[:50], False))  # given up
    assert near(whole, vectors(backend, EmbedRow(0, 0, ids))[0])


def test_generating_knows_nothing_of_it(backend: FakeBackend | LlamaBackend) -> None:
    """Those who generate too hold no token of it."""
    facts = backend.open()
    if facts.generates:
        vectors(backend, EmbedRow(0, 0, [9, 8, 7]))
        assert backend.n_kv(0) == 0
    else:
        assert facts.layout is None
        assert facts.shape_hash is None


def test_a_budget_that_runs_out(tiny_gguf: Callable[[str], Path]) -> None:
    """The call ends early and is told apart; the next one is right."""
    for kind in ("embedding", "dense"):
        options = ContextOptions(
            n_ctx=8192, n_batch=4096, n_threads=1, embeddings=True, pooling="mean"
        ).resolved()
        made = LlamaBackend(str(tiny_gguf(kind)), ModelOptions(), options)
        made.open()
        before = vectors(made, EmbedRow(0, 0, [9, 8, 7]))
        result = made.embed([EmbedRow(0, 0, [30 + i % 90 for i in range(4000)])], 0.001)
        assert result.status is StepStatus.TIMEOUT
        after = vectors(made, EmbedRow(0, 0, [9, 8, 7]))
        assert before[0] is not None
        assert (before[0] == after[0]).all()
        made.close()
