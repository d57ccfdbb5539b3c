"""BERT in numpy, from its paper: what an encoder's vectors have to be, computed without llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from gguf import GGUFReader

if TYPE_CHECKING:
    from pathlib import Path

EPSILON = 1e-5


class ReferenceBert:
    """The tensors of a tiny GGUF, and the way through them."""

    def __init__(self, path: Path, n_head: int, n_layer: int) -> None:
        self._n_head, self._n_layer = n_head, n_layer
        self._tensors = {t.name: np.array(t.data, np.float64) for t in GGUFReader(path).tensors}

    def rows(self, tokens: list[int]) -> np.ndarray:
        """A vector for each token: (n_tokens, n_embd)."""
        w = self._tensors
        x = w["token_embd.weight"][tokens] + w["position_embd.weight"][: len(tokens)]
        x = self._norm(x + w["token_types.weight"][0], "token_embd_norm")
        for il in range(self._n_layer):
            block = f"blk.{il}"
            x = self._norm(x + self._attention(x, block), f"{block}.attn_output_norm")
            inner = _gelu(x @ w[f"{block}.ffn_up.weight"].T)
            x = self._norm(x + inner @ w[f"{block}.ffn_down.weight"].T, f"{block}.layer_output_norm")
        return x

    def _attention(self, x: np.ndarray, block: str) -> np.ndarray:
        """Every token looks at every token."""
        w, n = self._tensors, len(x)
        q, k, v = (
            (x @ w[f"{block}.attn_{name}.weight"].T).reshape(n, self._n_head, -1).transpose(1, 0, 2)
            for name in "qkv"
        )
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (weights / weights.sum(-1, keepdims=True)) @ v
        return mixed.transpose(1, 0, 2).reshape(n, -1) @ w[f"{block}.attn_output.weight"].T

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPSILON)
        return scaled * self._tensors[f"{name}.weight"] + self._tensors[f"{name}.bias"]


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
