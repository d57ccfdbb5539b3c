"""The ASGI application: routes of every dialect behind the same middleware."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import erllama
from erllama.errors import ErllamaError, InvalidContent, RequestError

from .anthropic_routes import anthropic_routes
from .body import validation_error
from .document import openapi_of
from .failures import as_error
from .health_routes import health_routes
from .middleware import Cors, Gate, Head, Recorder, refusal
from .ollama_routes import ollama_routes
from .openai_routes import openai_routes
from .record import CLIENT_LEFT, record_of

if TYPE_CHECKING:
    from fastapi.responses import Response
    from starlette.types import ASGIApp

    from .service import Service

TITLE = "erllama"


def make_app(service: Service) -> ASGIApp:
    """Everything that is served. The pool has to run while it is."""
    return with_middleware(make_routes(service), service)


def make_routes(service: Service) -> FastAPI:
    """The routes, with errors in each surface's shape."""
    app = FastAPI(title=TITLE, version=erllama.__version__, redoc_url=None)
    app.state.paths = set()
    for routes in (health_routes, openai_routes, anthropic_routes, ollama_routes):
        router = routes(service)
        app.include_router(router)
        app.state.paths |= {getattr(route, "path", "") for route in router.routes}
    app.openapi = lambda: openapi_of(app)  # type: ignore[method-assign]  # as FastAPI's documentation has it
    app.add_exception_handler(ErllamaError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _not_served)
    app.add_exception_handler(Exception, _failed)
    return app


def with_middleware(app: ASGIApp, service: Service) -> ASGIApp:
    """Record, HEAD, CORS, gate, in this order."""
    settings = service.settings
    gate = Gate(
        app,
        settings=settings,
        is_draining=lambda: service.is_draining,
    )
    cors = Cors(gate, table=settings.cors)
    return Recorder(Head(cors), id_header=settings.request_id_header, metrics=service.metrics)


def _refused(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, ErllamaError)
    return refusal(request.scope, failure)


def _failed(request: Request, failure: Exception) -> Response:
    """What nobody expected: Starlette raises it again once this is sent, and the recorder logs it."""
    return refusal(request.scope, as_error(failure))


def _invalid(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, RequestValidationError)
    return refusal(request.scope, validation_error(failure))


def _not_served(request: Request, failure: Exception) -> Response:
    """Starlette's own refusals: no such path or method, or a body that could not be read."""
    assert isinstance(failure, HTTPException)
    if isinstance(failure.__cause__, ErllamaError):
        return refusal(request.scope, failure.__cause__)
    if failure.status_code == 400:
        refused = refusal(request.scope, InvalidContent("the body cannot be read as JSON"))
        if isinstance(failure.__cause__, ClientDisconnect):  # in the middle of it
            record_of(request.scope).error = CLIENT_LEFT
        return refused
    told = f"{failure.detail}: {request.method} {request.url.path}"
    error = RequestError(told + (_hint(request) if failure.status_code == 404 else ""))
    error.http_status = failure.status_code
    refused = refusal(request.scope, error)
    refused.headers.update(failure.headers or {})  # 405 says what is allowed
    return refused


def _hint(request: Request) -> str:
    """The path that a client with another base URL would have asked for, if there is one."""
    path = request.url.path
    meant = (f"/v1{path}", f"/api{path}", path.removeprefix("/v1"), path.removeprefix("/api"))
    found = next((each for each in meant if each in request.app.state.paths), None)
    return "" if found is None else f"; is {found} meant? Then the client's base URL is wrong"
