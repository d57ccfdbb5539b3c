"""/v1/responses: from its body to what the engine is asked, and the answer in its shapes and events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from erllama import Thinking, Token, ToolCallDelta
from erllama.errors import Overloaded

from .body import check_count, check_keys, given, ignored_note, refuse
from .generation import Ask
from .openai_ask import SCHEMA_KEYS, asks_to_reason, chat_options, check_format, obfuscation
from .openai_body import MAX_TOKENS
from .openai_chat import new_id
from .openai_input import Threads as Threads
from .openai_input import messages_of
from .reply import json_bytes, remark

if TYPE_CHECKING:
    from erllama import Completion, Event
    from erllama.errors import ErllamaError

    from .generation import Answer
    from .openai_body import ResponsesBody, ResponsesText
    from .settings import LimitsTable

NO_EFFECT = (
    *("user", "service_tier", "safety_identifier", "prompt_cache_retention", "include"),
    *("max_tool_calls", "prompt_cache_options"),
)


def responses_ask(
    body: ResponsesBody, limits: LimitsTable, threads: Threads, session_id: str | None, salt: bytes
) -> Ask:
    """Raises: `InvalidOption`, `InvalidContent` for what cannot be honoured, or goes on from what is gone."""
    if body.background:
        raise refuse("background", "responses are computed while their client waits")
    check_count("input", body.input if isinstance(body.input, list) else None, limits.max_messages)
    check_count("tools", body.tools, limits.max_tools)
    said = [*threads.get(body.previous_response_id, salt), *messages_of(body.input)]
    check_count("input", said, limits.max_messages)
    effort = None if body.reasoning is None else body.reasoning.effort
    head = [{"role": "system", "content": body.instructions}] if body.instructions else []
    return Ask(
        model=body.model,
        messages=[*head, *said],
        chat=chat_options(
            tools=[_tool(tool) for tool in body.tools or ()],
            tool_choice=_choice(body.tool_choice),
            parallel=body.parallel_tool_calls,
            response_format=_format(body),
            effort=effort,
        ),
        generation=given(
            {
                "max_tokens": body.max_output_tokens or MAX_TOKENS,
                "temperature": body.temperature,
                "top_p": body.top_p,
                "top_k": body.top_k,
            }
        ),
        session_id=session_id or body.prompt_cache_key,
        cache_key=body.prompt_cache_key,
        may_cut=None if body.truncation is None else body.truncation == "auto",
        notes=ignored_note(_ignored(body)),
        reasoning=asks_to_reason("reasoning.effort", effort),
    )


def _ignored(body: ResponsesBody) -> list[str]:
    inner = {
        "text.verbosity": body.text and body.text.verbosity,
        "reasoning.summary": body.reasoning and (body.reasoning.summary or body.reasoning.generate_summary),
    }
    names = [name for name in NO_EFFECT if getattr(body, name) is not None]
    return [*names, *(name for name, value in inner.items() if value), *obfuscation(body.stream_options)]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Flat here, nested in chats."""
    if tool.get("type") != "function":
        raise refuse("tools", f"only functions, not {tool.get('type')!r}")
    function = {key: value for key, value in tool.items() if key != "type" and value is not None}
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(body: ResponsesBody) -> dict[str, Any] | None:
    """`response_format`, or `text.format`, whose schema is not nested. Raises: `InvalidOption`."""
    check_format("response_format", body.response_format)
    found = None if body.text is None else body.text.format
    if body.response_format is not None:
        if found is not None:
            raise refuse("response_format", "it is text.format as chats write it; send one of them")
        return body.response_format
    if found is not None and found.get("type") == "json_schema" and "json_schema" not in found:
        check_keys("text.format", found, {"type", *SCHEMA_KEYS})
        return {"type": "json_schema", "json_schema": {"schema": found.get("schema")}}
    check_format("text.format", found)
    return found


def _told_text(text: ResponsesText | None) -> dict[str, Any]:
    told = {} if text is None else text.model_dump(exclude_none=True)
    return {"format": {"type": "text"}, **told}


