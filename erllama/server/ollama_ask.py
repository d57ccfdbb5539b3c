"""From bodies of the Ollama dialect to what the engine is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from erllama.errors import InvalidContent

from .body import check_count, given, ignored_note, refuse
from .duration import seconds_of
from .generation import Ask, Plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .ollama_body import Asked, GenerateBody, OllamaChatBody, Options
    from .settings import LimitsTable

UNLIMITED = 2**31 - 1


def generate_ask(body: GenerateBody, session_id: str | None) -> Ask:
    """A user's message, or with `raw`, or for a model without a template, the prompt as it is.

    Raises: `InvalidOption`.
    """
    for name in ("suffix", "template", "context", "images"):
        if getattr(body, name):
            raise refuse(name, "not supported")
    shared = _shared(body, session_id)
    plain = _plain(body, shared["generation"])
    if body.raw:
        return Ask(**{**shared, "generation": plain.generation, "reasoning": ()}, prompt=plain.prompt)
    system = [{"role": "system", "content": body.system}] if body.system else []
    return Ask(
        **shared,
        messages=[*system, {"role": "user", "content": body.prompt}],
        chat=_chat_options(body, None),
        plain=plain,
    )


def _plain(body: GenerateBody, generation: Mapping[str, Any]) -> Plain:
    schema: dict[str, Any] | None = body.format if isinstance(body.format, dict) else {"type": "object"}
    if _format(body.format) is None:
        schema = None
    prompt = f"{body.system}\n\n{body.prompt}" if body.system else body.prompt
    return Plain(prompt, given({**generation, "json_schema": schema}))


def chat_ask(body: OllamaChatBody, limits: LimitsTable, session_id: str | None) -> Ask:
    """Raises: `InvalidOption`, `InvalidContent`."""
    check_count("messages", body.messages, limits.max_messages)
    check_count("tools", body.tools, limits.max_tools)
    return Ask(
        **_shared(body, session_id),
        messages=[_message(message, i) for i, message in enumerate(body.messages or ())],
        chat=_chat_options(body, body.tools),
    )


def _shared(body: Asked, session_id: str | None) -> dict[str, Any]:
    options = body.options
    extra = [*(body.model_extra or ()), *((options.model_extra or ()) if options else ())]
    if body.think is not None and getattr(body, "raw", False):
        extra.append("think")
    generation = _generation(options)
    if body.logprobs:
        generation["logprobs"] = body.top_logprobs or 0
    return {
        "model": body.model,
        "generation": generation,
        "session_id": session_id,
        "keep_alive_s": seconds_of(body.keep_alive),
        "may_cut": body.truncate,
        "notes": ignored_note(extra),
        "reasoning": ("think",) if body.think else (),
    }


def _generation(options: Options | None) -> dict[str, Any]:
    if options is None:
        return {"max_tokens": UNLIMITED}
    for name, neutral in (
        ("presence_penalty", 0),
        ("frequency_penalty", 0),
        ("mirostat", 0),
        ("tfs_z", 1),
        ("typical_p", 1),
    ):
        if getattr(options, name) not in (None, neutral):
            raise refuse(f"options.{name}", f"only {neutral}, which turns it off")
    n = options.num_predict
    if n == 0:
        raise refuse("options.num_predict", "above 0, or below for no limit")
    seed = options.seed
    return given(
        {
            "max_tokens": UNLIMITED if n is None or n < 0 else n,
            "temperature": options.temperature,
            "top_k": options.top_k,
            "top_p": options.top_p,
            "min_p": options.min_p,
            "repetition_penalty": options.repeat_penalty,
            "seed": None if seed is None or seed < 0 else seed % (2**32 - 1),
            "stop": options.stop,
        }
    )


def _chat_options(body: Asked, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    effort = body.think if isinstance(body.think, str) else None
    return given(
        {
            "tools": tools or None,
            "response_format": _format(body.format),
            "reasoning": "off" if body.think is False else None,
            "template_kwargs": None if effort is None else {"reasoning_effort": effort},
        }
    )


def _format(given_format: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if isinstance(given_format, dict):
        return {"type": "json_schema", "json_schema": {"schema": given_format}}
    if not given_format:
        return None
    if given_format != "json":
        raise refuse("format", '"json" or a JSON schema')
    return {"type": "json_object"}


def _message(message: Mapping[str, Any], i: int) -> dict[str, Any]:
    if message.get("images"):
        raise InvalidContent(f"messages[{i}]: images cannot be used", detail={"key": "messages"})
    made = {"role": message.get("role"), "content": message.get("content") or ""}
    if message.get("thinking"):
        made["reasoning_content"] = message["thinking"]
    if message.get("tool_name"):
        made["name"] = message["tool_name"]
    if message.get("tool_call_id"):
        made["tool_call_id"] = message["tool_call_id"]
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise InvalidContent(f"messages[{i}]: tool_calls is a list", detail={"key": "messages"})
        made["tool_calls"] = [_call(call) for call in calls]
    return made


def _call(call: Any) -> Any:
    """Without what Ollama adds; what is wrong with it is told where messages are checked."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = {key: call["function"].get(key) for key in ("name", "arguments")}
    return given({"id": call.get("id"), "type": "function", "function": function})
