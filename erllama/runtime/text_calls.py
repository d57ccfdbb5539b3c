"""What users call to turn text into tokens and back, and how a prompt becomes token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import trio

from erllama.errors import ContextOverflow, HandleClosed, InvalidContent, NotLoaded

if TYPE_CHECKING:
    from erllama.engine.handle import Handle

Prompt = str | Sequence[int]
PLAIN_CALL_BYTES = 64 << 10  # longer text is tokenised in a worker thread, off the event loop


class TextCalls:
    """The part of `Model` that needs nothing but its vocabulary."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle  # the engine's; not for users

    @property
    def model_id(self) -> str:
        """Its name in the engine."""
        return self.handle.model_id

    def _live(self) -> Handle:
        if self.handle.stopping:
            raise NotLoaded(f"model {self.model_id!r} {self.handle.gone}")
        return self.handle

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Text to token ids, in the calling thread; use `tokenize_async` for more than 64 KiB.

        `add_special` adds the tokens that the model wants around a prompt; `parse_special` reads control
        tokens written out in `text` as such. Raises: `InvalidContent`.
        """
        if not isinstance(text, str):
            raise InvalidContent(f"tokenize takes text (str), not {type(text).__name__}")
        tokenize = self._live().optional("tokenize")
        try:
            tokens: list[int] = tokenize(text, add_special=add_special, parse_special=parse_special)
        except HandleClosed:
            raise NotLoaded(f"model {self.model_id!r} {self.handle.gone}") from None
        return tokens

    async def tokenize_async(
        self, text: str, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """`tokenize`, in a worker thread when the text is long. Cancellation: leaves the thread to itself."""
        if len(text) <= PLAIN_CALL_BYTES // 4:
            await trio.lowlevel.checkpoint()
            return self.tokenize(text, add_special, parse_special)
        # llama.cpp's tokenizers can take minutes for odd texts and cannot be told to stop; they only read.
        return await trio.to_thread.run_sync(
            self.tokenize, text, add_special, parse_special, abandon_on_cancel=True
        )

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Token ids to text, control tokens written out; bytes that are no UTF-8 become U+FFFD."""
        try:
            raw: bytes = self._live().optional("detokenize")(token_ids(tokens))
        except HandleClosed:
            raise NotLoaded(f"model {self.model_id!r} {self.handle.gone}") from None
        return raw.decode("utf-8", errors="replace")

    async def detokenize_async(self, tokens: Sequence[int]) -> str:
        """`detokenize`, in a worker thread. Cancellation: waits for the thread."""
        return await trio.to_thread.run_sync(self.detokenize, tokens)

    # --- prompts ---

    async def _prompt_ids(self, prompt: Prompt, *, add_special: bool = True) -> list[int]:
        if isinstance(prompt, str):
            await self._refuse_hopeless(prompt)
            return await self.tokenize_async(prompt, add_special)
        await trio.lowlevel.checkpoint()
        return token_ids(prompt)

    async def _refuse_hopeless(self, text: str) -> None:
        """Raise `ContextOverflow` for text that cannot fit, before llama.cpp spends minutes on it.

        Its tokenizers take time quadratic in some texts (4 MB of spaces: 45 s), so a text so long that it
        would not fit in the longest tokens there are is never given to them.
        """
        handle = self._live()
        longest_piece = getattr(handle.backend, "longest_piece", None)
        if longest_piece is None or len(text) <= PLAIN_CALL_BYTES:
            return
        least = len(text) // await trio.to_thread.run_sync(longest_piece)
        if least >= handle.facts.n_ctx:
            raise ContextOverflow(
                f"the prompt of {len(text)} characters has at least {least} tokens, and the context length "
                f"is {handle.facts.n_ctx}; shorten it, or load the model with a larger n_ctx",
                detail={"n_prompt": least, "n_ctx": handle.facts.n_ctx},
            )


def token_ids(tokens: Sequence[int]) -> list[int]:
    """Any integer sequence as a list of Python ints. Raises `InvalidContent`."""
    if isinstance(tokens, (bytes, bytearray)):
        raise InvalidContent("a prompt is text (str) or a sequence of token ids, not bytes")
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError) as why:
        raise InvalidContent(f"these are no token ids: {why}") from None
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InvalidContent("a prompt is text (str) or a flat sequence of whole numbers (token ids)")
    ids: list[int] = array.tolist()
    return ids
