"""POST /api/embed, and the older /api/embeddings for one text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.responses import JSONResponse

from .body import check_count, ignored_note
from .duration import seconds_of
from .embeddings import EmbedAsk, check_inputs, embed
from .ollama_reply import nanoseconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .embeddings import Embedded
    from .ollama_body import EmbedBody, OllamaEmbeddingsBody
    from .service import Service


async def ollama_embed(service: Service, body: EmbedBody) -> JSONResponse:
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
    made = await embed(service, ask)
    content = {
        "model": body.model,
        "embeddings": made.vectors.tolist(),
        "total_duration": nanoseconds(made.total_s),
        "load_duration": nanoseconds(made.load_s),
        "prompt_eval_count": made.n_tokens,
    }
    return _reply(content, made, list(body.model_extra or ()))


async def ollama_embeddings(service: Service, body: OllamaEmbeddingsBody) -> JSONResponse:
    """One vector; none without a text."""
    ask = EmbedAsk(
        model=body.model,
        inputs=[body.prompt] if body.prompt else [],
        truncate=True,
        keep_alive_s=seconds_of(body.keep_alive),
    )
    made = await embed(service, ask)
    vectors = made.vectors.tolist()
    return _reply({"embedding": vectors[0] if vectors else []}, made, list(body.model_extra or ()))


def _reply(content: dict[str, Any], made: Embedded, extra: Sequence[str]) -> JSONResponse:
    notes = [*ignored_note(extra), *([f"x-erllama-cut-tokens: {made.n_cut}"] if made.n_cut else [])]
    headers = dict(note.split(": ", 1) for note in notes)
    return JSONResponse(content, headers=headers)
