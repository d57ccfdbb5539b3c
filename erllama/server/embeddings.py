"""Embeddings as every dialect wants them: vectors of unit length, and what they took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import trio
from fastapi.responses import Response

from erllama.errors import EngineUnresponsive, InvalidContent, NotSupported

from .body import refuse
from .embedding_models import opens_to_embed
from .reply import json_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from erllama import EmbeddingFacts, Model

    from .pool import Lease
    from .record import Record
    from .registry import Spec
    from .service import Service

LONGEST_TOKEN = 16  # characters; where a text is far too long, no more of it is looked at
PLAIN_CHARACTERS = 64 << 10
PLAIN_NUMBERS = 16 << 10

Input = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedAsk:
    """What a client wants, in no dialect. `truncate`: inputs that are too long lose their ends."""

    model: str
    inputs: Sequence[Input]
    dimensions: int | None = None
    truncate: bool = False
    keep_alive_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """Vectors (n_inputs, dimensions), tokens that were computed and that were cut off, and seconds."""

    vectors: npt.NDArray[np.float32]
    n_tokens: int
    n_cut: int
    load_s: float
    total_s: float


async def embed(service: Service, ask: EmbedAsk) -> Embedded:
    """Load the model and embed.

    Raises: `ModelNotFound`, `QueueFull`, `QueueTimeout`, what loading raises, `NotSupported` (501) of a model
    without embeddings, as `Model.embed`, and `EngineUnresponsive`. Cancellation: it is given up.
    """
    started, limit_s = trio.current_time(), service.settings.limits.prefill_s
    spec = service.spec(ask.model)
    entry = service.pool.entry_of(spec)
    if (entry is None or not entry.is_loaded) and not await opens_to_embed(spec, unless_told=True):
        raise _none(spec)  # nothing is loaded for that
    async with service.pool.lease(spec, keep_alive_s=ask.keep_alive_s) as lease:
        facts = _facts(lease, ask)
        with trio.move_on_after(limit_s) as scope:
            tokens = [await _tokens(lease.model, each, facts, truncate=ask.truncate) for each in ask.inputs]
            vectors = await lease.model.embed_batch([ids for ids, _ in tokens])
        if scope.cancelled_caught:
            raise EngineUnresponsive(
                "the limit limits.prefill_s was reached", detail={"limit": "prefill_s", "seconds": limit_s}
            )
        n_tokens = sum(len(ids) for ids, _ in tokens)
        service.metrics.embedded(spec.name, n_tokens)
        return Embedded(
            vectors=unit_length(vectors[:, : ask.dimensions]),
            n_tokens=n_tokens,
            n_cut=sum(n_cut for _, n_cut in tokens),
            load_s=lease.load_s,
            total_s=trio.current_time() - started,
        )


async def reply_of(made: Embedded, record: Record, content: Callable[[], dict[str, Any]]) -> Response:
    """The content as JSON; a million numbers take a second, so many are written in a worker thread."""

    def written() -> Response:
        return Response(json_bytes(content()), headers=record.headers, media_type="application/json")

    if made.vectors.size <= PLAIN_NUMBERS:
        return written()
    return await trio.to_thread.run_sync(written)


def unit_length(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Each divided by its Euclidean norm; one of zeros stays as it is."""
    norms = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    scaled: npt.NDArray[np.float32] = (vectors / np.where(norms == 0, 1.0, norms)).astype(np.float32)
    return scaled


def _none(spec: Spec) -> NotSupported:
    return NotSupported(
        f"{spec.name!r} is no model for embeddings; if it should be used as one, "
        "set embeddings = true in its table of the settings"
    )


def _facts(lease: Lease, ask: EmbedAsk) -> EmbeddingFacts:
    """What the model offers, if that is what is asked for."""
    facts, spec = lease.model.info().embeddings, lease.entry.spec
    if facts is None:
        raise _none(spec)
    if facts.pooling == "rank":
        raise NotSupported(f"{spec.name!r} scores pairs of texts, it makes no embeddings")
    if ask.dimensions not in (None, facts.n_embd, *spec.table.embedding_dimensions):
        offered = ", ".join(map(str, sorted({facts.n_embd, *spec.table.embedding_dimensions})))
        raise refuse("dimensions", f"{spec.name!r} was made for {offered}, not for {ask.dimensions}")
    if ask.dimensions is not None and ask.dimensions > facts.n_embd:
        raise refuse("dimensions", f"the vectors of {spec.name!r} have {facts.n_embd}")
    return facts


async def _tokens(
    model: Model, given: Input, facts: EmbeddingFacts, *, truncate: bool
) -> tuple[list[int], int]:
    """The token ids of an input, and how many of them had to go."""
    n_max = facts.n_tokens_max
    if isinstance(given, str):
        if not truncate:
            return await model.tokenize_async(given), 0
        ids = await model.tokenize_async(given[: max(PLAIN_CHARACTERS, n_max * LONGEST_TOKEN)])
    else:
        ids = given
    if not truncate or len(ids) <= n_max:
        return ids, 0
    n_tail = _n_tail(ids, model.tokenize(""))
    return [*ids[: n_max - n_tail], *ids[len(ids) - n_tail :]], len(ids) - n_max


def _n_tail(ids: list[int], around_nothing: list[int]) -> int:
    """How many tokens at the end are there for the model: they end every text."""
    n = len(around_nothing)
    while n and ids[-n:] != around_nothing[-n:]:
        n -= 1
    return n


def check_inputs(inputs: Sequence[Input]) -> None:
    """Raise `InvalidContent` where there is nothing to embed, naming the first such input."""
    if not inputs:
        raise InvalidContent("input: there is nothing in it", detail={"key": "input"})
    for index, each in enumerate(inputs):
        if not len(each):
            raise InvalidContent(f"input: number {index} is empty", detail={"key": "input"})
