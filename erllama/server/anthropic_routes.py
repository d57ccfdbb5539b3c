"""The routes of the Anthropic dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from .anthropic_ask import chat_options, conversation, messages_ask, wants_thinking
from .anthropic_body import CountBody, MessagesBody
from .anthropic_reply import MessagesReply
from .reply import AnswerReply
from .service import session_of
from .stable import stable_messages

if TYPE_CHECKING:
    from .service import Service


def anthropic_routes(service: Service) -> APIRouter:
    """The router."""
    router = APIRouter(tags=["Anthropic"])
    limits = service.settings.limits

    @router.post("/v1/messages")
    async def messages(body: MessagesBody, request: Request) -> Response:
        """Answer a conversation."""
        ask = messages_ask(body, limits, session_of(request))
        reply = MessagesReply(body.model, thinking=wants_thinking(body))
        return AnswerReply(service.generator, ask, reply, stream=body.stream)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody) -> JSONResponse:
        """The tokens of the prompt that /v1/messages would compute."""
        said = conversation(body, limits)
        if service.settings.stable_prompts:
            said, _ = stable_messages(said)
        chat = chat_options(body)
        await service.generator.check(service.spec(body.model), said, chat)
        async with service.reading(body.model) as lease:
            said = await service.generator.spoken(lease.model, said)
            ids = await lease.model.render_chat_template(said, **chat)
        return JSONResponse({"input_tokens": len(ids)})

    return router
