"""From bodies of the Anthropic dialect to what the engine is asked.

`cache_control` needs no translation: system and tools are pinned with every request, and any other beginning
is found wherever the prompts part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from erllama.errors import InvalidContent, InvalidOption

from .anthropic_body import ThinkingOption
from .body import check_count, check_keys, given, ignored_note, refuse
from .generation import Ask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .anthropic_body import CountBody, MessagesBody, ToolChoice
    from .settings import LimitsTable

CALL_PREFIX = "toolu_"
NO_EFFECT = (
    *("service_tier", "inference_geo", "context_management", "speed", "diagnostics"),
    *("user_profile_id", "workspace_id"),
)
TOOL_KEYS = {"type", "name", "description", "input_schema", "strict", "cache_control"}
NO_EFFECT_OF_TOOL = ("allowed_callers", "defer_loading", "eager_input_streaming", "input_examples")
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
BREAK = "\n\n"  # between the text blocks of a message


def messages_ask(body: MessagesBody, limits: LimitsTable, session_id: str | None) -> Ask:
    """Raises: `InvalidOption`, `InvalidContent` for what cannot be honoured."""
    if body.container is not None:
        raise refuse("container", "there are none")
    if body.thread is not None:
        raise _no_threads()
    thinking = _thinking(body)
    return Ask(
        model=body.model,
        messages=conversation(body, limits),
        chat=chat_options(body),
        generation=given(
            {
                "max_tokens": body.max_tokens,
                "temperature": body.temperature,
                "top_p": body.top_p,
                "top_k": body.top_k,
                "stop": body.stop_sequences,
                "thinking_budget_tokens": thinking.budget_tokens,
            }
        ),
        session_id=session_id or (body.metadata.user_id if body.metadata else None) or None,
        notes=ignored_note(_ignored(body)),
        reasoning=_reasoning(body, thinking),
    )


def _reasoning(body: MessagesBody, thinking: ThinkingOption) -> tuple[str, ...]:
    """The fields that ask for it."""
    effort = None if body.output_config is None else body.output_config.effort
    asked = {"thinking": thinking.type != "disabled", "output_config.effort": effort is not None}
    return tuple(name for name, is_asked in asked.items() if is_asked)


def _no_threads() -> InvalidOption:
    """Worded as the package reads it: its tool runner then goes on without, with the whole conversation."""
    return InvalidOption(
        "thread: conversations are the client's to keep; send all of their messages",
        detail={"key": "thread", "error_code": "thread_unsupported_request"},
    )


def _ignored(body: MessagesBody) -> list[str]:
    names = [name for name in NO_EFFECT if getattr(body, name) is not None]
    if body.output_config is not None and body.output_config.task_budget is not None:
        names.append("output_config.task_budget")
    of_tools = {key for tool in body.tools or () for key in NO_EFFECT_OF_TOOL if tool.get(key)}
    return [*names, *(f"tools.{key}" for key in of_tools)]


def wants_thinking(body: CountBody) -> bool:
    """Whether thinking is to be told."""
    thinking = _thinking(body)
    return thinking.type != "disabled" and thinking.display != "omitted"


def _thinking(body: CountBody) -> ThinkingOption:
    thinking = body.thinking or ThinkingOption(type="disabled")
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        raise refuse("thinking.budget_tokens", "a number of tokens above 0")
    return thinking


def conversation(body: CountBody, limits: LimitsTable) -> list[dict[str, Any]]:
    """The messages as the engine takes them. Raises: `InvalidOption`, `InvalidContent`."""
    check_count("messages", body.messages, limits.max_messages)
    check_count("tools", body.tools, limits.max_tools)
    if body.mcp_servers:
        raise refuse("mcp_servers", "tools are the client's to call")
    system = body.system if isinstance(body.system, str) else _text(body.system or [], "system")
    made: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(body.messages):
        made += _messages(message, i)
    return made


def chat_options(body: CountBody) -> dict[str, Any]:
    """Options of `Model.chat`."""
    choice = body.tool_choice
    tools = [_tool(tool, i) for i, tool in enumerate(body.tools or ())]
    parallel = False if choice is not None and choice.disable_parallel_tool_use else None
    effort = None if body.output_config is None else body.output_config.effort
    return given(
        {
            "tools": tools or None,
            "tool_choice": _choice(choice),
            "parallel_tool_calls": parallel,
            "response_format": _format(body),
            "reasoning": "off" if _thinking(body).type == "disabled" else None,
            "template_kwargs": None if effort is None else {"reasoning_effort": EFFORTS[effort]},
        }
    )


def _tool(tool: Mapping[str, Any], i: int) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise refuse(f"tools.{i}", f"the server has no tool of type {tool['type']!r}; only the client's own")
    check_keys(f"tools.{i}", tool, {*TOOL_KEYS, *NO_EFFECT_OF_TOOL})
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
        "strict": tool.get("strict"),
    }
    return {"type": "function", "function": given(function)}


def _choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _format(body: CountBody) -> dict[str, Any] | None:
    new = None if body.output_config is None else body.output_config.format
    if new is not None and body.output_format is not None:
        raise refuse("output_format", "it is output_config.format under an older name; send one of them")
    found = body.output_format if new is None else new
    if found is None:
        return None
    if found.get("type") != "json_schema":
        raise refuse("output_config.format", "a JSON schema: {type: json_schema, schema: …}")
    check_keys("output_config.format", found, {"type", "schema"})
    return {"type": "json_schema", "json_schema": {"schema": found.get("schema")}}


# --- blocks ---


def _messages(message: Mapping[str, Any], i: int) -> list[dict[str, Any]]:
    where, role, content = f"messages.{i}", message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidContent(f"{where}: role is user or assistant, not {role!r}", detail={"key": where})
    check_keys(where, message, {"role", "content"})
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise InvalidContent(f"{where}: content is text or a list of blocks", detail={"key": where})
    if role == "assistant":
        return [_assistant(content, where)]
    return _user(content, str(role), where)


def _user(blocks: list[Any], role: str, where: str) -> list[dict[str, Any]]:
    """Results first, each a message of its own, and the rest behind them."""
    results = [_result(b, where) for b in blocks if _kind(b) == "tool_result"]
    rest = [b for b in blocks if _kind(b) != "tool_result"]
    if not rest and results:
        return results
    return [*results, {"role": role, "content": _text(rest, where)}]


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content") or ""
    text = content if isinstance(content, str) else _text(content, where)
    if block.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": call_id(block.get("tool_use_id"), where), "content": text}


def _assistant(blocks: list[Any], where: str) -> dict[str, Any]:
    said = [b for b in blocks if _kind(b) == "text"]
    thought = [b for b in blocks if _kind(b) == "thinking"]
    calls = [_call(b, where) for b in blocks if _kind(b) == "tool_use"]
    for block in blocks:
        if _kind(block) not in ("text", "thinking", "redacted_thinking", "tool_use"):
            raise _unusable(block, where)
    made: dict[str, Any] = {"role": "assistant", "content": _text(said, where)}
    if thought:
        made["reasoning_content"] = "".join(str(b.get("thinking", "")) for b in thought)
    if calls:
        made["tool_calls"] = calls
    return made


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": block.get("input") or {}}
    return {"id": call_id(block.get("id"), where), "type": "function", "function": function}


def call_id(given_id: object, where: str) -> str:
    """The engine's id of a call; clients see it with a prefix."""
    if not isinstance(given_id, str) or not given_id:
        raise InvalidContent(f"{where}: the id of a tool use is missing", detail={"key": where})
    return given_id.removeprefix(CALL_PREFIX)


def _text(blocks: list[Any], where: str) -> str:
    texts = []
    for block in blocks:
        source = block.get("source") if isinstance(block, dict) else None
        if _kind(block) == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif _kind(block) == "document" and isinstance(source, dict) and source.get("type") == "text":
            texts.append(str(source.get("data", "")))
        else:
            raise _unusable(block, where)
    return BREAK.join(texts)


def _kind(block: object) -> object:
    return block.get("type") if isinstance(block, dict) else type(block).__name__


def _unusable(block: object, where: str) -> InvalidContent:
    return InvalidContent(
        f"{where}: a block of type {_kind(block)!r} cannot be used here", detail={"key": where}
    )
