"""What every request passes before its route: record and log, CORS, keys, body limit. Plain ASGI."""

from __future__ import annotations

import hmac
import itertools
import logging
import math
import re
import time
from typing import TYPE_CHECKING

import trio
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from erllama.errors import AuthenticationFailed, BodyTooLarge, ErllamaError, RequestError, ShuttingDown

from .failures import as_error, body_of, headers_of, status_of, surface_of
from .host import is_meant
from .record import KEY, Record, record_of
from .reply import json_bytes
from .tenants import salt_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .metrics import Metrics
    from .settings import CorsTable, Settings

access = logging.getLogger("erllama.access")
log = logging.getLogger("erllama.server")

LINGER_S = 5.0  # for what still comes of a body when its request has been answered
OWN_PATHS = ("/health", "/health/ready", "/metrics", "/docs", "/openapi.json")  # of no dialect
OPEN_PATHS = ("/", *OWN_PATHS, "/api/version")
SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_numbers = itertools.count(1)


def refusal(scope: Scope, error: ErllamaError) -> Response:
    """An error as the reply of the surface that was asked."""
    record = record_of(scope)
    record.error = error.reason
    body = body_of(error, record.surface, record.request_id)
    return Response(
        json_bytes(body),
        status_of(error, record.surface),
        {**record.headers, **headers_of(error)},
        "application/json",
    )


class Recorder:
    """Outermost: gives each request its id and record, writes the access log, and catches what is left."""

    def __init__(self, app: ASGIApp, *, id_header: str, metrics: Metrics) -> None:
        self._app = app
        self._header = id_header
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(self._header, "")
        record = scope[KEY] = Record(
            request_id=given if SAFE_ID.fullmatch(given) else f"req_{next(_numbers)}",
            surface=surface_of(scope["path"], headers),
            method=scope["method"],
            path=scope["path"],
            started=time.monotonic(),
        )

        is_complete, is_read = False, False

        async def receive_noted() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body", False)
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal is_complete
            if message["type"] == "http.response.start":
                record.status = message["status"]
                sent = MutableHeaders(scope=message)
                sent[self._header] = record.request_id
                if record.surface == "anthropic":
                    sent["request-id"] = record.request_id  # where its SDK looks
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            await (send(message) if is_read or not is_last else _send_last_early(message, receive, send))
            is_complete = is_last

        try:
            await self._app(scope, receive_noted, send_with_id)
        except Exception as failure:
            log.exception("request %s failed", record.request_id)
            if not record.status:
                await refusal(scope, as_error(failure))(scope, receive_noted, send_with_id)
            elif not is_complete:
                raise  # the reply has begun; the server closes the connection
            # else a handler of the application has answered, and raised it again
        except BaseException:  # cancelled, perhaps in a group: the server ends and does not wait for it
            record.error = record.error or ShuttingDown.reason
            raise
        finally:
            self._write(record, scope)

    def _write(self, record: Record, scope: Scope) -> None:
        seconds = time.monotonic() - record.started
        route = getattr(scope.get("route"), "path", "other")
        surface = "erllama" if route in OWN_PATHS else record.surface
        self._metrics.served(surface, route, record.status, seconds)
        stats = record.answer and record.answer.stats
        access.info(
            "%s %s %s %d %.3fs model=%s prompt=%s cached=%s generated=%s error=%s",
            record.request_id,
            record.method,
            record.path.encode("unicode_escape").decode()[:256],
            record.status,
            seconds,
            record.model and record.model.encode("unicode_escape").decode()[:256],
            stats and stats.n_prompt,
            stats and stats.n_cached,
            stats and stats.n_generated,
            record.error,
        )


async def _send_last_early(message: Message, receive: Receive, send: Send) -> None:
    """The end of a reply to a request whose body was not read: what still comes of it is thrown away.

    Else Hypercorn waits for ever for somebody to take it, and who sends all before it reads never reads why
    it was refused. After `LINGER_S` the connection is closed all the same.
    """
    await send({**message, "more_body": True})
    async with trio.open_nursery() as nursery:
        over = trio.Event()

        async def drain() -> None:
            while (await receive()).get("more_body", False):
                pass
            over.set()
            while (await receive())["type"] != "http.disconnect":
                pass

        nursery.start_soon(drain)
        with trio.move_on_after(LINGER_S):
            await over.wait()
        await send({**message, "body": b""})
        nursery.cancel_scope.cancel()


