"""Parsed chat templates, kept for the models that were used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from erllama.errors import ErllamaError

from .markup import Markup

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from erllama import llama


PROBE = "probe7q"
USER = {"role": "user", "content": "hello"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": PROBE, "arguments": "{}"}},
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": PROBE, "content": "1"}
TOOL = {"type": "function", "function": {"name": PROBE, "description": "", "parameters": {}}}


@dataclass(frozen=True, slots=True)
class Template:
    """One model's templates, and the texts that are control tokens of it.

    `spared` are control-token texts that templates look for in what the assistant said. `renders_tools`,
    `renders_calls`, `renders_schema`: whether tools, calls in the history and the answer's schema show in the
    prompt at all.
    """

    native: llama.ChatTemplates
    markup: Markup
    spared: tuple[str, ...]
    renders_tools: bool
    renders_calls: bool
    renders_schema: bool

    @classmethod
    def of(cls, native: llama.ChatTemplates, special: list[tuple[int, str, bool]]) -> Template:
        """User-defined tokens count where the template writes them: the others are ordinary text."""
        alone = native.apply({"messages": [{"role": "user", "content": "hello"}]})
        thinking = (alone.thinking_start, *alone.thinking_ends) if alone.thinking_ends else ()
        source = native.source + native.tool_use_source
        known = {*alone.preserved, *thinking}
        texts = [
            text
            for _, text, is_control in special
            if is_control or text in known or (text in source and any(c.isalnum() for c in text))
        ]
        return cls(
            native,
            Markup(texts),
            tuple(text for text in thinking if text),
            renders_tools=_shows({"messages": [USER], "tools": [TOOL]}, native),
            renders_calls=_shows({"messages": [USER, CALL, RESULT]}, native),
            renders_schema=_shows({"messages": [USER], "json_schema": {"const": PROBE}}, native),
        )


def _shows(inputs: dict[str, Any], native: llama.ChatTemplates) -> bool:
    """Whether the probe is in the prompt; a template that refuses it says so when it is asked in earnest."""
    try:
        return PROBE in native.apply(inputs).prompt
    except ErllamaError:
        return True


class TemplateCache:
    """At most `capacity` templates, the longest unused goes first. Any thread.

    Only those wait for a template that want that one: `purge` waits for nobody.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, _Slot] = OrderedDict()
        self.n_made = 0

    def get(self, key: Hashable, make: Callable[[], Template]) -> Template:
        """The template of that key; `make` runs if it is not kept, for one caller at a time."""
        slot = self._slot(key)
        try:
            with slot.lock:
                if slot.template is None:
                    slot.template = make()
                    self._count()
                return slot.template
        except BaseException:
            self._drop(key, slot)
            raise

    def purge(self, key: Hashable) -> bool:
        """Forget one; whoever is using or making it goes on. False if it was not kept."""
        with self._lock:
            slot = self._kept.pop(key, None)
        return slot is not None and slot.template is not None

    def _slot(self, key: Hashable) -> _Slot:
        with self._lock:
            slot = self._kept.setdefault(key, _Slot())
            self._kept.move_to_end(key)
            while len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
            return slot

    def _drop(self, key: Hashable, slot: _Slot) -> None:
        with self._lock:
            if self._kept.get(key) is slot and slot.template is None:
                del self._kept[key]

    def _count(self) -> None:
        with self._lock:
            self.n_made += 1


class _Slot:
    """The place of a template, which whoever comes first fills."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.template: Template | None = None