class ResponsesReply:
    """One reply: items in the order in which they begin, each opened, grown and closed."""

    media_type = "text/event-stream"
    ping = b": ping\n\n"
    loading = b": loading\n\n"
    remark = staticmethod(remark)

    def __init__(self, body: ResponsesBody, ask: Ask, threads: Threads, salt: bytes) -> None:
        self._body = body
        self._ask = ask
        self._threads = threads
        self._salt = salt  # whose thread it is
        self._id = new_id("resp_")
        self._created = int(time.time())
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._text = ""

    # --- the response object ---

    def _response(
        self, status: str, completion: Completion | None = None, n_reasoning: int = 0
    ) -> dict[str, Any]:
        body = self._body
        cut = completion is not None and completion.finish_reason == "length"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": body.model,
            "output": self._output() if completion is not None else [],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "text": _told_text(body.text),
            "truncation": body.truncation,
            "usage": None if completion is None else _usage(completion, n_reasoning),
        }

    def _output(self) -> list[dict[str, Any]]:
        """The items that count: a call that was cut off is none."""
        return [i for i in self._items if (i["type"], i["status"]) != ("function_call", "incomplete")]

    def whole(self, answer: Answer, completion: Completion) -> dict[str, Any]:
        """The reply as one object."""
        message = completion.message
        assert message is not None, "chats have messages"
        if message.reasoning_content:
            self._items.append(_reasoning(message.reasoning_content))
        if message.content or not (message.tool_calls or self._items):
            self._items.append(_message(message.content))
        for call in message.tool_calls:
            self._items.append(_call(call.id, call.name, call.arguments_json))
        if not message.tool_calls:  # which are whole
            self._items[-1]["status"] = _status(completion)
        self._keep(completion)
        return self._response(_status(completion), completion, answer.n_reasoning)

    def _keep(self, completion: Completion) -> None:
        if self._body.store is False or completion.message is None:
            return
        n_head = 1 if self._body.instructions else 0  # instructions are one turn's
        self._threads.put(
            self._id, self._salt, [*(self._ask.messages or ())[n_head:], completion.message.to_dict()]
        )

    # --- events ---

    def _event(self, kind: str, **values: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **values}
        self._number += 1
        return f"event: {kind}\n".encode() + b"data: " + json_bytes(data) + b"\n\n"

    async def begin(self, answer: Answer) -> bytes:
        """The response, empty."""
        return self._begun()

    def _begun(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    async def event(self, answer: Answer, event: Event) -> bytes:
        """A delta, and what has to be opened or closed before it."""
        match event:
            case Token(text):
                opened = self._open("message", _message(""))
                return opened + self._delta("response.output_text.delta", text, content_index=0, logprobs=[])
            case Thinking(text):
                opened = self._open("reasoning", _reasoning(""))
                return opened + self._delta("response.reasoning_text.delta", text, content_index=0)
            case ToolCallDelta(id=str() as call_id, name=str() as name):
                opened = self._close() + self._open("function_call", _call(call_id, name, ""), new=True)
                return opened + (
                    self._delta("response.function_call_arguments.delta", event.arguments)
                    if event.arguments
                    else b""
                )
            case ToolCallDelta():
                return self._delta("response.function_call_arguments.delta", event.arguments)
        return b""

    def _delta(self, kind: str, text: str, **values: Any) -> bytes:
        self._text += text
        item = self._items[-1]
        return self._event(kind, item_id=item["id"], output_index=len(self._items) - 1, delta=text, **values)

    def _open(self, kind: str, item: dict[str, Any], *, new: bool = False) -> bytes:
        last = self._items[-1] if self._items else None
        if not new and last is not None and last["type"] == kind and last["status"] == "in_progress":
            return b""
        closed = self._close()
        begun = {**item, "status": "in_progress"}
        if "content" in begun:
            begun["content"] = []
        self._items.append(begun)
        self._text = ""
        at = len(self._items) - 1
        frames = closed + self._event("response.output_item.added", output_index=at, item=begun)
        if kind == "message":
            frames += self._event(
                "response.content_part.added",
                item_id=begun["id"],
                output_index=at,
                content_index=0,
                part=_part(""),
            )
        return frames

    def _close(self, status: str = "completed") -> bytes:
        """End the item that is open, if one is."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return b""
        item, at = self._items[-1], len(self._items) - 1
        place: dict[str, Any] = {"item_id": item["id"], "output_index": at}
        item["status"] = "completed" if item["type"] == "function_call" else status
        match item["type"]:
            case "message":
                item["content"] = [_part(self._text)]
                frames = self._event(
                    "response.output_text.done", **place, content_index=0, text=self._text, logprobs=[]
                ) + self._event(
                    "response.content_part.done", **place, content_index=0, part=item["content"][0]
                )
            case "reasoning":
                item["content"] = [{"type": "reasoning_text", "text": self._text}]
                frames = self._event(
                    "response.reasoning_text.done", **place, content_index=0, text=self._text
                )
            case _:
                item["arguments"] = self._text
                frames = self._event(
                    "response.function_call_arguments.done",
                    **place,
                    name=item["name"],
                    arguments=self._text,
                )
        return frames + self._event("response.output_item.done", output_index=at, item=item)

    def _leave_cut_call(self, completion: Completion) -> None:
        """A call that the limit of tokens cut off has no end: clients run what is told as done."""
        last = self._items[-1] if self._items else None
        if last is None or last["type"] != "function_call" or completion.message is None:
            return
        if last["call_id"] not in {call.id for call in completion.message.tool_calls}:
            last["status"] = "incomplete"

    def end(self, answer: Answer, completion: Completion) -> bytes:
        """The open item's end, and the whole response."""
        self._leave_cut_call(completion)
        status = _status(completion)
        frames = self._close(status)
        if not self._output():
            frames += self._open("message", _message("")) + self._close(status)
        self._keep(completion)
        response = self._response(status, completion, answer.n_reasoning)
        return frames + self._event(f"response.{status}", response=response)

    def failed(self, error: ErllamaError, request_id: str) -> bytes:
        """The response, failed."""
        # The official package reads no stream that begins with another event.
        begun = b"" if self._number else self._begun()
        told = {"code": _error_code(error), "message": str(error)}
        return begun + self._event("response.failed", response=self._response("failed") | {"error": told})


def _error_code(error: ErllamaError) -> str:
    """The word of those that the package knows (its `ResponseError`) which comes closest."""
    if isinstance(error, Overloaded) and error.http_status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.http_status < 500 else "server_error"


def _status(completion: Completion) -> str:
    return "incomplete" if completion.finish_reason == "length" else "completed"


def _usage(completion: Completion, n_reasoning: int) -> dict[str, Any]:
    stats = completion.stats
    n_kept = min(completion.cache_delta.created, stats.n_prompt - stats.n_cached)
    return {
        "input_tokens": stats.n_prompt,
        "input_tokens_details": {"cached_tokens": stats.n_cached, "cache_write_tokens": n_kept},
        "output_tokens": stats.n_generated,
        "output_tokens_details": {"reasoning_tokens": n_reasoning},
        "total_tokens": stats.n_prompt + stats.n_generated,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(text: str) -> dict[str, Any]:
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [_part(text)],
    }


def _reasoning(text: str) -> dict[str, Any]:
    return {
        "id": new_id("rs_"),
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": new_id("fc_"),
        "type": "function_call",
        "status": "completed",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }
