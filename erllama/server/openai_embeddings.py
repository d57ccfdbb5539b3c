"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, cast

from .body import check_count, ignored_note
from .embeddings import EmbedAsk, check_inputs, embed, reply_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from fastapi.responses import Response

    from .embeddings import Embedded, Input
    from .openai_body import EmbeddingsBody
    from .record import Record
    from .service import Service


async def openai_embeddings(service: Service, body: EmbeddingsBody, record: Record) -> Response:
    """One object for each input, in their order. Raises: `InvalidOption`, `InvalidContent`, as `embed`."""
    inputs = _inputs(body)
    check_count("input", inputs, service.settings.limits.max_embedding_inputs)
    check_inputs(inputs)
    record.model = body.model
    record.note(ignored_note(["user"] if body.user is not None else []))
    made = await embed(service, EmbedAsk(model=body.model, inputs=inputs, dimensions=body.dimensions))
    return await reply_of(made, record, lambda: _content(body, made))


def _content(body: EmbeddingsBody, made: Embedded) -> dict[str, Any]:
    as_text = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _base64(vector) if as_text else vector.tolist()}
        for index, vector in enumerate(made.vectors)
    ]
    usage = {"prompt_tokens": made.n_tokens, "total_tokens": made.n_tokens}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}


def _inputs(body: EmbeddingsBody) -> list[Input]:
    """Token ids by themselves are one input."""
    given: Any = body.input
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    return cast("list[Input]", given)


def _base64(vector: npt.NDArray[np.float32]) -> str:
    """Little-endian float32, as OpenAI's clients decode it."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
