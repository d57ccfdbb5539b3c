"""The routes of the Ollama dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

import erllama
from erllama.errors import InvalidOption, NotSupported

from .document import NOT_OFFERED
from .duration import seconds_of
from .ollama_ask import chat_ask, generate_ask
from .ollama_body import EmbedBody, GenerateBody, OllamaChatBody, OllamaEmbeddingsBody, ShowBody
from .ollama_embeddings import ollama_embed, ollama_embeddings
from .ollama_models import capabilities, listed, running, shown
from .ollama_reply import OllamaReply
from .presence import while_present
from .record import record_of
from .reply import AnswerReply
from .service import session_of

if TYPE_CHECKING:
    from .service import Service

LATER = ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/search", "/api/edit")


def ollama_routes(service: Service) -> APIRouter:
    """The router."""
    router = APIRouter(tags=["Ollama"])
    limits = service.settings.limits

    @router.post("/api/generate")
    async def generate(body: GenerateBody, request: Request) -> Response:
        """Continue a prompt, or load (or with `keep_alive: 0` unload) the model if there is none."""
        if not body.prompt:
            return await while_present(
                request, lambda: _preload(service, body.model, body.keep_alive, is_chat=False)
            )
        ask = generate_ask(body, session_of(request))
        reply = OllamaReply(body.model, is_chat=False)
        return AnswerReply(service.generator, ask, reply, stream=body.stream is not False)

    @router.post("/api/chat")
    async def chat(body: OllamaChatBody, request: Request) -> Response:
        """Answer a conversation, or load (or unload) the model if there is none."""
        if not body.messages:
            return await while_present(
                request, lambda: _preload(service, body.model, body.keep_alive, is_chat=True)
            )
        ask = chat_ask(body, limits, session_of(request))
        reply = OllamaReply(body.model, is_chat=True)
        return AnswerReply(service.generator, ask, reply, stream=body.stream is not False)

    @router.post("/api/embed")
    async def embed(body: EmbedBody, request: Request) -> Response:
        """Vectors of texts."""
        return await while_present(request, lambda: ollama_embed(service, body, record_of(request.scope)))

    @router.post("/api/embeddings")
    async def embeddings(body: OllamaEmbeddingsBody, request: Request) -> Response:
        """The vector of one text."""
        return await while_present(
            request, lambda: ollama_embeddings(service, body, record_of(request.scope))
        )

    @router.get("/api/tags")
    async def tags() -> JSONResponse:
        """Models that can be asked."""
        models = [await trio.to_thread.run_sync(listed, spec) for spec in service.pool.resolver.specs()]
        return JSONResponse({"models": models})

    @router.get("/api/ps")
    async def ps() -> JSONResponse:
        """Models that are loaded."""
        loaded = [entry for entry in service.pool.entries() if entry.is_loaded]
        told = [await running(entry) for entry in loaded]
        return JSONResponse({"models": [each for each in told if each is not None]})

    @router.post("/api/show")
    async def show(body: ShowBody) -> JSONResponse:
        """What a model's file says, and the context that a load would use."""
        if not (body.model or body.name):
            raise InvalidOption(
                "missing parameter: 'model'", reason="missing_option", detail={"key": "model"}
            )
        spec = service.pool.resolver.resolve(body.model or body.name)
        made = await trio.to_thread.run_sync(shown, spec)
        named = await capabilities(spec, service.pool.entry_of(spec), made["template"])
        return JSONResponse({**made, "capabilities": named})

    @router.get("/api/version")
    async def version() -> JSONResponse:
        """erllama's."""
        return JSONResponse({"version": erllama.__version__})

    @router.get("/", response_class=PlainTextResponse)
    async def root() -> PlainTextResponse:
        """Some clients ask whether anybody is there."""
        return PlainTextResponse("erllama is running")

    async def later() -> Response:
        """Not supported yet: models are those that the server was started with."""
        raise NotSupported("models are not fetched or changed over HTTP yet; name them with -m or --config")

    for path in LATER:
        router.add_api_route(path, later, methods=["POST"], name=path, status_code=501, responses=NOT_OFFERED)
    router.add_api_route(
        "/api/delete", later, methods=["DELETE"], name="/api/delete", status_code=501, responses=NOT_OFFERED
    )
    return router


async def _preload(service: Service, name: str, keep_alive: float | str | None, *, is_chat: bool) -> Response:
    reply, keep_alive_s = OllamaReply(name, is_chat=is_chat), seconds_of(keep_alive)
    spec = service.pool.resolver.resolve(name)
    if keep_alive_s == 0:
        is_gone = await service.pool.let_go(spec)
        return JSONResponse(reply.preloaded("unload" if is_gone else "load", 0.0))
    async with service.pool.lease(spec, keep_alive_s=keep_alive_s, with_place=False) as lease:
        load_s = lease.load_s
    return JSONResponse(reply.preloaded("load", load_s))
