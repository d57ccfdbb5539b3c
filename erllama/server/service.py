"""What the routes of every dialect work with, and what they have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .generation import Generator

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from starlette.requests import Request

    from .metrics import Metrics
    from .pool import Lease, Pool
    from .registry import Spec
    from .settings import Settings

SESSION_HEADER = "x-conversation-id"


@dataclass(slots=True)
class Service:
    """One server: settings, models, metrics, and whether it is about to end."""

    settings: Settings
    pool: Pool
    metrics: Metrics
    is_draining: bool = False
    generator: Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = Generator(self.pool, self.settings, self.metrics)

    def spec(self, name: str | None) -> Spec:
        """The model of that name; without a name, the only one. Raises: `ModelNotFound`."""
        specs = self.pool.resolver.specs()
        if name is None and len(specs) == 1:
            return specs[0]
        return self.pool.resolver.resolve(name or "")

    def reading(self, name: str | None) -> AbstractAsyncContextManager[Lease]:
        """A model to be asked about text, which needs no place in its queue."""
        return self.pool.lease(self.spec(name), with_place=False)


def session_of(request: Request) -> str | None:
    """The session that a header names."""
    return request.headers.get(SESSION_HEADER) or None
