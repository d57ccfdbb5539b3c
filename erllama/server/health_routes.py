"""`/health`, `/health/ready` and `/metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from .metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from .service import Service


def health_routes(service: Service) -> APIRouter:
    """The router."""
    router = APIRouter(tags=["Health"])

    @router.get("/health")
    async def health() -> JSONResponse:
        """200 while the server listens."""
        return JSONResponse({"status": "ok"})

    @router.get("/health/ready", responses={503: {"description": "About to end"}})
    async def ready() -> JSONResponse:
        """200 if requests are taken, 503 while the server is about to end."""
        if service.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ready"})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    return router
