"""Low-level read-outs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from erllama.errors import BatchOverflow, InvalidContent
from erllama.llama import forward_argmax

if TYPE_CHECKING:
    from collections.abc import Callable

    from erllama.llama import Model

    from .support import OpenContext

pytestmark = pytest.mark.model


def test_forward_argmax(smollm2: Model, open_context: OpenContext) -> None:
    """B18: one entry per input token, each the greedy continuation of that prefix."""
    context = open_context(smollm2, n_ctx=256, n_batch=64, n_outputs_max=4)
    ids = smollm2.vocab.tokenize("The capital of France is Paris")
    best = forward_argmax(context, ids)
    assert len(best) == len(ids)
    assert smollm2.vocab.piece(best[-2]) == b" Paris"
    assert context.memory.pos_max(0) == -1


def test_forward_argmax_refuses(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """Too many tokens for the context, or tokens that do not exist, compute nothing."""
    context = open_context(tiny("dense"), n_ctx=256, n_batch=64)
    with pytest.raises(BatchOverflow):
        forward_argmax(context, [1] * 257)
    with pytest.raises(InvalidContent):
        forward_argmax(context, [1, -1])
