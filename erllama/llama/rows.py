"""Sampling several rows of a decode in one native call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from erllama.errors import ErllamaError, HandleClosed, NoLogits, NotSupported

from .ffi import take_error
from .handle import Several

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .context import Context
    from .ffi import Library
    from .sampler import SamplerChain


def sample_rows(
    context: Context, chains: Sequence[SamplerChain], rows: Sequence[int]
) -> list[int | ErllamaError]:
    """For each chain what `SamplerChain.sample` chooses from its row of the last decode, or raises.

    Equal token for token; greedy chains, and those with a `top_k` of at most 128, do not look at the whole
    vocabulary where only biases come before that. `chains` are distinct.
    Raises: `HandleClosed` (the context). A row's error is its own, the others are sampled.
    """
    vocab = context.model.vocab
    with Several([chain.handle for chain in chains]) as ptrs, context.handle as ctx:
        found: list[ErllamaError | None] = []
        asked = []
        for chain, i, there, ptr in zip(chains, rows, context.with_logits(rows), ptrs, strict=True):
            if there and ptr is not None and chain.vocab is vocab:
                chain.row.output = i
                asked.append(chain.row)
                found.append(None)
            else:
                found.append(_refusal(chain.vocab is vocab, there, i))
        context.lib.sample_rows(ctx, context.n_vocab, asked, len(asked))
        return [
            _answer(context.lib, chain) if refusal is None else refusal
            for chain, refusal in zip(chains, found, strict=True)
        ]


def _answer(lib: Library, chain: SamplerChain) -> int | ErllamaError:
    row = chain.row
    if row.error.kind:
        return take_error(row.error, "sampling_next", lib.ffi.string)
    token: int = row.token
    return token if token >= 0 else chain._error(token)


def _refusal(fits: bool, there: bool, i: int) -> ErllamaError:
    if not fits:
        return NotSupported("a sampler fits the model it was made for, and no other")
    if not there:
        return NoLogits(f"row {i} of the last decode has no logits", detail={"row": i})
    return HandleClosed("this sampler is closed")
