"""Low-level read-outs for tools and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from erllama.errors import BatchOverflow, DecodeFailed

from .batch import Batch

if TYPE_CHECKING:
    from .context import Context
    from .vocab import TokenIds


def forward_argmax(context: Context, tokens: TokenIds, seq_id: int = 0) -> list[int]:
    """The most likely next token after each prefix of `tokens`, from whole-sequence forward passes.

    Uses (and afterwards empties) sequence `seq_id`. Raises: `BatchOverflow` for more tokens than the
    context holds, `DecodeFailed`.
    """
    ids = context.model.vocab.checked(tokens)
    if len(ids) > context.n_ctx_seq:
        raise BatchOverflow(f"{len(ids)} tokens, a sequence holds {context.n_ctx_seq}")
    piece = min(context.n_batch, context.n_outputs_max)
    batch = Batch(piece, context.n_seq_max)
    best: list[int] = []
    context.memory.rm(seq_id)
    for start in range(0, len(ids), piece):
        batch.clear()
        first = batch.add(seq_id, ids[start : start + piece], start, output="all")
        rc = context.decode(batch)
        if rc != 0:
            raise DecodeFailed(rc=rc)
        best += [int(context.logits(first + k).argmax()) for k in range(batch.n_tokens)]
    context.memory.rm(seq_id)
    return best
