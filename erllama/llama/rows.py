"""Sampling several rows of a decode in one native call, which may be the one that decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from erllama.errors import ErllamaError, HandleClosed, NoLogits, NotSupported

from .ffi import take_error
from .handle import Several

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .batch import Batch
    from .context import Context
    from .ffi import Library
    from .sampler import SamplerChain


class DecodedRows(NamedTuple):
    """What `Context.decode` returned; if that is 0, the outcome of each chain; and how long things took.

    `cpu_s` is the CPU time of the whole process during the decode.
    """

    rc: int
    outcomes: list[int | ErllamaError]
    compute_s: float
    cpu_s: float
    sample_s: float


def sample_rows(
    context: Context, chains: Sequence[SamplerChain], rows: Sequence[int]
) -> list[int | ErllamaError]:
    """For each chain what `SamplerChain.sample` chooses from its row of the last decode, or raises.

    Equal token for token; greedy chains, and those with a `top_k` of at most 128, do not look at the whole
    vocabulary where only biases come before that. `chains` are distinct.
    Raises: `HandleClosed` (the context). A row's error is its own, the others are sampled.
    """
    with Several([chain.handle for chain in chains]) as ptrs, context.handle as ctx:
        asked, refusals = _asked(context, chains, rows, context.with_logits(rows), ptrs)
        context.lib.sample_rows(ctx, context.n_vocab, asked, len(asked))
        return _outcomes(context.lib, chains, refusals)


def decode_rows(
    context: Context, batch: Batch, chains: Sequence[SamplerChain], rows: Sequence[int]
) -> DecodedRows:
    """`context.decode(batch)`, then `sample_rows` out of it, in one native call.

    Who closes one of the chains meanwhile waits for the call. Raises: as `Context.decode`.
    """
    lib = context.lib
    times = context.times
    with Several([chain.handle for chain in chains]) as ptrs, context.handle:
        asked, refusals = _asked(context, chains, rows, context.with_logits(rows, batch), ptrs)
        rc = context.decode_with(lib.decode_rows, batch, asked, len(asked), times)
        outcomes = _outcomes(lib, chains, refusals) if rc == 0 else []
        return DecodedRows(rc, outcomes, times.compute_s, times.cpu_s, times.sample_s)


def _asked(
    context: Context, chains: Sequence[SamplerChain], rows: Sequence[int], there: list[bool], ptrs: list[Any]
) -> tuple[list[Any], list[ErllamaError | None]]:
    """The rows to sample, and for each chain why it cannot be asked, if it cannot."""
    vocab = context.model.vocab
    asked: list[Any] = []
    refusals: list[ErllamaError | None] = []
    for chain, i, has_logits, ptr in zip(chains, rows, there, ptrs, strict=True):
        if has_logits and ptr is not None and chain.vocab is vocab:
            chain.row.output = i
            asked.append(chain.row)
            refusals.append(None)
        else:
            refusals.append(_refusal(chain.vocab is vocab, has_logits, i))
    return asked, refusals


def _outcomes(
    lib: Library, chains: Sequence[SamplerChain], refusals: list[ErllamaError | None]
) -> list[int | ErllamaError]:
    return [
        _answer(lib, chain) if refusal is None else refusal
        for chain, refusal in zip(chains, refusals, strict=True)
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
