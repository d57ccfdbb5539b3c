"""One request's native sampler chain, and the log-probabilities beside its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from erllama.backend import Sampled
from erllama.types import TokenLogprob

if TYPE_CHECKING:
    from erllama import llama


class LlamaSampler:
    """A native sampler chain, and how many alternatives to report beside each token."""

    def __init__(self, chain: llama.SamplerChain, n_alternatives: int | None) -> None:
        self.chain = chain
        self.n_alternatives = n_alternatives

    def close(self) -> None:
        """Free the chain."""
        self.chain.close()

    def sample(self, context: llama.Context, output: int) -> Sampled:
        """A token for that row of the last decode. Raises: what the chain raises."""
        token = self.chain.sample(context, output)
        if self.n_alternatives is None:
            return Sampled(token=token)
        return Sampled(token=token, logprob=_logprob(context.logits(output), token, self.n_alternatives))


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
