"""Text ⇄ tokens of one model.

Every bound that llama.cpp asserts on is checked here first. All methods are thread-safe; llama.cpp's
tokenizer is too, so calls run side by side.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from erllama.errors import EngineError, InvalidContent, NotSupported

if TYPE_CHECKING:
    from .ffi import Library
    from .handle import Shared

MAX_TEXT_BYTES = 64 * 2**20
MAX_TOKENS = 16 * 2**20
NO_TOKEN = -1  # llama.h: LLAMA_TOKEN_NULL
OVERFLOW = -(2**31)  # llama.h: llama_tokenize answers INT32_MIN

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]


class Vocab:
    """The vocabulary of a model; valid as long as the model is open."""

    def __init__(self, lib: Library, model: Shared, ptr: Any) -> None:
        self._lib = lib
        self._model = model
        self._ptr = ptr  # owned by the model
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self._eog: dict[int, bool] = {}
        self._control: dict[int, bool] = {}
        kind = lib.vocab_type(ptr)
        self.is_absent: bool = kind == lib.constant("LLAMA_VOCAB_TYPE", "none")
        # WPM adds BOS and SEP without asking whether the vocabulary has them (llama-vocab.cpp).
        self.is_wpm: bool = kind == lib.constant("LLAMA_VOCAB_TYPE", "wpm")
        # White space goes, and any word it does not know is one token: a text may have few, however long.
        self.drops_text: bool = self.is_wpm or kind == lib.constant("LLAMA_VOCAB_TYPE", "ugm")
        self.n_tokens: int = lib.vocab_n_tokens(ptr)
        self.bos: int | None = self._special(lib.vocab_bos)
        self.eos: int | None = self._special(lib.vocab_eos)
        self.eot: int | None = self._special(lib.vocab_eot)
        self.sep: int | None = self._special(lib.vocab_sep)
        self.add_bos: bool = lib.vocab_get_add_bos(ptr)
        self.add_eos: bool = lib.vocab_get_add_eos(ptr)
        self.suppressed: tuple[int, ...] = self._read_suppressed()

    def __repr__(self) -> str:
        return f"<Vocab {self.n_tokens} tokens>"

    def tokenize(
        self, text: str | bytes, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of `text`; NUL bytes inside are ordinary characters.

        Args: `add_special` adds BOS and the like where the model wants them; `parse_special` reads
        `<|…|>` in the text as control tokens.
        Raises: `InvalidContent` (lone surrogate, naming its position; over 64 MiB; over 16 M tokens),
        `NotSupported` (no vocabulary), `HandleClosed`.
        """
        data = encode(text)
        if len(data) > MAX_TEXT_BYTES:
            raise InvalidContent(
                f"a text of {len(data)} bytes; the most is {MAX_TEXT_BYTES}", detail={"n_bytes": len(data)}
            )
        self._check_tokenizer(add_special)
        with self._model:
            ids = self._tokenize(data, len(data) + 16, add_special, parse_special)
        if len(ids) > MAX_TOKENS:
            raise InvalidContent(
                f"the text has {len(ids)} tokens; the most is {MAX_TOKENS}", detail={"n_tokens": len(ids)}
            )
        result: list[int] = ids.tolist()
        return result

    def _tokenize(
        self, data: bytes, capacity: int, add_special: bool, parse_special: bool
    ) -> npt.NDArray[np.int32]:
        ffi = self._lib.ffi
        text = ffi.from_buffer("char[]", data)
        for _ in range(2):
            ids = np.empty(capacity, np.int32)
            n = self._lib.tokenize(
                self._ptr,
                text,
                len(data),
                as_pointer(ffi, ids, "llama_token *"),
                capacity,
                add_special,
                parse_special,
            )
            if n >= 0:
                return ids[:n]
            if n == OVERFLOW or -n > MAX_TOKENS:
                raise InvalidContent(f"the text has more than {MAX_TOKENS} tokens")
            capacity = -n
        raise EngineError(f"llama_tokenize asked for {capacity} tokens, then for more")

    def detokenize(
        self, ids: TokenIds, *, remove_special: bool = False, unparse_special: bool = True
    ) -> bytes:
        """The text of `ids` as bytes (a token may end inside a character).

        Raises: `InvalidContent` (an id outside the vocabulary, over 16 M ids), `NotSupported`,
        `HandleClosed`.
        """
        tokens = self.checked(ids)
        if len(tokens) > MAX_TOKENS:
            raise InvalidContent(
                f"{len(tokens)} tokens; the most is {MAX_TOKENS}", detail={"n_tokens": len(tokens)}
            )
        self._check_tokenizer(False)
        ffi = self._lib.ffi
        capacity = len(tokens) * 8 + 64
        with self._model:
            for _ in range(2):
                out = np.empty(capacity, np.uint8)
                n = self._lib.detokenize(
                    self._ptr, as_pointer(ffi, tokens, "llama_token *"), len(tokens),
                    as_pointer(ffi, out, "char *"), capacity, remove_special, unparse_special,
                )  # fmt: skip
                if n >= 0:
                    return out[:n].tobytes()
                capacity = -n
        raise EngineError(f"llama_detokenize asked for {capacity} bytes, then for more")

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token, without any context; control tokens are empty unless `special`.

        Raises: `InvalidContent`, `NotSupported` (no vocabulary), `HandleClosed`.
        """
        key = (token, special)
        known = self._pieces.get(key)
        if known is None:
            known = self._pieces[key] = self._piece(token, special)
        return known

    def _piece(self, token: int, special: bool) -> bytes:
        self._check(token)
        self._check_present()
        ffi = self._lib.ffi
        capacity = 64
        with self._model:
            for _ in range(2):
                out = ffi.new("char[]", capacity)
                n = self._lib.token_to_piece(self._ptr, token, out, capacity, 0, special)
                if n >= 0:
                    text: bytes = ffi.buffer(out, n)[:]
                    return text
                capacity = -n
        raise EngineError(f"llama_token_to_piece asked for {capacity} bytes, then for more")

    def special_texts(self) -> list[tuple[int, str, bool]]:
        """Id, text and whether it is a control token, of all that are read out of text as one token.

        The others are user-defined: they are read so even without `parse_special`.
        Raises: `NotSupported` (no vocabulary), `HandleClosed`.
        """
        self._check_present()
        n = self._lib.ffi.new("size_t *")
        with self._model:
            raw = self._lib.vocab_special(self._ptr, n)
            try:
                found = json.loads(self._lib.ffi.buffer(raw, n[0])[:])
            finally:
                self._lib.text_free(raw)
        return [(token, text, is_control) for token, text, is_control in found]

    def is_eog(self, token: int) -> bool:
        """True if this token ends a generation (end of text, of turn, …)."""
        return self._flag(self._eog, self._lib.vocab_is_eog, token)

    def is_control(self, token: int) -> bool:
        """True for control tokens: they have no text of their own."""
        return self._flag(self._control, self._lib.vocab_is_control, token)

    def checked(self, ids: TokenIds) -> npt.NDArray[np.int32]:
        """`ids` as a contiguous int32 array.

        Raises: `InvalidContent` naming the first one outside the vocabulary, or for what is no id.
        """
        tokens = as_integers(ids)
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= self.n_tokens):
            i = int(np.flatnonzero((tokens < 0) | (tokens >= self.n_tokens))[0])
            self._check(int(tokens[i]), index=i)
        return np.ascontiguousarray(tokens, dtype=np.int32)

    def _check(self, token: int, index: int | None = None) -> None:
        if not 0 <= token < self.n_tokens:
            where = "" if index is None else f" at index {index}"
            raise InvalidContent(
                f"token {token}{where} is not in the vocabulary of {self.n_tokens}",
                detail={"token": token, "index": index, "n_vocab": self.n_tokens},
            )

    def _check_present(self) -> None:
        """What llama.cpp asks of a vocabulary that is not there ends the process (GGML_ASSERT)."""
        if self.is_absent or self.n_tokens <= 0:
            raise NotSupported("the model has no vocabulary")

    def _check_tokenizer(self, add_special: bool) -> None:
        self._check_present()
        wants_bos = self.add_bos or self.is_wpm
        wants_eos = self.add_eos and not self.is_wpm
        lacks_sep = self.is_wpm and self.sep is None
        if add_special and (
            (wants_bos and self.bos is None) or (wants_eos and self.eos is None) or lacks_sep
        ):
            raise NotSupported("the model's tokenizer adds special tokens that its vocabulary lacks")

    def _flag(self, cache: dict[int, bool], call: Any, token: int) -> bool:
        known = cache.get(token)
        if known is None:
            self._check(token)
            self._check_present()
            with self._model:
                known = cache[token] = bool(call(self._ptr, token))
        return known

    def _special(self, call: Any) -> int | None:
        token = int(call(self._ptr))
        return None if token == NO_TOKEN else token

    def _read_suppressed(self) -> tuple[int, ...]:
        n = self._lib.ffi.new("int32_t *")
        tokens = self._lib.vocab_get_suppress_tokens(self._ptr, n)
        return tuple(tokens[i] for i in range(n[0])) if tokens != self._lib.ffi.NULL else ()


def encode(text: str | bytes) -> bytes:
    """UTF-8 bytes of `text`. Raises: `InvalidContent` naming the position of a lone surrogate."""
    if isinstance(text, bytes):
        return text
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidContent(
            f"the text has a lone surrogate ({text[error.start]!r}) at position {error.start}",
            detail={"position": error.start},
        ) from None


def as_integers(ids: TokenIds) -> npt.NDArray[np.integer[Any]]:
    """Token ids as a flat array of integers of some width.

    Raises: `InvalidContent` for floats, text, booleans and numbers beyond 64 bits: numpy would round,
    parse or cut them silently.
    """
    try:
        tokens = np.asarray(ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidContent(f"token ids are whole numbers: {error}") from None
    if tokens.size == 0 and tokens.ndim == 1:
        return np.empty(0, np.int32)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidContent(
            f"token ids are a flat sequence of whole numbers of 32 bits, not {tokens.ndim}-dimensional "
            f"{tokens.dtype}"
        )
    return tokens


def as_pointer(ffi: Any, array: npt.NDArray[Any], ctype: str) -> Any:
    """A pointer to the array's memory; the caller keeps the array alive."""
    return ffi.cast(ctype, ffi.from_buffer(array))
