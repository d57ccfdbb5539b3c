"""llama-common's chat support: templates, what is read from an answer, schema → grammar.

One place upstream makes prompt, grammar and parser of a conversation, so that they fit each other; here is no
knowledge of any model family. JSON text crosses the boundary, never an exception.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from erllama.errors import InvalidContent, InvalidGrammar, NativeError

from . import logs
from .backend import ensure_backend
from .handle import Exclusive, Shared
from .template_text import check_text
from .vocab import encode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .ffi import Library
    from .model import Model

MAX_TEMPLATE_BYTES = 1 << 20
MAX_TEXT_BYTES = 64 << 20
# common.h: enum common_grammar_trigger_type
TOKEN, WORD, PATTERN, PATTERN_FULL = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A conversation turned into a prompt, and how its answer is constrained and read.

    `generation_prompt` is the end of `prompt` that belongs to the answer. `triggers` are (kind, text) pairs
    that start a lazy grammar. `preserved` are control tokens that the answer's text must show. `stops` end
    the answer. `parser` is opaque: `ChatParser` takes it. Thinking tags are "" and () where there are none.
    """

    prompt: str
    grammar: str
    grammar_lazy: bool
    triggers: tuple[tuple[int, str], ...]
    generation_prompt: str
    supports_thinking: bool
    thinking_start: str
    thinking_ends: tuple[str, ...]
    preserved: tuple[str, ...]
    stops: tuple[str, ...]
    delimiters: tuple[tuple[str, str], ...]
    parser: str

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Applied:
        """From what the shim answers."""
        return cls(
            prompt=given["prompt"],
            grammar=given["grammar"],
            grammar_lazy=given["grammar_lazy"],
            triggers=tuple((t["type"], t["value"]) for t in given["triggers"]),
            generation_prompt=given["generation_prompt"],
            supports_thinking=given["supports_thinking"],
            thinking_start=given["thinking_start"],
            thinking_ends=tuple(given["thinking_ends"]),
            preserved=tuple(given["preserved"]),
            stops=tuple(given["stops"]),
            delimiters=tuple((d["role"], d["delimiter"]) for d in given["delimiters"]),
            parser=json.dumps(given["parser"]),
        )


class ChatTemplates:
    """A model's chat templates, parsed. Use as a context manager, or `close()` it. Any thread.

    `source` is the template's text, `tool_use_source` that of the one for tools ("" without). `is_explicit`:
    false where the model has none and ChatML is used instead. `caps`: what the template can render.
    """

    def __init__(self, lib: Library, ptr: Any) -> None:
        self._lib = lib
        self.handle = Shared(lib, ptr, "chat_free", "chat template")
        with self.handle as chat:
            facts = _text(lib, lib.chat_describe, chat)
        self.source: str = facts["source"]
        self.tool_use_source: str = facts["tool_use_source"]
        self.is_explicit: bool = facts["explicit"]
        self.caps: dict[str, bool] = facts["caps"]

    @classmethod
    def of_model(cls, model: Model, text: str | None = None) -> ChatTemplates:
        """The model's own, or `text` with the model's tokens. Raises: as `of_text`, `HandleClosed`."""
        for source in model.facts.chat_templates if text is None else (text,):
            check_text(source)
        with model.handle as ptr:
            return cls._new(ptr, text, "", "")

    @classmethod
    def of_text(cls, text: str, *, bos: str = "", eos: str = "") -> ChatTemplates:
        """A template without a model. Raises: `InvalidContent` with the reason why it cannot be parsed."""
        if not text.strip():
            raise InvalidContent("the chat template is empty")
        check_text(text)
        return cls._new(None, text, bos, eos)

    @classmethod
    def _new(cls, model: Any, text: str | None, bos: str, eos: str) -> ChatTemplates:
        lib = ensure_backend()
        null = lib.ffi.NULL
        source = null if text is None else c_string(text, "the chat template", MAX_TEMPLATE_BYTES)
        with logs.captured(lib) as log:
            try:
                ptr = lib.chat_new(
                    null if model is None else model, source, c_string(bos, "bos"), c_string(eos, "eos")
                )
            except NativeError as error:
                if error.reason == "oom":
                    raise
                said = "; ".join(log.errors[:1]) or str(error)
                raise InvalidContent(f"the chat template cannot be parsed: {said}") from None
        return cls(lib, ptr)

    def __repr__(self) -> str:
        return f"<ChatTemplates {len(self.source)} characters{' closed' if self.handle.closed else ''}>"

    def __enter__(self) -> ChatTemplates:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free them, after the calls that are running. Idempotent."""
        self.handle.close()

    def apply(self, inputs: Mapping[str, Any]) -> Applied:
        """Render a conversation.

        `inputs`: `messages` and `tools` in the shape OpenAI gave them, `tool_choice` ("auto", "required",
        "none"), `json_schema`, `parallel_tool_calls`, `add_generation_prompt`, `continue_final_message`
        ("none", "content", "reasoning", "auto"), `reasoning_format` ("auto", "none"), `enable_thinking`,
        `template_kwargs`, `now_s`.
        Raises: `InvalidContent` (what the template says), `InvalidGrammar` (a schema), `HandleClosed`.
        """
        data = _json_bytes(inputs, "the conversation")
        with self.handle as chat:
            try:
                return Applied.of(_text(self._lib, self._lib.chat_apply, chat, data, len(data)))
            except NativeError as error:
                raise _classified(error) from None


class ChatParser:
    """Reads answers to one prompt. Use as a context manager, or `close()` it. One call at a time."""

    def __init__(self, parser: str) -> None:
        """`parser`: of what `ChatTemplates.apply` gave."""
        lib = ensure_backend()
        data = encode(parser)
        self._lib = lib
        self.handle = Exclusive(lib, lib.chat_parser_new(data, len(data)), "chat_parser_free", "chat parser")

    def __enter__(self) -> ChatParser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free it. Idempotent."""
        self.handle.close()

    def parse(self, text: str, *, partial: bool = False) -> dict[str, Any]:
        """`role`, `content`, `reasoning_content` and `tool_calls` (`id`, `name`, `arguments` as JSON text).

        With `partial` the text may end anywhere. Raises: `InvalidContent` if it is not what the model was to
        write, `HandleClosed`.
        """
        data = encode(text)
        if len(data) > MAX_TEXT_BYTES:
            raise InvalidContent(f"an answer of {len(data)} bytes; the most is {MAX_TEXT_BYTES}")
        with self.handle as ptr:
            try:
                parsed: dict[str, Any] = _text(self._lib, self._lib.chat_parse, ptr, data, len(data), partial)
            except NativeError as error:
                if error.reason == "oom":
                    raise
                raise InvalidContent(f"the answer cannot be read: {_said(error)}") from None
        return parsed


