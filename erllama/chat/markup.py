"""Control-token text in what users wrote stays text.

A template gives one string, in which the control tokens it writes cannot be told from the same characters in
a message. So before rendering, every such text in messages and descriptions is split by a private-use
character (the *mark*) that nobody used; the rendered prompt is cut at the marks, and its pieces are tokenised
apart. What a control token's text was is then two pieces, neither of which is one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from erllama.errors import InvalidContent

if TYPE_CHECKING:
    from collections.abc import Iterable

PRIVATE_USE = range(0xE000, 0xF900)
Tokenize = Callable[..., list[int]]


class Markup:
    """The texts that are control tokens of one model."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = {text for text in texts if len(text) > 1}
        self._lengths = sorted({len(text) for text in self._texts})
        begins = "".join(sorted({re.escape(text[0]) for text in self._texts}))
        self._begin = re.compile(f"[{begins}]") if begins else None

    def places(self, text: str) -> list[int]:
        """Where control-token texts begin in `text`; overlapping ones too."""
        if self._begin is None:
            return []
        return [
            at
            for found in self._begin.finditer(text)
            if any(text[(at := found.start()) : at + n] in self._texts for n in self._lengths)
        ]

    def split(self, text: str, mark: str, spared: Iterable[str] = ()) -> str:
        """The text with a mark behind the first character of every control-token text but the spared ones."""
        kept = tuple(spared)
        places = [at for at in self.places(text) if not (kept and text.startswith(kept, at))]
        if not places:
            return text
        cuts = [0, *(at + 1 for at in places), len(text)]
        return mark.join(text[a:b] for a, b in itertools.pairwise(cuts))

    def without(self, text: str, spared: Iterable[str] = ()) -> str:
        """The text with an "x" for every control-token text but the spared ones."""
        kept = tuple(spared)
        parts: list[str] = []
        done = 0
        for at in self.places(text):
            if at >= done and not (kept and text.startswith(kept, at)):
                n = max(n for n in self._lengths if text[at : at + n] in self._texts)
                parts += [text[done:at], "x"]
                done = at + n
        return "".join([*parts, text[done:]])

    def tokens(self, prompt: str, mark: str, tokenize: Tokenize) -> list[int]:
        """Token ids of a rendered prompt, its pieces tokenised apart."""
        first, *rest = prompt.split(mark)
        ids = tokenize(first, add_special=True, parse_special=True)
        for piece in rest:
            ids += continued(piece, tokenize)
        return ids


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


def changed_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The same JSON with every text in it changed, keys aside."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: changed_texts(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [changed_texts(each, change) for each in value]
    return value


def changed_messages(
    messages: list[dict[str, Any]], change: Callable[[str, str], str]
) -> list[dict[str, Any]]:
    """The messages with `change(text, role)` applied to content, reasoning and arguments."""
    return [_changed_message(message, partial(_in_role, change, message["role"])) for message in messages]


def _in_role(change: Callable[[str, str], str], role: str, text: str) -> str:
    return change(text, role)


def _changed_message(message: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    made = dict(message)
    content = message["content"]
    made["content"] = (
        [{**part, "text": change(part["text"])} for part in content]
        if isinstance(content, list)
        else change(content)
    )
    if "reasoning_content" in message:
        made["reasoning_content"] = change(message["reasoning_content"])
    if "tool_calls" in message:
        made["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": change(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return made
