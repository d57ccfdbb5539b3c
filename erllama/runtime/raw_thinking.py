"""Thinking in streams of raw prompts: the markers that a model was loaded with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from erllama.backend import Guide

from .chat_events import ThinkingTranslator

if TYPE_CHECKING:
    from collections.abc import Callable

    from erllama.engine.handle import Handle


@dataclass(frozen=True, slots=True)
class RawThinking:
    """`markers`: what begins and what ends a thinking block, in the model's own text."""

    markers: tuple[str, str]
    signing_key: bytes | None

    def guide(self, handle: Handle) -> Guide:
        """Control tokens in the markers show their text, so that they are seen."""
        tokenize = handle.optional("tokenize")
        piece: Callable[[int], bytes] = getattr(handle.backend, "piece", lambda _: b"")
        detokenize = handle.optional("detokenize")
        ids = {t for m in self.markers for t in tokenize(m, add_special=False, parse_special=True)}
        return Guide(visible={token: detokenize([token]) for token in ids if not piece(token)})

    def translator(self, budget: int | None) -> ThinkingTranslator:
        """For one request. A budget of 0 or less is none."""
        return ThinkingTranslator(self.markers, budget if budget and budget > 0 else None, self.signing_key)
