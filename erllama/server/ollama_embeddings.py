"""POST /api/embed, and the older /api/embeddings for one text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .body import check_count, ignored_note
from .duration import seconds_of
from .embeddings import EmbedAsk, check_inputs, embed, reply_of
from .ollama_reply import nanoseconds

if TYPE_CHECKING:
    from fastapi.responses import Response

    from .embeddings import Embedded
    from .ollama_body import EmbedBody, OllamaEmbeddingsBody
    from .record import Record
    from .service import Service


async def ollama_embed(service: Service, body: EmbedBody, record: Record) -> Response:
    """A vector for each text; without any the model is loaded, or with `keep_alive: 0` unloaded."""
    inputs = [body.input] if isinstance(body.input, str) else body.input
    if inputs == [""]:
        inputs = []
    check_count("input", inputs, service.settings.limits.max_embedding_inputs)
    ask = EmbedAsk(
        model=body.model,
        inputs=inputs,
        dimensions=body.dimensions,
        truncate=body.truncate is not False,
        keep_alive_s=seconds_of(body.keep_alive),
    )
    if inputs:
        check_inputs(inputs)
    made = await _embedded(service, ask, body, record)
    counts = {
        "total_duration": nanoseconds(made.total_s),
        "load_duration": nanoseconds(made.load_s),
        "prompt_eval_count": made.n_tokens,
    }
    return await reply_of(
        made, record, lambda: {"model": body.model, "embeddings": made.vectors.tolist(), **counts}
    )


async def ollama_embeddings(service: Service, body: OllamaEmbeddingsBody, record: Record) -> Response:
    """One vector; none without a text."""
    ask = EmbedAsk(
        model=body.model,
        inputs=[body.prompt] if body.prompt else [],
        truncate=True,
        keep_alive_s=seconds_of(body.keep_alive),
    )
    made = await _embedded(service, ask, body, record)
    return await reply_of(made, record, lambda: {"embedding": made.vectors[0].tolist() if ask.inputs else []})


async def _embedded(
    service: Service, ask: EmbedAsk, body: EmbedBody | OllamaEmbeddingsBody, record: Record
) -> Embedded:
    record.model = body.model
    made = await embed(service, ask)
    record.note(ignored_note(list(body.model_extra or ())))
    if made.n_cut:
        record.note([f"x-erllama-cut-tokens: {made.n_cut}"])
    return made
