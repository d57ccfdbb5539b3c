"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, cast

from fastapi.responses import JSONResponse

from .body import check_count
from .embeddings import EmbedAsk, check_inputs, embed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .embeddings import Input
    from .openai_body import EmbeddingsBody
    from .service import Service


async def openai_embeddings(service: Service, body: EmbeddingsBody) -> JSONResponse:
    """One object for each input, in their order. Raises: `InvalidOption`, `InvalidContent`, as `embed`."""
    inputs = _inputs(body)
    check_count("input", inputs, service.settings.limits.max_embedding_inputs)
    check_inputs(inputs)
    made = await embed(service, EmbedAsk(model=body.model, inputs=inputs, dimensions=body.dimensions))
    as_text = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _base64(vector) if as_text else vector.tolist()}
        for index, vector in enumerate(made.vectors)
    ]
    usage = {"prompt_tokens": made.n_tokens, "total_tokens": made.n_tokens}
    return JSONResponse({"object": "list", "data": data, "model": body.model, "usage": usage})


def _inputs(body: EmbeddingsBody) -> list[Input]:
    """Token ids by themselves are one input."""
    given: Any = body.input
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    return cast("list[Input]", given)


def _base64(vector: npt.NDArray[np.float32]) -> str:
    """Little-endian float32, as OpenAI's clients decode it."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
