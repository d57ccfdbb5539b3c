"""The short way of a stream's bytes to its socket, where a reply goes out in chunks.

ASGI has no word for it: what is sent there goes up through the application's wrappers and down through
Hypercorn and h11, which costs more than all else that a token costs. So a connection lends its replies this
way, as an extension in the scope; the head and the last bytes take the long one, which knows that the reply
has begun and ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

EXTENSION = "erllama.chunks"


class Chunks(Protocol):
    """A connection, between the head of a reply and its last bytes."""

    def write_now(self, chunk: bytes) -> bytes:
        """Write a chunk; the rest, framed, where the socket does not take all of it at once."""

    async def write_rest(self, rest: bytes) -> None:
        """Write it before anything else. Cancellation: what was begun is written."""


def chunks_of(scope: Any) -> Chunks | None:
    """The short way of a request's reply; None where there is none."""
    extensions: Mapping[str, Any] = scope.get("extensions") or {}
    return extensions.get(EXTENSION)


def lend(scope: Any, chunks: Chunks) -> None:
    """Put it in the scope of a request, if replies without a length are chunked.

    RFC 9112 s6.1: they are for who speaks HTTP/1.1, and h11 does it.
    """
    if scope["type"] == "http" and scope["http_version"] == "1.1":
        scope["extensions"][EXTENSION] = chunks


def framed(chunk: bytes) -> bytes:
    """RFC 9112 s7.1. The chunk has a byte at least: one without is the end."""
    return b"%x\r\n%b\r\n" % (len(chunk), chunk)
