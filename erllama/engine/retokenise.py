"""The ids to go on with when a prompt's text is stored, but in other tokens than the caller's: pure.

A match by bytes says that the stored ids spell the beginning of the prompt. Taken as they are, they save the
prefill; what the caller wants to say does not change by a byte:

    [0, checkpoint) stored ids | the rest of a token that the checkpoint cuts, and what follows it up to the
    next control token, tokenised again | the caller's own ids

The middle is empty where the checkpoint ends between two of the caller's tokens.
"""

from __future__ import annotations

import logging
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from erllama.errors import ErllamaError
from erllama.kvcache.key import control_piece

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from erllama.kvcache.match import Match

log = logging.getLogger("erllama.engine")


class Tokenize(Protocol):
    """Text to token ids, as `erllama.backend.OptionalBackend.tokenize`."""

    def __call__(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of `text`."""
        ...


def retokenised(
    match: Match,
    tokens: Sequence[int],
    pieces: Sequence[bytes],
    *,
    tokenize: Tokenize,
    key_pieces: Callable[[Sequence[int]], list[bytes]],
) -> list[int] | None:
    """The ids that spell the prompt `tokens` and begin with what `match` found stored of it.

    `pieces`: key bytes of each of `tokens`, with which the prompt was looked up; `key_pieces` gives those of
    other ids. The result may be longer or shorter than `tokens`. None where the caller's ids do as well, and
    where others could not spell exactly the same: what is to be tokenised again is not UTF-8, or its tokens
    spell something else (tokenizers that put a space in front).
    """
    if not any(node.by_bytes for node in match.nodes):
        return None
    kept: list[int] = match.ids.tolist()
    rest = _rest(match, tokens, pieces, tokenize)
    if rest is None:
        return None
    middle, n_own = rest
    result = [*kept, *middle, *tokens[len(tokens) - n_own :]]
    if result == list(tokens):
        return None
    if b"".join(key_pieces([*kept, *middle])) != b"".join(pieces[: len(tokens) - n_own]):
        return None
    return result


def _rest(
    match: Match, tokens: Sequence[int], pieces: Sequence[bytes], tokenize: Tokenize
) -> tuple[list[int], int] | None:
    """What follows the checkpoint: ids tokenised again, and how many of the caller's ids end the prompt."""
    if match.token_pos is not None:
        return [], len(tokens) - match.token_pos
    ends = accumulate(len(piece) for piece in pieces)
    cut = next(i for i, end in enumerate(ends) if end > match.byte_pos)
    after = cut
    while after < len(tokens) and pieces[after] != control_piece(tokens[after]):
        after += 1
    text = b"".join(pieces[:after])[match.byte_pos :]
    middle = _tokenised(text, tokenize) if after > cut else None
    return None if middle is None else (middle, len(tokens) - after)


def _tokenised(text: bytes, tokenize: Tokenize) -> list[int] | None:
    """Ids of a text without control tokens; None if there are none."""
    try:
        return tokenize(text.decode(), add_special=False, parse_special=False)
    except UnicodeDecodeError:
        return None
    except ErllamaError as refused:  # reuse is an offer: without it the prompt is computed as it came
        log.info("%d bytes were not tokenised again: %s", len(text), str(refused))
        return None
