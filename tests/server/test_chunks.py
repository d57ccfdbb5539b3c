"""The short way of a stream's bytes: the same bytes as by the long one, whatever the socket takes at once."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from runtime.chat_scenes import ScriptedChat

from erllama import Request, Token
from erllama.server import ollama_reply
from erllama.server.anthropic_reply import MessagesReply
from erllama.server.chunks import EXTENSION, chunks_of, framed, lend
from erllama.server.ollama_reply import OllamaReply
from erllama.server.openai_chat import ChatReply, TextReply
from erllama.server.reply import json_bytes, text_bytes
from server.scenes import asgi_scope, chat_body, serving, sse_events
from server.test_connection import CHAT, connect, read_all

if TYPE_CHECKING:
    from erllama.server.chunks import Chunks

WORDS = "word " * 400
TEXTS = ["word", "", '"\\/', "\x00\x1f\x7f\n\r\t", "é€\u2028\U0001f600", "\ud800", "%d %b {} \\u0041"]


def unframed(data: bytes) -> tuple[bytes, bytes]:
    """The head, and the body out of its chunks, to the last byte."""
    head, _, rest = data.partition(b"\r\n\r\n")
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        n = int(size, 16)
        body, end, rest = body + rest[:n], rest[n : n + 2], rest[n + 2 :]
        assert end == b"\r\n"
        if not n:
            assert not rest
            return head, body


def text_of(body: bytes) -> str:
    *events, done = sse_events(body.decode())
    assert done == "[DONE]"
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


async def test_a_stream_to_a_socket_is_chunked() -> None:
    """Each chunk with its length, and one end."""
    async with serving(partial(ScriptedChat, says=WORDS, threaded=True)) as scene:
        client = await connect(scene.url, chat_body(stream=True, max_tokens=4000), "Connection: close")
        head, body = unframed(await read_all(client))
    assert b"transfer-encoding: chunked" in head.lower()
    assert text_of(body) == WORDS


async def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    """It would take the lengths for text."""
    async with serving(partial(ScriptedChat, says="word " * 20)) as scene:
        host, _, port = scene.url.removeprefix("http://").partition(":")
        client = await trio.open_tcp_stream(host, int(port))
        body = json.dumps(chat_body(stream=True)).encode()
        await client.send_all(
            b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body)
        )
        head, _, body = (await read_all(client)).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert body.startswith(b": loading")
    assert text_of(body) == "word " * 20


@pytest.mark.usefixtures("_small_send_buffers")
async def test_what_a_slow_reader_gets_is_whole() -> None:
    """Its socket takes parts of chunks; the rest comes before the next one."""
    async with serving(partial(ScriptedChat, says=WORDS, threaded=True)) as scene:
        client = await connect(scene.url, chat_body(stream=True, max_tokens=4000), "Connection: close")
        data = b""
        async with client:
            while more := await client.receive_some(1000):
                data += more
                await trio.sleep(0.0005)
    assert text_of(unframed(data)[1]) == WORDS


async def test_two_requests_of_a_connection() -> None:
    """h11 knows where the first reply ends, though it has not seen its middle."""
    async with serving(partial(ScriptedChat, says="word " * 20)) as scene:
        for _ in range(3):
            reply = await scene.client.post(CHAT, json=chat_body(stream=True))
            assert text_of(reply.content) == "word " * 20


@pytest.mark.parametrize(
    ("changed", "is_lent"),
    [
        ({}, True),
        ({"http_version": "1.0"}, False),
        ({"http_version": "2"}, False),
        ({"type": "websocket"}, False),
    ],
)
def test_who_gets_the_short_way(changed: dict[str, Any], is_lent: bool) -> None:
    """Where h11 would chunk, and nowhere else."""
    chunks: Chunks = object()  # type: ignore[assignment]
    scope = asgi_scope(CHAT) | changed
    lend(scope, chunks)
    assert (EXTENSION in scope["extensions"]) is is_lent
    assert (chunks_of(scope) is chunks) is is_lent
    assert chunks_of({}) is None


def test_a_chunk() -> None:
    """RFC 9112 s7.1."""
    assert framed(b"x" * 26) == b"1a\r\n" + b"x" * 26 + b"\r\n"


# --- frames that are put together by hand ---


async def frame_of(reply: Any, text: str) -> bytes:
    made: bytes = await reply.event(None, Token(text, Request(1, "m")))
    return made


@pytest.mark.parametrize("text", TEXTS)
async def test_a_text_in_each_dialect(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the way says that makes all other frames."""
    assert text_bytes(text) == json_bytes(text)
    model = 'a "model" é'
    chat = ChatReply(model)
    assert loaded(await frame_of(chat, text)) == loaded(chat._chunk({"content": text}))
    plain = TextReply(model)
    assert loaded(await frame_of(plain, text)) == loaded(b"data: " + json_bytes(plain._choice(text, None)))
    messages = MessagesReply(model, thinking=False)
    messages._started, messages._open, messages._n_blocks = True, "text", 3
    assert await frame_of(messages, text) == messages._delta({"type": "text_delta", "text": text})
    monkeypatch.setattr(ollama_reply, "now", lambda: "2026-01-02T03:04:05.678901Z")
    for is_chat in (True, False):
        ollama = OllamaReply(model, is_chat=is_chat)
        assert await frame_of(ollama, text) == ollama._line(text)


def loaded(frame: bytes) -> Any:
    """What a client reads. Half a character cannot be told in UTF-8: what stands there is not compared."""
    value = json.loads(frame.removeprefix(b"data: "))
    return json.loads(json.dumps(value).replace("\\ud800", "?"))
