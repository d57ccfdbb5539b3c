"""Prompts as token ids: any length, all different, the same in every run of the bench."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PRIME = 7919


class Prompts:
    """Text about rooms and books, cut to the token. Equal arguments give equal ids."""

    def __init__(self, tokenize: Callable[[str], list[int]], first: list[int]) -> None:
        """`tokenize` adds no special tokens; `first` are those that open a prompt, if any."""
        self._tokenize, self._first = tokenize, first

    def prompt(self, n_tokens: int, *key: int) -> list[int]:
        """A prompt of `n_tokens` ids that differs from those of other keys within its first few tokens."""
        return [*self._first, *self.tail(n_tokens - len(self._first), *key)]

    def tail(self, n_tokens: int, *key: int) -> list[int]:
        """`n_tokens` ids to put behind others."""
        label = "-".join(map(str, key))
        ids = self._tokenize(f" {label}:")
        n_rooms = 0
        while len(ids) < n_tokens:
            n_rooms += 64
            rooms = range(n_rooms - 63, n_rooms + 1)
            ids += self._tokenize(
                "".join(f" Room {i} of {label} holds {i * _PRIME % 1000} books." for i in rooms)
            )
        return ids[:n_tokens]
