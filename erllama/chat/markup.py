"""Control-token text in what users wrote stays text.

A template gives one string, in which the control tokens it writes cannot be told from the same characters in
a message. So before rendering, every such text that callers wrote (`authored.py`) is split by a private-use
character (the *mark*) that nobody used; the rendered prompt is cut at the marks, and its pieces are tokenised
apart. What a control token's text was is then two pieces, neither of which is one.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from erllama.errors import InvalidContent

if TYPE_CHECKING:
    from collections.abc import Iterable

PRIVATE_USE = range(0xE000, 0xF900)
Tokenize = Callable[..., list[int]]


class Markup:
    """The texts that are control tokens of one model."""

    def __init__(self, texts: Iterable[str]) -> None:
        own = {text for text in texts if len(text) > 1}
        # Arguments of calls are JSON text, in which quotes have backslashes.
        self._texts = own | {json.dumps(text, ensure_ascii=False)[1:-1] for text in own}
        self._words = {re.sub(r"^\W+|\W+$", "", text) for text in own} - own
        self._lengths = sorted({len(text) for text in self._texts})
        begins = "".join(sorted({re.escape(text[0]) for text in self._texts}))
        self._begin = re.compile(f"[{begins}]") if begins else None

    def places(self, text: str) -> list[int]:
        """Where control-token texts begin in `text`; overlapping ones too."""
        return [at for at in self._beginnings(text) if self._is_place(text, at)]

    def split(self, parts: Sequence[str], mark: str, spared: Iterable[str] = ()) -> list[str]:
        """The texts with a mark behind the first character of every control-token text but the spared ones.

        They are looked at as one text, which is what some templates make of the parts of a message.
        """
        kept = tuple(spared)
        whole = "".join(parts)
        cuts = deque(at + 1 for at in self.places(whole) if not (kept and whole.startswith(kept, at)))
        made: list[str] = []
        begin = 0
        for part in parts:
            end = begin + len(part)
            pieces = []
            while cuts and cuts[0] <= end:
                pieces.append(whole[begin : cuts[0]])
                begin = cuts.popleft()
            made.append(mark.join([*pieces, whole[begin:end]]))
            begin = end
        return made

    def neutral(self, text: str, spared: Iterable[str] = ()) -> str:
        """The text with nothing in it that a control token but the spared ones could begin with."""
        kept = tuple(spared)
        made = list(text)
        for at in self._beginnings(text):
            is_mark_up = not (text[at].isalnum() or text[at].isspace()) or self._is_place(text, at)
            if is_mark_up and not (kept and text.startswith(kept, at)):
                made[at] = "y" if text[at] == "x" else "x"
        return "".join(made)

    def neutral_name(self, name: str) -> str:
        """A property's name, which some templates write in angle brackets, as what no control token has."""
        return f"x{name}" if name in self._words else self.neutral(name)

    def tokens(self, prompt: str, mark: str, tokenize: Tokenize) -> list[int]:
        """Token ids of a rendered prompt, its pieces tokenised apart."""
        first, *rest = prompt.split(mark)
        ids = tokenize(first, add_special=True, parse_special=True)
        for piece in rest:
            ids += continued(piece, tokenize)
        return ids

    def _beginnings(self, text: str) -> list[int]:
        return [] if self._begin is None else [found.start() for found in self._begin.finditer(text)]

    def _is_place(self, text: str, at: int) -> bool:
        return any(text[at : at + n] in self._texts for n in self._lengths)


def continued(piece: str, tokenize: Tokenize) -> list[int]:
    """Token ids of a text that goes on behind other text.

    Some tokenizers put a space before whatever they are given; behind a line break they do not.
    """
    if not piece:
        return []
    head = tokenize("\n", add_special=False, parse_special=True)
    both = tokenize("\n" + piece, add_special=False, parse_special=True)
    if both[: len(head)] == head:
        return both[len(head) :]
    return tokenize(piece, add_special=False, parse_special=True)


def choose_mark(text: str) -> str:
    """A private-use character that is not in `text`, nor as an escape. Raises: `InvalidContent`."""
    used = set(text)
    for code in PRIVATE_USE:
        if chr(code) not in used and f"\\u{code:04x}" not in text.lower():
            return chr(code)
    raise InvalidContent("the messages use every private-use character; leave one of U+E000 to U+F8FF out")


def unescaped(prompt: str, mark: str) -> str:
    """A prompt whose template writes tools or arguments as JSON in ASCII, with its marks as they were."""
    return re.sub(rf"\\u{ord(mark):04x}", mark, prompt, flags=re.IGNORECASE)
