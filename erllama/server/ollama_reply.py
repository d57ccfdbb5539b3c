"""Answers in the shapes of /api/generate and /api/chat: one JSON object a line, or one at all."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import trio

from erllama import Thinking, Token, TokenId, ToolCallDelta

from .failures import body_of
from .reply import json_bytes, text_bytes

if TYPE_CHECKING:
    from erllama import Completion, Event, Model, TokenLogprob
    from erllama.errors import ErllamaError

    from .generation import Answer


def now() -> str:
    """RFC 3339, in UTC."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """Ollama counts them."""
    return max(0, round(seconds * 1e9))


@dataclass(slots=True)
class _Call:
    """A call as far as it has come."""

    id: str = ""
    name: str = ""
    arguments: str = ""
    is_told: bool = False

    def told(self) -> dict[str, Any] | None:
        """It, once it is whole: text that begins like a JSON object is one only at its end."""
        if self.is_told or not self.arguments.endswith("}"):
            return None
        try:
            arguments = json.loads(self.arguments)
            json_bytes(arguments)  # a number may be too large to be written again
        except (ValueError, RecursionError):
            return None
        self.is_told = True
        return _call(self.id, self.name, arguments)


class OllamaReply:
    """One reply. `is_chat`: the text is in a message."""

    media_type = "application/x-ndjson"
    ping = b""
    loading = b""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._model = model
        self._is_chat = is_chat
        self._started = trio.current_time()
        self._calls: dict[int, _Call] = {}
        self._untold: list[TokenLogprob] = []  # of tokens whose text is not out yet
        self._head = b'{"model":%b,"created_at":"' % text_bytes(model)
        self._before_text = b'","message":{"role":"assistant","content":' if is_chat else b'","response":'
        self._text_end = b'%b,"done":false}\n' % (b"}" if is_chat else b"")

    def _object(self, text: str, **more: Any) -> dict[str, Any]:
        head = {"model": self._model, "created_at": now()}
        if self._is_chat:
            message = {"role": "assistant", "content": text, **more.pop("message", {})}
            return {**head, "message": message, **more}
        return {**head, "response": text, **more}

    def _text_line(self, text: str) -> bytes:
        """`_line`, by hand: there is one for every token."""
        return b"".join((self._head, now().encode(), self._before_text, text_bytes(text), self._text_end))

    def _line(self, text: str, **more: Any) -> bytes:
        return json_bytes(self._object(text, **{"done": False, **more})) + b"\n"

    async def begin(self, answer: Answer) -> bytes:
        """Nothing but the headers: a line would be read as a piece of the answer."""
        return b""

    async def event(self, answer: Answer, event: Event) -> bytes:
        """A line with more of the text, or of the thinking."""
        match event:
            case TokenId(logprob=logprob):
                self._untold += [] if logprob is None else [logprob]
            case Token(text) if not self._untold:
                return self._text_line(text)
            case Token(text):
                return self._line(text, **self._logprobs(answer.model))
            case Thinking(text):
                thought = {"thinking": text}
                return self._line("", **({"message": thought} if self._is_chat else thought))
            case ToolCallDelta():
                return self._tool_call(event)
        return b""

    def _tool_call(self, event: ToolCallDelta) -> bytes:
        """A line with a call as soon as it is whole."""
        call = self._calls.setdefault(event.index, _Call())
        call.id, call.name = event.id or call.id, event.name or call.name
        call.arguments += event.arguments
        told = call.told()
        return self._line("", message={"tool_calls": [told]}) if told else b""

    def _logprobs(self, model: Model) -> dict[str, Any]:
        """Those of the tokens since the last line."""
        told, self._untold = self._untold, []
        return {"logprobs": _logprobs(model, told)} if told else {}

    def remark(self, text: str) -> bytes:
        """There are no comments."""
        return b""

    def end(self, answer: Answer, completion: Completion) -> bytes:
        """The calls that were not told yet, and the line with the counts."""
        seen = {call.id for call in self._calls.values() if call.is_told}
        calls = [call for call in tool_calls(completion) if call["id"] not in seen]
        lines = self._line("", message={"tool_calls": calls}) if calls else b""
        ending = {**self._ending(answer, completion), **self._logprobs(answer.model)}
        return lines + json_bytes(self._object("", **ending)) + b"\n"

    def failed(self, error: ErllamaError, request_id: str) -> bytes:
        """A line with the error."""
        return json_bytes(body_of(error, "ollama", request_id)) + b"\n"

    def whole(self, answer: Answer, completion: Completion) -> dict[str, Any]:
        """The reply as one object."""
        message, more = completion.message, dict[str, Any]()
        if message is not None and message.reasoning_content:
            more["thinking"] = message.reasoning_content
        if self._is_chat:
            calls = tool_calls(completion)
            more = {"message": {**more, **({"tool_calls": calls} if calls else {})}}
        ending = self._ending(answer, completion)
        if completion.logprobs is not None:
            ending["logprobs"] = _logprobs(answer.model, completion.logprobs)
        return self._object(completion.reply, **more, **ending)

    def _ending(self, answer: Answer, completion: Completion) -> dict[str, Any]:
        stats = completion.stats
        cuts = {"dropped_messages": answer.n_dropped, "cut_tokens": answer.n_cut}
        return {
            "done": True,
            "done_reason": "length" if completion.finish_reason == "length" else "stop",
            "total_duration": nanoseconds(trio.current_time() - self._started),
            "load_duration": nanoseconds(answer.lease.load_s),
            "prompt_eval_count": stats.n_prompt,
            "prompt_eval_cached_count": stats.n_cached,  # a part of prompt_eval_count
            "prompt_eval_duration": nanoseconds(stats.restore_s + stats.prefill_s),
            "eval_count": stats.n_generated,
            "eval_duration": nanoseconds(stats.decode_s),
            **{name: n for name, n in cuts.items() if n},  # headers may be out before they are known
        }

    def preloaded(self, reason: str, load_s: float) -> dict[str, Any]:
        """The reply to a request without a prompt."""
        return self._object(
            "",
            done=True,
            done_reason=reason,
            total_duration=nanoseconds(trio.current_time() - self._started),
            load_duration=nanoseconds(load_s),
        )


def tool_calls(completion: Completion) -> list[dict[str, Any]]:
    """Calls, with decoded arguments."""
    message = completion.message
    calls = () if message is None else message.tool_calls
    return [_call(call.id, call.name, call.arguments) for call in calls]


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


def _logprobs(model: Model, logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
    def told(token: int, logprob: float) -> dict[str, Any]:
        return {"token": model.detokenize([token]), "logprob": logprob}

    return [
        {**told(each.token, each.logprob), "top_logprobs": [told(*other) for other in each.top]}
        for each in logprobs
    ]
