"""Which models are opened for embeddings, and with what context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from erllama.errors import MalformedGguf
from erllama.models.gguf import ENCODERS, embeds, read_metadata

if TYPE_CHECKING:
    from pathlib import Path

    from erllama.options import ContextOptions

    from .registry import Spec
    from .settings import ModelTable

N_CTX_MAX = 2048  # longer texts are for who asks for them: what is computed at once takes memory
SCORES_MAX = 1 << 28  # llama.cpp keeps a score of every token of the vocabulary for every row: 1 GiB of them


async def context_of(table: ModelTable, file: Path) -> ContextOptions:
    """The options of a model's context; for embeddings where its file says so, unless the settings do.

    Raises: `MalformedGguf`, `InvalidOption`, `UnknownOption`. Cancellation: waits for the file to be read.
    """
    wanted = table.wants_embeddings
    if wanted is False or not await trio.Path(file).is_file():  # loading will say what is wrong with it
        return table.context_options()
    metadata = await trio.to_thread.run_sync(read_metadata, file)
    if wanted is None and not embeds(metadata):
        return table.context_options()
    return table.context_options(**_shape(metadata), embeddings=True)


async def opens_to_embed(spec: Spec, *, unless_told: bool = False) -> bool:
    """Whether a model would be opened for embeddings; `unless_told` where its file does not tell."""
    if spec.table.wants_embeddings is not None:
        return spec.table.wants_embeddings
    if spec.file is None or not await trio.Path(spec.file).is_file():
        return unless_told
    try:
        return embeds(await trio.to_thread.run_sync(read_metadata, spec.file))
    except MalformedGguf:  # loading it tells more
        return unless_told


def _shape(metadata: dict[str, Any]) -> dict[str, int]:
    """As long texts as the model was made for, and an encoder's rows for one of them at once."""
    architecture = metadata.get("general.architecture")
    if not embeds(metadata):
        return {}
    n_ctx = min(int(metadata.get(f"{architecture}.context_length") or N_CTX_MAX), N_CTX_MAX)
    if architecture not in ENCODERS:
        return {"n_ctx": n_ctx}
    n_vocab = int(metadata.get("tokenizer.ggml.tokens") or 1)
    return {"n_ctx": n_ctx, "n_batch": max(min(n_ctx, 512), min(n_ctx, SCORES_MAX // n_vocab))}