def schema_to_grammar(schema: Mapping[str, Any]) -> str:
    """GBNF text of a JSON schema, as llama-common converts it: it ignores what it cannot express.

    Raises: `InvalidGrammar` with the path in the schema where the converter stopped.
    """
    lib = ensure_backend()
    data = _json_bytes(schema, "the schema")
    try:
        grammar: str = _text(lib, lib.schema_to_grammar, data, len(data), plain=True)
    except NativeError as error:
        raise _classified(error) from None
    return grammar


def live_texts() -> int:
    """Texts of the shim that are not freed yet; for leak tests."""
    return int(ensure_backend().text_count())


def c_string(text: str, what: str, most: int = 1 << 16) -> bytes:
    """UTF-8 for a C string. Raises: `InvalidContent` for NUL characters and for what is too long."""
    data = encode(text)
    if b"\0" in data or len(data) > most:
        raise InvalidContent(f"{what} has a NUL character, or more than {most} bytes")
    return data


def _text(lib: Library, call: Any, *args: Any, plain: bool = False) -> Any:
    n = lib.ffi.new("size_t *")
    raw = call(*args, n)
    try:
        data = lib.ffi.buffer(raw, n[0])[:]
    finally:
        lib.text_free(raw)
    return data.decode() if plain else json.loads(data)


def _json_bytes(value: Any, what: str) -> bytes:
    try:
        data = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidContent(f"{what} has a lone surrogate: {error.reason}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidContent(f"{what} is not JSON: {error}") from None
    if len(data) > MAX_TEXT_BYTES:
        raise InvalidContent(f"{what} has {len(data)} bytes; the most is {MAX_TEXT_BYTES}")
    return data


def _said(error: NativeError) -> str:
    return str(error).partition(": ")[2] or str(error)  # without the name of the call


def _classified(error: NativeError) -> Exception:
    said = _said(error)
    if error.reason == "oom":
        return error
    if "JSON schema" in said:
        return InvalidGrammar(said.replace("\n", " "), detail={"message": said})
    reason = said.rpartition("Error: ")[2].removeprefix("Jinja Exception: ").strip()
    return InvalidContent(f"the chat template refuses this conversation: {reason}", detail={"message": said})
