"""One request's native sampler chain, and the log-probabilities beside its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from erllama import llama
from erllama.backend import Sampled
from erllama.errors import ErllamaError
from erllama.types import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from erllama.backend import Row


class LlamaSampler:
    """A native sampler chain, and how many alternatives to report beside each token."""

    def __init__(self, chain: llama.SamplerChain, n_alternatives: int | None) -> None:
        self.chain = chain
        self.n_alternatives = n_alternatives

    def close(self) -> None:
        """Free the chain."""
        self.chain.close()


def decode_rows(
    context: llama.Context, batch: llama.Batch, rows: Sequence[Row], outputs: Sequence[int]
) -> tuple[llama.DecodedRows, tuple[Sampled | ErllamaError | None, ...]]:
    """Decode `batch`; if that went well, also a token for each row that carries a sampler, out of its output.

    An error concerns one request, its grammar or its memory; its neighbours go on.
    """
    samplers = cast("list[LlamaSampler]", [row.sampler for row in rows if row.sampler is not None])
    asked = outputs
    if len(samplers) < len(rows):
        asked = [output for row, output in zip(rows, outputs, strict=True) if row.sampler is not None]
    decoded = llama.decode_rows(context, batch, [sampler.chain for sampler in samplers], asked)
    if decoded.rc != 0:
        return decoded, ()
    found: list[Sampled | ErllamaError | None] = []
    for sampler, output, token in zip(samplers, asked, decoded.outcomes, strict=True):
        if isinstance(token, ErllamaError):
            found.append(token)
        elif sampler.n_alternatives is None:
            found.append(Sampled(token=token))
        else:
            found.append(_with_logprob(context, output, token, sampler.n_alternatives))
    if len(found) == len(rows):
        return decoded, tuple(found)
    of_asked = iter(found)
    return decoded, tuple([None if row.sampler is None else next(of_asked) for row in rows])


def _with_logprob(context: llama.Context, output: int, token: int, n_top: int) -> Sampled | ErllamaError:
    try:
        logits = context.logits(output)
    except ErllamaError as error:
        return error
    return Sampled(token=token, logprob=_logprob(logits, token, n_top))


def _logprob(logits: np.ndarray, token: int, n_top: int) -> TokenLogprob:
    """Log-softmax of the raw logits at the sampled token, and the `n_top` likeliest."""
    shifted = logits.astype(np.float64) - float(logits.max())
    logprobs = shifted - np.log(np.exp(shifted).sum())
    top: tuple[tuple[int, float], ...] = ()
    if n_top:
        best = np.argpartition(logprobs, -n_top)[-n_top:]
        best = best[np.argsort(-logprobs[best], kind="stable")]
        top = tuple((int(i), float(logprobs[i])) for i in best)
    return TokenLogprob(token=token, logprob=float(logprobs[token]), top=top)
