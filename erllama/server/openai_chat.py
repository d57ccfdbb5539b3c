"""Answers in the shapes of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import json
import secrets
import time
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Any

from erllama import Thinking, Token, TokenId, ToolCallDelta

from .failures import body_of
from .reply import json_bytes, remark

if TYPE_CHECKING:
    from erllama import Completion, Event, Model, TokenLogprob
    from erllama.errors import ErllamaError

    from .generation import Answer

DONE = b"data: [DONE]\n\n"


def new_id(prefix: str) -> str:
    """An id that no other reply has."""
    return f"{prefix}{secrets.token_hex(12)}"


def sse(value: object) -> bytes:
    """One server-sent event without a name."""
    return b"data: " + json_bytes(value) + b"\n\n"


def usage_of(completion: Completion) -> dict[str, Any]:
    """`prompt_tokens` are all of them; those from the cache are a part, told apart."""
    stats = completion.stats
    return {
        "prompt_tokens": stats.n_prompt,
        "completion_tokens": stats.n_generated,
        "total_tokens": stats.n_prompt + stats.n_generated,
        "prompt_tokens_details": {"cached_tokens": stats.n_cached},
    }


def _no_usage_yet(is_wanted: bool) -> dict[str, None]:
    """What every chunk but the last one says of the usage, where it was asked for."""
    return {"usage": None} if is_wanted else {}


def finish_reason(completion: Completion) -> str:
    """OpenAI's word for why it ended."""
    if completion.message is not None and completion.message.tool_calls:
        return "tool_calls"
    return "length" if completion.finish_reason == "length" else "stop"


class _Sse:
    media_type = "text/event-stream"
    ping = b": ping\n\n"
    loading = b": loading\n\n"
    remark = staticmethod(remark)

    def __init__(self) -> None:
        self._untold: list[TokenLogprob] = []  # of tokens whose text is not out yet

    def _told(self) -> list[TokenLogprob]:
        """Log-probabilities for the next chunk: of its tokens, and of those before it that show nothing."""
        told, self._untold = self._untold, []
        return told

    def _note(self, event: TokenId) -> bytes:
        if event.logprob is not None:
            self._untold.append(event.logprob)
        return b""

    def failed(self, error: ErllamaError, request_id: str) -> bytes:
        """An event with the error, and the end."""
        return sse(body_of(error, "openai", request_id)) + DONE


class ChatReply(_Sse):
    """One reply of /v1/chat/completions."""

    def __init__(self, model: str, *, include_usage: bool = False) -> None:
        super().__init__()
        self._frame = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
            **_no_usage_yet(include_usage),
        }
        self._include_usage = include_usage
        head = json.dumps(self._frame)[:-1]
        # The one frame that is written for every token is put together by hand.
        self._text = f'data: {head}, "choices": [{{"index": 0, "delta": {{"content": '
        self._text_end = '}, "finish_reason": null}]}\n\n'

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        return sse({**self._frame, "choices": [choice]})

    async def begin(self, answer: Answer) -> bytes:
        """The role."""
        return self._chunk({"role": "assistant", "content": ""})

    async def event(self, answer: Answer, event: Event) -> bytes:
        """A delta."""
        match event:
            case Token(text) if not self._untold:
                return f"{self._text}{encode_basestring_ascii(text)}{self._text_end}".encode()
            case TokenId():
                return self._note(event)
            case Token(text):
                delta: dict[str, Any] = {"content": text}
            case Thinking(text):
                delta = {"reasoning_content": text}
            case ToolCallDelta():
                delta = {"tool_calls": [call_delta(event)]}
            case _:
                return b""
        return self._chunk(delta, logprobs=chat_logprobs(answer.model, self._told() or None))

    def end(self, answer: Answer, completion: Completion) -> bytes:
        """The reason, the usage if it was asked for, and the end."""
        logprobs = chat_logprobs(answer.model, self._told() or None)
        frames = self._chunk({}, finish_reason(completion), logprobs)
        if self._include_usage:
            frames += sse({**self._frame, "choices": [], "usage": usage_of(completion)})
        return frames + DONE

    def whole(self, answer: Answer, completion: Completion) -> dict[str, Any]:
        """The reply as one object."""
        message = completion.message
        assert message is not None, "chats have messages"
        shown = message.to_dict()
        shown["content"] = message.content if message.content or not message.tool_calls else None
        shown.setdefault("refusal", None)
        return {
            **self._frame,
            "object": "chat.completion",
            "choices": [
                {
                    "index": 0,
                    "message": shown,
                    "finish_reason": finish_reason(completion),
                    "logprobs": chat_logprobs(answer.model, completion.logprobs),
                }
            ],
            "usage": usage_of(completion),
        }


