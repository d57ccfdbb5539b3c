"""From what a request says about sampling to a sampler chain without open questions.

Precedence: the request, then the model file's `general.sampling.*`, then the defaults below.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from erllama.backend import Guide, SamplingParams
from erllama.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Mapping

    from erllama.options import GenerationOptions

DEFAULTS: Mapping[str, float] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True, slots=True)
class PlainSampler:
    """What rows carry for a backend without chains of its own: what was asked for, and no state."""

    params: SamplingParams

    def close(self) -> None:
        """Nothing to free."""


def resolve_sampling(
    options: GenerationOptions, model_defaults: Mapping[str, float], n_vocab: int, guide: Guide | None = None
) -> SamplingParams:
    """Fill every gap; draw a seed when none was given.

    Raises: `InvalidOption` for a biased token outside the vocabulary.
    """

    def value(name: str) -> float:
        given: float | None = getattr(options, name)
        return given if given is not None else model_defaults.get(name, DEFAULTS[name])

    biases = tuple(sorted((options.logit_bias or {}).items()))
    for token, _ in biases:
        if not 0 <= token < n_vocab:
            raise InvalidOption(
                f"logit_bias: token {token} is not in the vocabulary of {n_vocab}",
                detail={"key": "logit_bias", "value": token},
            )
    return SamplingParams(
        temperature=value("temperature"),
        top_k=int(value("top_k")),
        top_p=value("top_p"),
        min_p=value("min_p"),
        repetition_penalty=value("repetition_penalty"),
        # llama.h: 0xFFFFFFFF (LLAMA_DEFAULT_SEED) would draw a seed nobody could report.
        seed=options.seed if options.seed is not None else secrets.randbelow(2**32 - 1),
        grammar=options.grammar,
        grammar_first=options.grammar_first,
        logit_bias=biases,
        logprobs=options.logprobs,
        guide=guide or Guide(),
    )
