"""From bodies of the OpenAI dialect to what the engine is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .body import check_count, check_keys, given, ignored_note, refuse
from .generation import Ask
from .openai_body import MAX_TOKENS

if TYPE_CHECKING:
    from .openai_body import ChatBody, ResponsesStreamOptions, Sampled, StreamOptions, TextBody, TokenizeBody
    from .settings import LimitsTable

# Accepted because clients send them to every server; they change nothing here, and the reply says so.
NO_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_retention"),
    *("verbosity", "keep_alive", "prediction", "prompt_cache_options"),
)
NO_REASONING = ("none", "minimal")


# Keys of a response format by its type; the schema of a json_object is erllama's own.
FORMAT_KEYS = {"text": {"type"}, "json_object": {"type", "schema"}, "json_schema": {"type", "json_schema"}}
SCHEMA_KEYS = {"name", "description", "schema", "strict"}


def chat_ask(body: ChatBody, limits: LimitsTable, session_id: str | None) -> Ask:
    """Raises: `InvalidOption` for what cannot be honoured."""
    check_count("messages", body.messages, limits.max_messages)
    check_count("tools", body.tools, limits.max_tools)
    check_format("response_format", body.response_format)
    for i, tool in enumerate(body.tools or ()):
        check_keys(f"tools.{i}", tool, {"type", "function"})
    if body.modalities not in (None, ["text"]):
        raise refuse("modalities", "only text")
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs", "it needs logprobs: true")
    generation = _generation(body)
    if body.max_completion_tokens is not None:
        generation["max_tokens"] = body.max_completion_tokens
    if body.logprobs:
        generation["logprobs"] = body.top_logprobs or 0
    if body.thinking_budget_tokens is not None:
        generation["thinking_budget_tokens"] = body.thinking_budget_tokens
    return Ask(
        model=body.model,
        messages=body.messages,
        chat=chat_options(
            tools=body.tools,
            tool_choice=body.tool_choice,
            parallel=body.parallel_tool_calls,
            response_format=body.response_format,
            effort=body.reasoning_effort,
            template_kwargs=body.chat_template_kwargs,
        ),
        generation=generation,
        session_id=session_id or body.prompt_cache_key,
        cache_key=body.prompt_cache_key,
        notes=ignored(body),
        reasoning=_reasoning(body),
    )


def _reasoning(body: ChatBody) -> tuple[str, ...]:
    budget = () if body.thinking_budget_tokens is None else ("thinking_budget_tokens",)
    return (*budget, *asks_to_reason("reasoning_effort", body.reasoning_effort))


def asks_to_reason(name: str, effort: str | None) -> tuple[str, ...]:
    """The name of the field if its effort is one."""
    return () if effort is None or effort in NO_REASONING else (name,)


def text_ask(body: TextBody, session_id: str | None) -> Ask:
    """Raises: `InvalidOption` for what cannot be honoured."""
    if body.echo:
        raise refuse("echo", "the prompt is not repeated")
    if body.suffix:
        raise refuse("suffix", "text cannot be filled in before a suffix")
    if body.best_of not in (None, 1):
        raise refuse("best_of", "only 1")
    generation = _generation(body)
    if body.logprobs is not None:
        generation["logprobs"] = body.logprobs
    if body.json_schema is not None:
        generation["json_schema"] = body.json_schema
    return Ask(
        model=body.model,
        prompt=_one_prompt(body.prompt),
        generation=generation,
        session_id=session_id or body.prompt_cache_key,
        cache_key=body.prompt_cache_key,
        notes=ignored(body),
    )


def check_format(place: str, response_format: dict[str, Any] | None) -> None:
    """Raise `UnknownOption` for a key that a format of its type has not; its values are looked at later."""
    if response_format is None:
        return
    kind = response_format.get("type")
    if isinstance(kind, str) and kind in FORMAT_KEYS:
        check_keys(place, response_format, FORMAT_KEYS[kind])
    check_keys(f"{place}.json_schema", response_format.get("json_schema"), SCHEMA_KEYS)


def check_tokenize(body: TokenizeBody, limits: LimitsTable) -> None:
    """Raises: `InvalidOption` for what would have no effect."""
    if (body.content is None) == (body.messages is None):
        raise refuse("content", "give content or messages")
    check_count("messages", body.messages, limits.max_messages)
    check_count("tools", body.tools, limits.max_tools)
    useless = {"tools"} if body.messages is None else {"add_special", "parse_special"}
    for name in sorted(useless & body.model_fields_set):
        raise refuse(name, f"it has no effect on {'content' if body.messages is None else 'messages'}")


def chat_options(
    *,
    tools: list[dict[str, Any]] | None,
    tool_choice: str | dict[str, Any] | None,
    parallel: bool | None,
    response_format: dict[str, Any] | None,
    effort: str | None,
    template_kwargs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Options of `Model.chat`."""
    kwargs = dict(template_kwargs or {})
    if effort is not None and effort not in NO_REASONING:
        kwargs.setdefault("reasoning_effort", effort)
    return given(
        {
            "tools": tools or None,
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel,
            "response_format": response_format,
            "reasoning": "off" if effort in NO_REASONING else None,
            "template_kwargs": kwargs or None,
        }
    )


def ignored(body: Sampled) -> tuple[str, ...]:
    """The header for fields that change nothing."""
    return ignored_note(
        [name for name in NO_EFFECT if getattr(body, name, None) is not None]
        + obfuscation(body.stream_options)
    )


def obfuscation(options: StreamOptions | ResponsesStreamOptions | None) -> list[str]:
    """The name of an option that is accepted; its padding hides lengths from those who read the wire."""
    wanted = options is not None and options.include_obfuscation
    return ["stream_options.include_obfuscation"] if wanted else []


def _generation(body: Sampled) -> dict[str, Any]:
    if body.n not in (None, 1):
        raise refuse("n", f"one answer for a request, not {body.n}; ask several times, prompts are shared")
    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options", "it needs stream: true")
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(body, name):
            raise refuse(name, "only 0; there is repetition_penalty")
    return given(
        {
            "max_tokens": body.max_tokens or MAX_TOKENS,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "min_p": body.min_p,
            "repetition_penalty": body.repetition_penalty,
            "seed": None if body.seed is None else body.seed % (2**32 - 1),  # OpenAI's is of 64 bits
            "stop": body.stop,
            "grammar": body.grammar,
            "cache": body.cache,
            "exact": body.exact,
            "logit_bias": None if body.logit_bias is None else _biases(body.logit_bias),
        }
    )


def _biases(biases: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError:
        raise refuse("logit_bias", "its keys are token ids") from None


def _one_prompt(prompt: Any) -> str | list[int]:
    """A prompt, or a list of one."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) != 1:
            raise refuse("prompt", "one prompt for a request; ask several times, they are shared")
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else list(prompt)