class Head:
    """HEAD where GET is served: the same headers, and no body (RFC 9110 s9.3.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        scope["method"] = "GET"  # the record has the real one
        await self._app(scope, receive, send_without_body)


class Cors:
    """Lets pages of the listed origins in; without a list it does nothing."""

    def __init__(self, app: ASGIApp, *, table: CorsTable) -> None:
        self._app = app
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or not self._table.origins:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        allowed = self._allowed(headers.get("origin"))
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await Response(status_code=204, headers=self._preflight(headers, allowed))(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                made = MutableHeaders(scope=message)
                for name, value in allowed.items():
                    made[name] = value
                made.add_vary_header("origin")
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _allowed(self, origin: str | None) -> dict[str, str]:
        if origin is None or not {"*", origin} & set(self._table.origins):
            return {}
        return {"access-control-allow-origin": origin, "access-control-expose-headers": "*"}

    def _preflight(self, headers: Headers, allowed: dict[str, str]) -> dict[str, str]:
        if not allowed:
            return {"vary": "origin"}
        return {
            **allowed,
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-allow-headers": headers.get("access-control-request-headers", "*"),
            "access-control-max-age": str(self._table.max_age_s),
            "vary": "origin",
        }


class Gate:
    """Refuses what needs no route: wrong keys, bodies too large or slow, requests while the server ends."""

    def __init__(self, app: ASGIApp, *, settings: Settings, is_draining: Callable[[], bool]) -> None:
        self._app = app
        auth, limits = settings.auth, settings.limits
        self._keys = {"openai": auth.openai, "anthropic": auth.anthropic, "ollama": auth.ollama}
        every = {key for keys in self._keys.values() for key in keys}
        separate = settings.cache.api_keys == "separate"
        self._salts = {key: salt_of(key) if separate else b"" for key in every}
        self._listen = settings.listen
        self._max = limits.max_request_body_bytes
        self._slow_s = limits.slow_client_s
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        error = self._refusal(scope, headers)
        if error is not None:
            await refusal(scope, error)(scope, receive, send)
            return
        _read_as_json(scope, headers)
        n_read, is_whole = 0, False

        async def receive_within_limits() -> Message:
            nonlocal n_read, is_whole
            with trio.move_on_after(math.inf if is_whole else self._slow_s) as patience:
                message = await receive()
            if patience.cancelled_caught:
                raise _too_slow(self._slow_s)
            is_whole = is_whole or not message.get("more_body", False)
            n_read += len(message.get("body", b""))
            if n_read > self._max:
                raise _too_large(self._max)
            return message

        await self._app(scope, receive_within_limits, send)

    def _refusal(self, scope: Scope, headers: Headers) -> ErllamaError | None:
        if not is_meant(headers.get("host"), self._listen):
            error = RequestError(
                "this server does not answer to the name in Host: listen.hosts has those it does"
            )
            error.http_status = 403
            return error
        if scope["path"] in OPEN_PATHS:
            return None
        if self._is_draining():
            return ShuttingDown("the server is about to end")
        keys = self._keys[record_of(scope).surface]
        if keys:
            key = _key_of(headers, keys)
            if key is None:
                return AuthenticationFailed(
                    "this server wants an API key, and this request has none that it knows"
                )
            record_of(scope).salt = self._salts[key]
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max:
            return _too_large(self._max)
        return None


def _too_large(n_max: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {n_max} bytes", detail={"max_request_body_bytes": n_max})


def _too_slow(seconds: float) -> RequestError:
    error = RequestError(f"no more of the body came within {seconds:g} s", reason="timeout")
    error.http_status = 408
    return error


def _key_of(headers: Headers, keys: tuple[str, ...]) -> str | None:
    """The key that a request has; None if it has none of these."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [headers.get("x-api-key", "")]
    if scheme.lower() == "bearer":
        given.append(bearer.strip())
    # All comparisons are made, and each in constant time.
    matches = [key for g in given for key in keys if hmac.compare_digest(g.encode(), key.encode())]
    return matches[0] if matches else None


def _read_as_json(scope: Scope, headers: Headers) -> None:
    """`curl -d` sends JSON under another name; it is read as JSON unless it may come from a web page.

    A page of another origin can send only such "simple" requests without asking first, so from a browser
    they are refused as what they say they are.
    """
    if "origin" in headers or "sec-fetch-site" in headers:
        return
    kept = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    scope["headers"] = [*kept, (b"content-type", b"application/json")]
