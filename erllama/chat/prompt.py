"""A conversation as tokens, and how its answer is constrained and read."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from erllama.backend import Guide, ThinkingSpan
from erllama.errors import InvalidContent, InvalidOption, NotSupported
from erllama.llama.chat import PATTERN, PATTERN_FULL, WORD

from .authored import Marked, Neutral, changed_inputs, without_escapes
from .call_first import call_first, one_call
from .grammar import schema_text, sealed
from .history import with_calls_as_sampled
from .markup import choose_mark, continued, unescaped
from .messages import check_messages, is_prefilled, joined
from .options import ChatOptions, schema_of
from .tools import Tools, check_tools

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from erllama import llama

    from .grammar import SchemaGrammars
    from .markup import Tokenize
    from .messages import Message
    from .templates import Template


log = logging.getLogger("erllama.chat")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatParams:
    """A rendered conversation: `prompt` as text, `prompt_ids` as tokens, and what `chat_parse` needs.

    In `prompt` control tokens and the same characters in a message look alike; in `prompt_ids` they do not.
    `n_head`: tokens before the first message of the user (system message and tools); 0 if that is unknown.
    `are_calls_held`: false where no grammar sees to it that calls are in their form.
    """

    prompt: str = field(repr=False)
    prompt_ids: list[int] = field(repr=False)
    applied: llama.Applied = field(repr=False)
    tool_names: tuple[str, ...] = ()
    n_head: int = 0
    prefilled: bool = False
    are_calls_held: bool = True
    apply_s: float = 0.0

    @property
    def grammar(self) -> str | None:
        """What the answer is held to, as GBNF; None if it is free."""
        return self.applied.grammar or None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What is needed of a model's vocabulary.

    `check_length`: raises for a prompt of so many characters that cannot fit, before it is tokenised.
    """

    tokenize: Tokenize
    piece: Callable[[int], bytes]
    check_length: Callable[[int], None] = lambda _: None

    def ids(self, text: str) -> tuple[int, ...]:
        """Tokens of a piece of markup."""
        return tuple(continued(text, self.tokenize))


