"""Replies over ASGI: an answer as JSON or as a stream, ended as soon as its reader is gone.

Rule 1: headers are sent with the first bytes, or when a load begins, so that a request that is refused has
the right status. Rule 2: the last bytes are sent after the model's lease has ended, so that
`keep_alive: 0` is true when it is answered. Rule 3: one task at a time sends.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, Protocol

import trio
from starlette.responses import Response

from erllama import Done

from .body import ignored_note
from .chunks import chunks_of
from .failures import as_error, body_of, headers_of, status_of
from .record import CLIENT_LEFT, cache_note, record_of
from .stable import stable_messages
from .tenants import of_tenant

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from starlette.types import Receive, Scope, Send

    from erllama import Completion, Event
    from erllama.errors import ErllamaError

    from .chunks import Chunks
    from .generation import Answer, Ask, Generator
    from .pool import Loading
    from .record import Record

log = logging.getLogger("erllama.server")
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
LOAD_NEWS_S = 2.0
PATIENCE_S = 1.0  # a request that waits in line for longer gets its headers and pings


class Translation(Protocol):
    """From an answer to the bytes of a dialect: one object for one request."""

    media_type: str
    ping: bytes  # b"" where the dialect has none
    loading: bytes

    async def begin(self, answer: Answer) -> bytes:
        """Sent once the request is admitted."""
        ...

    async def event(self, answer: Answer, event: Event) -> bytes:
        """What becomes of an event."""
        ...

    def end(self, answer: Answer, completion: Completion) -> bytes:
        """The last bytes."""
        ...

    def remark(self, text: str) -> bytes:
        """What clients pass over and people read; b"" where the dialect has no such thing."""
        ...

    def failed(self, error: ErllamaError, request_id: str) -> bytes:
        """An error after the headers are out."""
        ...

    def whole(self, answer: Answer, completion: Completion) -> dict[str, Any]:
        """The answer as one JSON object."""
        ...


def json_bytes(value: object) -> bytes:
    """Compact JSON; lone surrogates become U+FFFD. Raises: `ValueError` (NaN, infinity: they are no JSON)."""
    return _encode(value).encode("utf-8", errors="replace")


def text_bytes(text: str) -> bytes:
    """`json_bytes` of a text, for frames that are put together by hand."""
    return encode_basestring(text).encode("utf-8", errors="replace")


def remark(text: str) -> bytes:
    """A comment of server-sent events."""
    return f": {text}\n\n".encode()


class _Wire:
    """The client's end: what was sent to it, and when."""

    def __init__(self, send: Send, limit_s: float, chunks: Chunks | None) -> None:
        self._send = send
        self._chunks = chunks
        self._limit_s = limit_s
        self._is_taken = False  # pings come from another task
        self._line = trio.lowlevel.ParkingLot()  # of those who wait for their turn
        self.started = False
        self.is_ending = False
        self._now = trio.lowlevel.current_clock().current_time  # asked for every token
        self.last = self._now()
        self.blocked_since = math.inf

    async def start(self, status: int, headers: Mapping[str, str]) -> bool:
        """Send the headers; False if others are out already."""
        while self._is_taken:
            await self._line.park()
        if self.started:
            return False
        self.started = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._sent(self._send({"type": "http.response.start", "status": status, "headers": raw}))
        return True

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send bytes; nothing behind the last ones. Who does not take them is cancelled by `watch`."""
        while self._is_taken:
            await self._line.park()
        if self.is_ending:  # a ping that had to wait for them
            return
        self.is_ending = not more
        if more and self._chunks is not None:
            rest = self._chunks.write_now(data)
            if rest:
                await self._sent(self._chunks.write_rest(rest))
        else:
            await self._sent(self._send({"type": "http.response.body", "body": data, "more_body": more}))
        self.last = self._now()

    async def _sent(self, sending: Awaitable[None]) -> None:
        self._is_taken, self.blocked_since = True, self._now()
        try:
            await sending
        finally:
            self._is_taken, self.blocked_since = False, math.inf
            self._line.unpark_all()

    async def watch(self) -> None:
        """Raise trio.TooSlowError once a write has taken longer than it may."""
        while True:
            now = trio.current_time()
            if now >= self.blocked_since + self._limit_s:
                raise trio.TooSlowError
            await trio.sleep_until(min(self.blocked_since, now) + self._limit_s)


class AnswerReply(Response):
    """The reply to a request that a model answers."""

    def __init__(self, generator: Generator, ask: Ask, translation: Translation, *, stream: bool) -> None:
        # Not Response.__init__: there is no body yet.
        self.background = None
        self._generator = generator
        self._ask = _stable(ask) if generator.settings.stable_prompts else ask
        self._translation = translation
        self._stream = stream
        self._limits = generator.settings.limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Cancellation, and a client that leaves: the request ends wherever it is."""
        record = record_of(scope)
        self._ask = of_tenant(self._ask, record.salt, self._generator.settings.cache)
        record.model, record.streamed = self._ask.model, self._stream
        record.note(self._ask.notes)
        wire = _Wire(send, self._limits.slow_client_s, chunks_of(scope) if self._stream else None)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wire.watch)
                # A task of its own: else each token would go up through all of the application's coroutines.
                nursery.start_soon(self._answer, wire, scope, receive, nursery)
        except* trio.TooSlowError:
            record.error = "slow_client"
            log.info("request %s: its client reads nothing; it is left", record.request_id)

    async def _answer(self, wire: _Wire, scope: Scope, receive: Receive, nursery: trio.Nursery) -> None:
        try:
            # Before anybody looks whether the client is there: one that has only closed its sending side
            # reads what is wrong with its request.
            await self._generator.look_at(self._ask)
            nursery.start_soon(_leave_with_client, receive, wire, record_of(scope), nursery.cancel_scope)
            if self._stream:
                nursery.start_soon(self._ping, wire, scope)
                await self._streamed(wire, scope, nursery)
            else:
                await self._whole(wire, scope, nursery)
        except Exception as failure:
            await self._fail(wire, scope, failure)
        nursery.cancel_scope.cancel()

    # --- as one JSON object ---

    async def _whole(self, wire: _Wire, scope: Scope, nursery: trio.Nursery) -> None:
        record = record_of(scope)
        async with self._generator.answer(self._ask) as answer:
            record.answer = answer
            nursery.start_soon(answer.watch)
            while not answer.is_over:
                await answer.batch()
        completion = answer.completion
        assert completion is not None, "an answer ends with its completion or an error"
        record.note([f"x-erllama-cache: {cache_note(completion)}", *_notes(answer)])
        body = json_bytes(self._translation.whole(answer, completion))
        await self._send_json(wire, scope, 200, body)

    async def _send_json(self, wire: _Wire, scope: Scope, status: int, body: bytes) -> bool:
        """False if a stream has begun, perhaps just now, by a ping."""
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        if not await wire.start(status, {**record_of(scope).headers, **headers}):
            return False
        await wire.write(body, more=False)
        return True

    # --- as a stream ---

    async def _streamed(self, wire: _Wire, scope: Scope, nursery: trio.Nursery) -> None:
        record, translation = record_of(scope), self._translation

        def on_loading(loading: Loading) -> None:
            nursery.start_soon(self._tell_of_load, wire, scope, loading)

        async with self._generator.answer(self._ask, on_loading=on_loading) as answer:
            record.answer = answer
            notes, is_late = _notes(answer), wire.started  # a load or a wait was told, so headers are out
            record.note(notes)
            nursery.start_soon(answer.watch)
            await self._begin(wire, scope)
            late = [translation.remark(note) for note in notes if is_late]
            await _write(wire, b"".join(late) + await translation.begin(answer))
            while not answer.is_over:
                frames = [
                    await translation.event(answer, event)
                    for event in await answer.batch()
                    if type(event) is not Done
                ]
                await _write(wire, b"".join(frames))
        completion = answer.completion
        assert completion is not None, "an answer ends with its completion or an error"
        note = translation.remark(f"x-erllama-cache: {cache_note(completion)}")
        await wire.write(note + translation.end(answer, completion), more=False)

    async def _begin(self, wire: _Wire, scope: Scope) -> None:
        headers = {
            "content-type": self._translation.media_type,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx passes the stream on as it comes
        }
        await wire.start(200, {**record_of(scope).headers, **headers})

    async def _tell_of_load(self, wire: _Wire, scope: Scope, loading: Loading) -> None:
        await self._begin(wire, scope)
        while not loading.over.is_set():
            progress = self._translation.remark(f"loaded {loading.fraction:.0%}")
            await _write(wire, self._translation.loading + progress)
            with trio.move_on_after(LOAD_NEWS_S):
                await loading.over.wait()

    async def _ping(self, wire: _Wire, scope: Scope) -> None:
        await trio.sleep(min(PATIENCE_S, self._limits.ping_s))
        await self._begin(wire, scope)
        while True:
            quiet = trio.current_time() - wire.last
            if quiet >= self._limits.ping_s:
                await _write(wire, self._translation.ping)
                wire.last = trio.current_time()
            else:
                await trio.sleep(self._limits.ping_s - quiet)

    # --- failures ---

    async def _fail(self, wire: _Wire, scope: Scope, failure: Exception) -> None:
        record, error = record_of(scope), as_error(failure)
        record.error = error.reason
        if error is not failure and error.reason == "error":
            log.error("request %s failed", record.request_id, exc_info=failure)
        record.note(f"{name}: {value}" for name, value in headers_of(error).items())
        body = json_bytes(body_of(error, record.surface, record.request_id))
        if not await self._send_json(wire, scope, status_of(error, record.surface), body):
            await wire.write(self._translation.failed(error, record.request_id), more=False)


def _stable(ask: Ask) -> Ask:
    if ask.messages is None:
        return ask
    messages, notes = stable_messages(ask.messages)
    return dataclasses.replace(ask, messages=messages, notes=(*ask.notes, *notes))


def _notes(answer: Answer) -> list[str]:
    """What of the prompt was left out, and which fields this model has no use for."""
    counts = {"dropped-messages": answer.n_dropped, "cut-tokens": answer.n_cut}
    cuts = (f"x-erllama-{name}: {n}" for name, n in counts.items() if n)
    return [*cuts, *ignored_note(answer.ignored)]


async def _write(wire: _Wire, data: bytes) -> None:
    if data:
        await wire.write(data)


async def _leave_with_client(receive: Receive, wire: _Wire, record: Record, scope: trio.CancelScope) -> None:
    """Cancel when the client is gone; the last bytes are not cut off, for the connection ends with them."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not wire.is_ending:
        record.error = CLIENT_LEFT
        scope.cancel()
