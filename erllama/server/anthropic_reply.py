"""Answers in the shapes of /v1/messages: one block open at a time, opened, grown and closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from erllama import Thinking, ThinkingEnd, Token, ToolCallDelta

from .anthropic_ask import CALL_PREFIX
from .failures import body_of
from .openai_chat import new_id
from .reply import json_bytes, remark, text_bytes

if TYPE_CHECKING:
    from erllama import Completion, Event
    from erllama.errors import ErllamaError

    from .generation import Answer


def event_bytes(kind: str, **values: Any) -> bytes:
    """One named server-sent event."""
    return f"event: {kind}\n".encode() + b"data: " + json_bytes({"type": kind, **values}) + b"\n\n"


PING = event_bytes("ping")
TEXT_DELTA = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":%b}}\n\n'
)


class MessagesReply:
    """One reply."""

    media_type = "text/event-stream"
    ping = PING
    loading = PING
    remark = staticmethod(remark)

    def __init__(self, model: str, *, thinking: bool) -> None:
        self._model = model
        self._thinking = thinking
        self._id = new_id("msg_")
        self._n_blocks = 0
        self._open: str | None = None
        self._started = False

    # --- whole ---

    def whole(self, answer: Answer, completion: Completion) -> dict[str, Any]:
        """The reply as one object."""
        message = completion.message
        assert message is not None, "chats have messages"
        content: list[dict[str, Any]] = []
        if message.reasoning_content and self._thinking:
            signature = answer.signature.hex()
            content.append(
                {"type": "thinking", "thinking": message.reasoning_content, "signature": signature}
            )
        if message.content:
            content.append({"type": "text", "text": message.content})
        content += [
            {"type": "tool_use", "id": CALL_PREFIX + c.id, "name": c.name, "input": c.arguments}
            for c in message.tool_calls
        ]
        return {
            **self._message(),
            "content": content,
            **_ending(completion),
            "usage": usage_of(completion),
        }

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    # --- streamed ---

    async def begin(self, answer: Answer) -> bytes:
        """A sign of life: what was reused is known when the first token is there, and told then."""
        return PING

    async def event(self, answer: Answer, event: Event) -> bytes:
        """A delta, and what has to be opened or closed before it."""
        frames = b"" if self._started else self._start(*await answer.usage())
        match event:
            case Token(text):
                if self._open != "text":
                    frames += self._begin("text", {"type": "text", "text": ""})
                frames += self._text_delta(text)
            case Thinking(text) if self._thinking:
                frames += self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                frames += self._delta({"type": "thinking_delta", "thinking": text})
            case ThinkingEnd(signature) if self._open == "thinking":
                if signature:
                    frames += self._delta({"type": "signature_delta", "signature": signature.hex()})
                frames += self._end_block()
            case ToolCallDelta(id=str() as call_id, name=str() as name):
                block = {"type": "tool_use", "id": CALL_PREFIX + call_id, "name": name, "input": {}}
                frames += self._end_block() + self._begin("tool_use", block)
                frames += self._json_delta(event.arguments)
            case ToolCallDelta():
                frames += self._json_delta(event.arguments)
        return frames

    def _start(self, n_prompt: int, n_cached: int) -> bytes:
        self._started = True
        usage = {
            "input_tokens": n_prompt - n_cached,
            "cache_read_input_tokens": n_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": 0,
        }
        return event_bytes("message_start", message={**self._message(), "usage": usage})

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._open == kind and kind != "tool_use":
            return b""
        frames = self._end_block()
        self._open = kind
        return frames + event_bytes("content_block_start", index=self._n_blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event_bytes("content_block_delta", index=self._n_blocks, delta=delta)

    def _text_delta(self, text: str) -> bytes:
        """`_delta`, by hand: there is one for every token."""
        return TEXT_DELTA % (self._n_blocks, text_bytes(text))

    def _json_delta(self, arguments: str) -> bytes:
        return self._delta({"type": "input_json_delta", "partial_json": arguments}) if arguments else b""

    def _end_block(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self._n_blocks += 1
        return event_bytes("content_block_stop", index=self._n_blocks - 1)

    def end(self, answer: Answer, completion: Completion) -> bytes:
        """The open block's end, why it ended, and the whole usage."""
        stats = completion.stats
        frames = b"" if self._started else self._start(stats.n_prompt, stats.n_cached)
        frames += self._end_block()
        frames += event_bytes("message_delta", delta=_ending(completion), usage=usage_of(completion))
        return frames + event_bytes("message_stop")

    def failed(self, error: ErllamaError, request_id: str) -> bytes:
        """The error as an event."""
        told = body_of(error, "anthropic", request_id)
        return event_bytes("error", error=told["error"], request_id=request_id)


def usage_of(completion: Completion) -> dict[str, Any]:
    """Three counts that add up to the prompt: computed and not kept, computed and kept, reused."""
    stats = completion.stats
    created = min(completion.cache_delta.created, stats.n_prompt - stats.n_cached)
    return {
        "input_tokens": stats.n_prompt - stats.n_cached - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": stats.n_cached,
        "output_tokens": stats.n_generated,
    }


def _ending(completion: Completion) -> dict[str, Any]:
    if completion.message is not None and completion.message.tool_calls:
        reason = "tool_use"
    elif completion.finish_reason == "length":
        reason = "max_tokens"
    else:
        reason = "end_turn" if completion.stop_sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": completion.stop_sequence}
