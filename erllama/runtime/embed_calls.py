"""What users call to embed text: thin methods over the engine's `Embedder`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from erllama.engine.home import require_home
from erllama.errors import InvalidContent, NotSupported

from .request_calls import RequestCalls

if TYPE_CHECKING:
    import numpy.typing as npt

    from erllama.engine.embedder import Embedder
    from erllama.middleware import Middleware

    from .text_calls import Prompt


class EmbedCalls(RequestCalls):
    """The part of `Model` that embeds."""

    async def embed(
        self, text_or_tokens: Prompt, *, middleware: Sequence[Middleware] = ()
    ) -> npt.NDArray[np.float32]:
        """The embedding of a text, or of token ids: float32 of shape (n_embd,), as llama.cpp gives it.

        It is not normalised. Text is tokenised as a prompt is, with what the model wants around it.
        Raises: `NotSupported` if the model was not loaded with `ContextOptions(embeddings=True)`,
        `InvalidContent` (no tokens, or ids beyond the vocabulary), `ContextOverflow` (longer than the
        context), `BatchOverflow` (longer than `n_ubatch`, where all tokens are needed at once) and
        `EngineError`.
        Cancellation: the computation is given up.
        """
        arguments = {"text_or_tokens": text_or_tokens, "middleware": middleware}
        vector: npt.NDArray[np.float32] = await self._calls.run("embed", arguments, self._vector)
        return vector

    async def _vector(self, text_or_tokens: Prompt, middleware: object = ()) -> Any:
        return (await self._matrix([text_or_tokens]))[0]

    async def embed_batch(
        self, inputs: Sequence[Prompt], *, middleware: Sequence[Middleware] = ()
    ) -> npt.NDArray[np.float32]:
        """The embeddings of many inputs: float32 of shape (n_inputs, n_embd), in their order.

        They are computed together as far as they fit into a batch, which changes only their last bits.
        One that cannot be embedded is an error for all, before any is computed. Raises and cancels as
        `embed`.
        """
        arguments = {"inputs": inputs, "middleware": middleware}
        matrix: npt.NDArray[np.float32] = await self._calls.run("embed_batch", arguments, self._matrix)
        return matrix

    async def _matrix(self, inputs: Sequence[Prompt], middleware: object = ()) -> npt.NDArray[np.float32]:
        embedder = self._embedder()
        if isinstance(inputs, (str, bytes)) or not isinstance(inputs, (Sequence, np.ndarray)):
            raise InvalidContent("embed_batch takes a list of inputs; for one, call embed")
        return await embedder.embed([await self._input_ids(i, each) for i, each in enumerate(inputs)])

    async def _input_ids(self, index: int, given: Prompt) -> list[int]:
        if not isinstance(given, (str, Sequence, np.ndarray)):
            raise InvalidContent(f"input {index} is neither text nor token ids", detail={"index": index})
        return await self._prompt_ids(given)

    def _embedder(self) -> Embedder:
        handle = self._live()
        require_home(handle.home)
        if handle.embedder is None:
            can = hasattr(handle.backend, "embed")
            why = "load it with ContextOptions(embeddings=True)" if can else "its backend cannot"
            raise NotSupported(f"model {handle.model_id!r} was not loaded for embeddings: {why}")
        return handle.embedder
