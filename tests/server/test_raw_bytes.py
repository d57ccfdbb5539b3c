"""What no HTTP library sends: bytes by hand, slowly, cut, doubled. The server answers and stays up."""

from __future__ import annotations

import json

import pytest
import trio

from erllama.server.middleware import LINGER_S
from server.scenes import chat_body, serving, until

CHAT = "/v1/chat/completions"
BODY = json.dumps(chat_body()).encode()


def head(*lines: str, path: str = CHAT) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: localhost", *lines, "", ""]).encode("latin-1")


def sized(n: int = len(BODY)) -> str:
    return f"content-length: {n}"


async def talk(url: str, *pieces: bytes, pause_s: float = 0.0, wait_s: float = 5.0) -> bytes:
    """Send the pieces; everything that comes back until the server closes, or nothing comes for a while."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    stream = await trio.open_tcp_stream(host, int(port))
    received = b""

    async def send():
        for piece in pieces:
            try:
                await stream.send_all(piece)
            except trio.BrokenResourceError:
                return
            await trio.sleep(pause_s)

    async with stream, trio.open_nursery() as nursery:
        nursery.start_soon(send)
        with trio.move_on_after(wait_s):
            async for data in stream:
                received += data
                if b"\r\n\r\n" in received and not received.startswith(b"HTTP/1.1 100"):
                    wait_over = trio.current_time() + 0.1
                    nursery.cancel_scope.deadline = min(nursery.cancel_scope.deadline, wait_over)
        nursery.cancel_scope.cancel()
    return received


def status(received: bytes) -> int:
    return int(received.split(b" ", 2)[1]) if received else 0


@pytest.mark.parametrize(
    ("pieces", "right"),
    [
        pytest.param([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"], {400}, id="TLS"),
        pytest.param([b"GARBAGE\r\n\r\n"], {400}, id="no HTTP"),
        pytest.param([head(sized(), sized()), BODY], {200, 400}, id="the same length twice"),
        pytest.param([head(sized(), sized(3)), BODY], {400}, id="two lengths"),
        pytest.param([head(sized(-1)), BODY], {400}, id="a length below 0"),
        pytest.param([head("content-length: ten"), BODY], {400}, id="a length in words"),
        pytest.param(
            [head(sized(), "transfer-encoding: chunked"), b"0\r\n\r\n"], {400}, id="length and chunks"
        ),
        pytest.param([head("transfer-encoding: gzip"), BODY], {400, 501}, id="another encoding"),
        pytest.param([head("transfer-encoding: chunked"), b"zz\r\n"], {400}, id="a chunk of size zz"),
        pytest.param([head(sized(), "x: " + "a" * 100_000), BODY], {400, 431}, id="a huge header"),
        pytest.param([head(sized(), "x\x00y: 1"), BODY], {400}, id="NUL in a header's name"),
        pytest.param(
            [head(sized(), "x-request-id: a\x01b"), BODY], {200, 400}, id="control character in an id"
        ),
        pytest.param([head(sized(), "x-request-id: \xff\xfe"), BODY], {200}, id="no ASCII in an id"),
        pytest.param([head(sized(), "x-conversation-id: \xff"), BODY], {200}, id="no ASCII in a session"),
        pytest.param([head(sized(), "authorization: \xff"), BODY], {200}, id="no ASCII in a key"),
        pytest.param([head(sized(), "host: evil.example"), BODY], {400, 403}, id="two hosts"),
        pytest.param(
            [head(sized(), "content-encoding: gzip"), BODY], {200, 400, 415}, id="said to be packed"
        ),
        pytest.param([head(sized(4)), b"\xff\xfe{}"], {400}, id="no UTF-8"),
        pytest.param(
            [head(sized(), path="/v1/models/..%2f..%2fetc%2fpasswd"), BODY], {404, 405}, id="a path in a name"
        ),
        pytest.param([head(sized(), path="/v1/models/%ff"), BODY], {404, 405}, id="no UTF-8 in a path"),
        pytest.param([head(sized(), path="//v1//chat"), BODY], {404, 405}, id="slashes"),
    ],
)
async def test_odd_requests_are_refused_or_taken_for_what_they_are(pieces, right):
    """Never a 5xx, never a hang; and the next client is served."""
    async with serving() as scene:
        received = await talk(scene.url, *pieces)
        assert status(received) in right, received[:300]
        assert (await scene.client.post(CHAT, json=chat_body())).status_code == 200


async def test_a_head_that_drips_is_not_waited_for():
    """It has the time of a slow client, however many bytes come; a connection without any may stay."""
    async with serving(limits={"slow_client_s": 0.3}) as scene:
        silent = await trio.open_tcp_stream("127.0.0.1", int(scene.url.rpartition(":")[2]))
        started = trio.current_time()
        received = await talk(
            scene.url, *[b"POST / HTTP/1.1\r\n"] + [b"x: y\r\n"] * 400, pause_s=0.05, wait_s=18
        )
        assert 0.25 < trio.current_time() - started < 15
        assert status(received) in (0, 400, 408)
        async with silent:  # who says nothing at all costs nothing
            await silent.send_all(head(sized()) + BODY)
            assert (await silent.receive_some(100)).startswith(b"HTTP/1.1 200")


async def test_a_body_that_drips_is_bounded_by_its_size():
    """Chunks without an end are 413 once they are more than a body may have."""
    async with serving(limits={"max_request_body_bytes": 2000}) as scene:
        chunks = [b"64\r\n" + b"x" * 100 + b"\r\n"] * 100
        received = await talk(scene.url, head("transfer-encoding: chunked"), *chunks, pause_s=0.001)
        assert status(received) == 413
        assert scene.loads == []


async def test_a_chunked_body_that_stops_is_not_waited_for():
    """408 when nothing more comes."""
    async with serving(limits={"slow_client_s": 0.2}) as scene:
        received = await talk(scene.url, head("transfer-encoding: chunked"), b'5\r\n{"mod\r\n')
        assert status(received) == 408


async def test_two_requests_at_once_on_a_connection():
    """Pipelined, they are answered one after the other."""
    async with serving() as scene:
        request = head(sized()) + BODY
        host, _, port = scene.url.removeprefix("http://").rpartition(":")
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(request + request)
            received = b""
            with trio.move_on_after(5):
                while received.count(b'"chat.completion"') < 2:
                    received += await stream.receive_some(65536)
        assert received.count(b"HTTP/1.1 200") == 2


async def test_connections_that_are_over_leave_nothing_behind():
    """No task waits for the half hour in which they might have come back; nor after cut requests."""
    async with serving() as scene:
        port = int(scene.url.rpartition(":")[2])

        async def come_and_go(n: int) -> None:
            for sent in (b"", b"GARBAGE\r\n\r\n", head(sized()) + BODY, head(sized())) * n:
                async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                    if sent:
                        await stream.send_all(sent)

        def n_tasks() -> int:
            return trio.lowlevel.current_statistics().tasks_living

        await scene.client.post(CHAT, json=chat_body())  # its model is there from now on
        await come_and_go(1)
        await scene.wait_idle()
        await trio.sleep(0.1)
        before = n_tasks()
        await come_and_go(8)
        await until(lambda: n_tasks() <= before + 1)


LARGE = 8 << 20  # more than the kernel's buffers and Hypercorn's queue take


@pytest.mark.parametrize(
    ("lines", "path", "right"),
    [
        ((sized(LARGE),), CHAT, 413),
        (("transfer-encoding: chunked",), CHAT, 413),
        ((sized(LARGE),), "/v1/messages", 401),
        ((sized(LARGE),), "/nowhere", 404),
        ((sized(LARGE),), "/health", 405),
    ],
)
async def test_who_reads_only_after_its_whole_body_is_told_too(lines, path, right):
    """A refusal that needs no body: what still comes of it is read, and nothing stays behind."""
    piece = b"x" * (1 << 20)
    if "chunked" in lines[0]:
        piece = b"100000\r\n" + piece + b"\r\n"
    limits = {"max_request_body_bytes": LARGE if right != 413 else 2000}
    async with serving(limits=limits, auth={"anthropic": ["key"]}) as scene:
        port = int(scene.url.rpartition(":")[2])
        assert (await scene.client.get("/health")).status_code == 200  # that connection stays
        tasks = trio.lowlevel.current_statistics().tasks_living
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            with trio.fail_after(10):
                await stream.send_all(head(*lines, path=path))
                for _ in range(LARGE >> 20):
                    await stream.send_all(piece)
                received = b"".join([await stream.receive_some(65536)])
            assert status(received) == right, received[:300]
        await until(lambda: trio.lowlevel.current_statistics().tasks_living <= tasks)
        assert scene.loads == []


async def test_who_never_ends_its_body_is_left():
    """After its refusal it has the time of `LINGER_S`, whatever it still sends."""
    async with serving(limits={"max_request_body_bytes": 2000}) as scene:
        assert (await scene.client.get("/health")).status_code == 200
        tasks = trio.lowlevel.current_statistics().tasks_living
        async with await trio.open_tcp_stream("127.0.0.1", int(scene.url.rpartition(":")[2])) as stream:

            async def send_for_ever() -> None:
                await stream.send_all(head("transfer-encoding: chunked"))
                while True:
                    await stream.send_all(b"400\r\n" + b"x" * 1024 + b"\r\n")

            with trio.fail_after(3 * LINGER_S), pytest.raises(trio.BrokenResourceError):
                await send_for_ever()
        await until(lambda: trio.lowlevel.current_statistics().tasks_living <= tasks)