class TextReply(_Sse):
    """One reply of /v1/completions."""

    def __init__(self, model: str, *, include_usage: bool = False) -> None:
        super().__init__()
        self._n_told = 0  # characters whose log-probabilities are out
        self._frame = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            **_no_usage_yet(include_usage),
        }
        self._include_usage = include_usage
        head = json.dumps(self._frame)[:-1]
        self._text = f'data: {head}, "choices": [{{"index": 0, "text": '
        self._text_end = ', "finish_reason": null, "logprobs": null}]}\n\n'

    def _choice(self, text: str, finish: str | None, logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": logprobs}
        return {**self._frame, "choices": [choice]}

    async def begin(self, answer: Answer) -> bytes:
        """Nothing but the headers."""
        return b""

    async def event(self, answer: Answer, event: Event) -> bytes:
        """A piece of text."""
        if isinstance(event, TokenId):
            return self._note(event)
        if not isinstance(event, Token):
            return b""
        if not self._untold:
            return f"{self._text}{encode_basestring_ascii(event.text)}{self._text_end}".encode()
        return sse(self._choice(event.text, None, self._logprobs(answer.model)))

    def _logprobs(self, model: Model) -> dict[str, Any] | None:
        told = text_logprobs(model, self._told() or None, self._n_told)
        self._n_told += sum(map(len, told["tokens"])) if told else 0
        return told

    def end(self, answer: Answer, completion: Completion) -> bytes:
        """The reason, the usage if it was asked for, and the end."""
        frames = sse(self._choice("", finish_reason(completion), self._logprobs(answer.model)))
        if self._include_usage:
            frames += sse({**self._frame, "choices": [], "usage": usage_of(completion)})
        return frames + DONE

    def whole(self, answer: Answer, completion: Completion) -> dict[str, Any]:
        """The reply as one object."""
        logprobs = text_logprobs(answer.model, completion.logprobs)
        choice = self._choice(completion.reply, finish_reason(completion), logprobs)
        return {**choice, "usage": usage_of(completion)}


def call_delta(event: ToolCallDelta) -> dict[str, Any]:
    """A piece of a call; the first one has its id and name."""
    function: dict[str, Any] = {"arguments": event.arguments}
    made: dict[str, Any] = {"index": event.index, "function": function}
    if event.id is not None:
        made |= {"id": event.id, "type": "function"}
        function["name"] = event.name
    return made


def chat_logprobs(model: Model, logprobs: list[TokenLogprob] | None) -> dict[str, Any] | None:
    """In the shape of chat completions; None if they were not asked for."""
    if logprobs is None:
        return None

    def told(token: int, logprob: float) -> dict[str, Any]:
        text = model.detokenize([token])
        raw = (
            None if "\ufffd" in text else list(text.encode())
        )  # a part of a character has no text of its own
        return {"token": text, "logprob": logprob, "bytes": raw}

    content = [
        {**told(each.token, each.logprob), "top_logprobs": [told(*other) for other in each.top]}
        for each in logprobs
    ]
    return {"content": content, "refusal": None}


def text_logprobs(model: Model, logprobs: list[TokenLogprob] | None, start: int = 0) -> dict[str, Any] | None:
    """In the older shape of text completions; `start`: characters before them."""
    if logprobs is None:
        return None
    texts = [model.detokenize([each.token]) for each in logprobs]
    offsets = [start]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": texts,
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [{model.detokenize([t]): p for t, p in each.top} for each in logprobs],
        "text_offset": offsets[:-1],
    }
