"""The routes of the OpenAI dialect, and `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from .openai_ask import chat_ask, check_tokenize, text_ask
from .openai_body import ChatBody, DetokenizeBody, EmbeddingsBody, ResponsesBody, TextBody, TokenizeBody
from .openai_chat import ChatReply, TextReply
from .openai_embeddings import openai_embeddings
from .openai_responses import ResponsesReply, Threads, responses_ask
from .presence import while_present
from .record import record_of
from .reply import AnswerReply
from .service import session_of
from .stable import stable_messages

if TYPE_CHECKING:
    from .service import Service

EPOCH = "1970-01-01T00:00:00Z"


def openai_routes(service: Service) -> APIRouter:
    """The router."""
    router = APIRouter(tags=["OpenAI"])
    limits = service.settings.limits
    threads, stable = Threads(limits.max_kept_conversations_bytes), service.settings.stable_prompts

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        ask = chat_ask(body, limits, session_of(request))
        usage = body.stream_options is not None and body.stream_options.include_usage
        reply = ChatReply(body.model, include_usage=usage)
        return AnswerReply(service.generator, ask, reply, stream=body.stream)

    @router.post("/v1/completions")
    async def completions(body: TextBody, request: Request) -> Response:
        """Continue a text."""
        usage = body.stream_options is not None and body.stream_options.include_usage
        reply = TextReply(body.model, include_usage=usage)
        ask = text_ask(body, session_of(request))
        return AnswerReply(service.generator, ask, reply, stream=body.stream)

    @router.post("/v1/responses")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """Answer, with the conversation kept here for an hour."""
        salt = record_of(request.scope).salt
        ask = responses_ask(body, limits, threads, session_of(request), salt)
        reply = ResponsesReply(body, ask, threads, salt)
        return AnswerReply(service.generator, ask, reply, stream=body.stream)

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
        """Vectors of texts or token ids."""
        return await while_present(
            request, lambda: openai_embeddings(service, body, record_of(request.scope))
        )

    @router.get("/v1/models")
    async def list_models(request: Request) -> JSONResponse:
        """Models that can be asked, in the shape that the client's SDK reads."""
        specs = service.pool.resolver.specs()
        data = [_model(spec.name, request) for spec in specs]
        if record_of(request.scope).surface == "anthropic":
            ends = {"first_id": specs[0].name, "last_id": specs[-1].name}
            return JSONResponse({"data": data, "has_more": False, **ends})
        return JSONResponse({"object": "list", "data": data})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str, request: Request) -> JSONResponse:
        """One of them, also by an alias, which then is its id."""
        service.pool.resolver.resolve(name)
        return JSONResponse(_model(name, request))

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> JSONResponse:
        """Token ids of a text or a conversation."""
        check_tokenize(body, limits)
        if body.messages is not None:
            spec = service.spec(body.model)
            await service.generator.check(spec, body.messages, {"tools": body.tools})
        async with service.reading(body.model) as lease:
            if body.messages is not None:
                said, _ = stable_messages(body.messages) if stable else (body.messages, ())
                said = await service.generator.spoken(lease.model, said)
                ids = await lease.model.render_chat_template(said, tools=body.tools)
            else:
                assert body.content is not None
                ids = await lease.model.tokenize_async(body.content, body.add_special, body.parse_special)
        return JSONResponse({"tokens": ids})

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> JSONResponse:
        """Text of token ids."""
        async with service.reading(body.model) as lease:
            text = await lease.model.detokenize_async(body.tokens)
        return JSONResponse({"content": text})

    return router


def _model(name: str, request: Request) -> dict[str, Any]:
    if record_of(request.scope).surface == "anthropic":
        return {"type": "model", "id": name, "display_name": name, "created_at": EPOCH}
    return {"id": name, "object": "model", "created": 0, "owned_by": "erllama"}