class Renderer:
    """Renders conversations of one model. Any thread; takes milliseconds."""

    def __init__(self, template: Template, vocabulary: Vocabulary, grammars: SchemaGrammars) -> None:
        self._template = template
        self._vocabulary = vocabulary
        self._grammars = grammars

    def render(
        self,
        messages: Sequence[Message],
        options: ChatOptions,
        json_schema: Mapping[str, Any] | None = None,
        grammar: str | None = None,
    ) -> ChatParams:
        """Raises: `InvalidContent`, `InvalidOption`, `InvalidGrammar`, `NotSupported`, `check_length`'s."""
        started = time.perf_counter()
        checked = [self._unhidden(message) for message in check_messages(messages)]
        tools = check_tools(options.tools, options.tool_choice)
        if options.lazy_tool_grammar or tools.strict:
            checked = with_calls_as_sampled(checked, tools)
        schema = schema_of(options.response_format, json_schema)
        check_together(tools, schema, grammar)
        inputs = self._inputs(checked, tools, options, schema)
        if grammar is not None:
            inputs["enable_thinking"] = False  # a grammar holds from the first token
        applied = self._template.native.apply(inputs)
        if grammar is not None and _begins_thinking(applied):
            raise InvalidOption(
                "this chat template begins answers with thinking, where a grammar would hold already; "
                "use json_schema, which waits for the end of it",
                detail={"key": "grammar"},
            )
        shown, prompt = self._shown(inputs, applied, tools)
        self._vocabulary.check_length(len(prompt))
        _check_supported(self._template, applied, checked, tools)
        mark = choose_mark(schema_text([shown, prompt]) + prompt)
        marked = self._marked(prompt, shown, mark)
        prompt_ids = self._template.markup.tokens(marked, mark, self._vocabulary.tokenize)
        held = self._held(applied, inputs, lazily=options.lazy_tool_grammar or tools.strict)
        return ChatParams(
            prompt=prompt,
            prompt_ids=prompt_ids,
            applied=held,
            tool_names=tools.names,
            n_head=self._n_head(marked, mark, prompt_ids, applied),
            prefilled=inputs["continue_final_message"] != "none",
            are_calls_held=bool(held.grammar),
            apply_s=time.perf_counter() - started,
        )

    def _inputs(
        self,
        messages: list[dict[str, Any]],
        tools: Tools,
        options: ChatOptions,
        schema: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        kwargs = dict(options.template_kwargs or {})
        if options.reasoning == "off" and kwargs.get("enable_thinking"):
            raise InvalidOption(
                "reasoning='off' and template_kwargs={'enable_thinking': True} exclude each other",
                detail={"key": "reasoning", "value": "off"},
            )
        prefilled = options.add_generation_prompt and is_prefilled(messages)
        if prefilled:  # upstream would put blank lines between parts, in the middle of what is gone on with
            messages = [*messages[:-1], {**messages[-1], "content": joined(messages[-1]["content"])}]
        inputs: dict[str, Any] = {
            "messages": messages,
            "tool_choice": tools.choice,
            "parallel_tool_calls": options.parallel_tool_calls,
            "reasoning_format": "none" if options.reasoning == "inline" else "auto",
            "enable_thinking": kwargs.get("enable_thinking", options.reasoning != "off"),
            "template_kwargs": kwargs,
            "add_generation_prompt": options.add_generation_prompt and not prefilled,
            "continue_final_message": "auto" if prefilled else "none",
            "now_s": int(time.time()),  # one time for every rendering of this request
        }
        if tools.enforced:
            inputs["tools"] = list(tools.enforced)
        if schema is not None:
            # Refuses what cannot be enforced, and says where.
            inputs["json_schema"] = self._grammars.canonical(schema) or {"type": "object"}
        return inputs

    def _shown(
        self, inputs: dict[str, Any], applied: llama.Applied, tools: Tools
    ) -> tuple[dict[str, Any], str]:
        """What the prompt is made of, and the prompt: it shows tools as their authors wrote them."""
        if tools.shown == tools.enforced:
            return self._without_schema(inputs), applied.prompt
        shown = {**self._without_schema(inputs), "tools": list(tools.shown)}
        return shown, self._prompt_of(shown)

    def _prompt_of(self, inputs: dict[str, Any]) -> str:
        """The prompt alone: no schema is converted to a grammar but one that the template shows."""
        return self._template.native.apply({**inputs, "tool_choice": "none"}).prompt

    def _without_schema(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What the prompt is made of."""
        if self._template.renders_schema:
            return inputs
        return {key: value for key, value in inputs.items() if key != "json_schema"}

    # --- tokens ---

    def _n_head(self, marked: str, mark: str, prompt_ids: list[int], applied: llama.Applied) -> int:
        """Where the first message of the user begins, in whole tokens."""
        begin = next((text for role, text in applied.delimiters if role == "user"), "")
        at = marked.find(begin) if begin else 0
        if at <= 0:
            return 0
        head = self._template.markup.tokens(marked[:at], mark, self._vocabulary.tokenize)
        pairs = zip(head, prompt_ids, strict=False)
        first = next((i for i, (one, other) in enumerate(pairs) if one != other), len(head))
        return min(first, len(prompt_ids))

    def _unhidden(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message whose calls' arguments hide no control-token text behind needless JSON escapes."""
        if "tool_calls" not in message:
            return message
        calls = []
        for call in message["tool_calls"]:
            function = call["function"]
            plain = without_escapes(function["arguments"])
            if self._template.markup.places(plain):
                call = {**call, "function": {**function, "arguments": plain}}
            calls.append(call)
        return {**message, "tool_calls": calls}

    def _marked(self, prompt: str, inputs: dict[str, Any], mark: str) -> str:
        """The prompt, with control-token text of whatever callers wrote split by marks.

        How many control tokens the template writes itself is told by the same conversation without any such
        text; where that is another number, a text would become a token in a way not known here.
        """
        markup, spared = self._template.markup, self._template.spared
        neutral = changed_inputs(inputs, Neutral(markup, spared))
        if neutral == inputs:
            return prompt
        split = changed_inputs(inputs, Marked(markup, mark, spared))
        marked = prompt if split == inputs else unescaped(self._prompt_of(split), mark)
        own = self._prompt_of(neutral)
        n_whole = sum(len(markup.places(piece)) for piece in marked.split(mark))
        if marked.replace(mark, "") != prompt or n_whole != len(markup.places(own)):
            raise _becomes_markup()
        return marked

    # --- the answer ---

    def _held(self, applied: llama.Applied, inputs: dict[str, Any], *, lazily: bool) -> llama.Applied:
        """With the grammar that the answer is held to: a lazy one only if that is wanted."""
        if applied.grammar_lazy and not lazily:
            return dataclasses.replace(applied, grammar="", grammar_lazy=False)
        grammar, begun = applied.grammar, _begun(inputs, applied)
        if "tools" in inputs and inputs["tool_choice"] == "required" and begun is not None:
            told_apart = applied
            if inputs["reasoning_format"] == "none":  # where thinking is content, so is what may be said
                told_apart = self._template.native.apply({**inputs, "reasoning_format": "auto"})
            grammar = call_first(told_apart, begun)
        if grammar and "tools" in inputs and not inputs["parallel_tool_calls"]:
            grammar = one_call(applied, grammar)
        return dataclasses.replace(applied, grammar=sealed(grammar))

    def guide(self, params: ChatParams, *, thinking_budget: int | None, own_grammar: bool) -> Guide:
        """How the answer's sampler is set up. `own_grammar`: it is the caller's, not the template's."""
        applied, words = params.applied, self._vocabulary
        lazy = applied.grammar_lazy and not own_grammar
        span = None
        if (
            applied.thinking_ends
            and applied.thinking_start
            and (lazy or (thinking_budget is not None and not own_grammar))
        ):
            ends = tuple(words.ids(end) for end in applied.thinking_ends)
            span = ThinkingSpan(
                start=words.ids(applied.thinking_start), ends=ends, forced=ends[0], budget=thinking_budget
            )
        patterns, tokens = self._triggers(applied) if lazy else ((), ())
        return Guide(
            lazy=lazy,
            trigger_patterns=patterns,
            trigger_tokens=tokens,
            prefill=self._prefill(applied.generation_prompt),
            covers_prefill=bool(applied.grammar) and not lazy and not own_grammar,
            thinking=span,
            visible=self._visible(applied),
        )

    def _triggers(self, applied: llama.Applied) -> tuple[tuple[str, ...], tuple[int, ...]]:
        patterns: list[str] = []
        words: list[str] = []
        for kind, text in applied.triggers:
            if kind == WORD:
                words.append(text)
            elif kind == PATTERN:
                patterns.append(text)
            elif kind == PATTERN_FULL:
                patterns.append(f"^(?:{text})$")
            else:
                raise NotSupported(f"a trigger of kind {kind} begins this template's calls", detail="tools")
        ids = [self._vocabulary.ids(word) for word in words]
        tokens = tuple(each[0] for each in ids if len(each) == 1)
        if patterns or len(tokens) < len(words):
            # Patterns are searched for in all of the answer anyway. Where there are none, the sampler sees
            # a trigger's text also if it is spelled in other tokens.
            patterns += [_escaped(word) for word in words]
        return tuple(patterns), tokens

    def _prefill(self, text: str) -> tuple[int, ...]:
        ids = self._vocabulary.ids(text)
        if ids and not text[0].isspace() and self._vocabulary.piece(ids[0]).isspace():
            return ids[1:]  # the space that some tokenizers put before what they are given
        return ids

    def _visible(self, applied: llama.Applied) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for text in applied.preserved:
            ids = self._vocabulary.ids(text)
            if len(ids) == 1 and self._vocabulary.piece(ids[0]) != text.encode():
                found[ids[0]] = text.encode()
        return found


def _escaped(text: str) -> str:
    """As an ECMAScript pattern."""
    return re.sub(r"([.^$|()*+?\[\]{}\\])", r"\\\1", text)


def _begun(inputs: Mapping[str, Any], applied: llama.Applied) -> str | None:
    """The content that the prompt has of the answer already; None if it was rendered as something else."""
    if inputs["continue_final_message"] == "none":
        return ""
    content: str = inputs["messages"][-1]["content"]
    return content if applied.generation_prompt.endswith(content) else None


def _begins_thinking(applied: llama.Applied) -> bool:
    _, start, begun = applied.generation_prompt.rpartition(applied.thinking_start or "\0")
    return bool(start) and not any(end in begun for end in applied.thinking_ends)


def _can_call(template: Template, applied: llama.Applied, tools: Tools) -> bool:
    """Whether the answer can call tools where that is asked for."""
    match tools.choice:
        case "none":
            return True
        case "required":  # upstream makes a grammar without calls for parsers that know of none
            return any(name in applied.grammar for name in tools.names)
    return bool(applied.grammar) or template.renders_tools


def _becomes_markup() -> InvalidContent:
    return InvalidContent(
        "a message or tool has the text of a control token, and this model's chat template would make it one"
    )


def check_together(tools: Tools, schema: object, grammar: str | None) -> None:
    """Raise `InvalidOption` for constraints that exclude each other."""
    if grammar is not None and schema is not None:
        raise InvalidOption("give grammar or json_schema, not both", detail={"key": "grammar"})
    if tools.enforced and tools.choice != "none" and (grammar is not None or schema is not None):
        raise InvalidOption(
            "an answer cannot both call tools and keep to a grammar or schema; say tool_choice='none', or "
            "leave the grammar or schema out",
            detail={"key": "tool_choice"},
        )


def _check_supported(
    template: Template, applied: llama.Applied, messages: list[dict[str, Any]], tools: Tools
) -> None:
    """What a template passes over in silence is refused: the caller would wait for an effect."""
    if tools.enforced and not _can_call(template, applied, tools):
        raise NotSupported(
            "this model's chat template has no way to call tools; load the model with one that has: "
            "--chat-template FILE, `chat_template_file` in a server's file, or load_model(chat_template=…)",
            detail="tools",
        )
    has_calls = any(message.get("tool_calls") for message in messages)
    if has_calls and not template.renders_calls:
        if not template.renders_tools:
            raise NotSupported("this model's chat template does not render tool calls", detail="tools")
        log.warning("this model's chat template leaves the calls of earlier turns out of the prompt")
