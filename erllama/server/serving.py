"""A server's life: engine, pool and listener, one inside the other, and their end in that order."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

import trio

import erllama

from .app import make_app
from .listener import ListenerConfig, listen
from .metrics import Metrics
from .pool import Load, Pool, loader
from .registry import ConfiguredModels, Resolver
from .service import Service

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .settings import Settings

log = logging.getLogger("erllama.server")


async def serve(
    settings: Settings,
    config: erllama.EngineConfig,
    *,
    tier: str = "ram",
    policy: erllama.SavePolicy | None = None,
    resolver: Resolver | None = None,
    stop: Callable[[], Awaitable[None]] = trio.sleep_forever,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `stop` returns; then requests in flight have `limits.drain_s` to end.

    `resolver`: whose models; None: those of the settings.
    `task_status` gets the addresses once the socket listens.
    Cancellation: answers in flight end at once, what is to be saved is saved.
    """
    async with erllama.open_engine(with_signing_key(config, settings)) as engine:
        policy = policy or erllama.SavePolicy()
        if settings.cache.ttl_s is not None:
            policy = dataclasses.replace(policy, ttl_s=settings.cache.ttl_s)
        load = loader(engine, tier=tier, policy=policy)
        metrics = Metrics()
        metrics.watch_cache(engine.cache)
        await serve_pool(
            settings, load, metrics=metrics, resolver=resolver, stop=stop, task_status=task_status
        )


def with_signing_key(config: erllama.EngineConfig, settings: Settings) -> erllama.EngineConfig:
    """The engine's settings with the key of the server's, if there is one."""
    key = settings.auth.thinking_signing_key.encode()
    return dataclasses.replace(config, thinking_signing_key=key) if key else config


async def serve_pool(
    settings: Settings,
    load: Load,
    *,
    metrics: Metrics,
    resolver: Resolver | None = None,
    stop: Callable[[], Awaitable[None]],
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """`serve`, with models that `load` makes."""
    pool = Pool(settings, resolver or ConfiguredModels(settings), load)
    metrics.watch(pool)
    service = Service(settings, pool, metrics)
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.run)

        async def stopped() -> None:
            await stop()
            service.is_draining = True
            log.info("ending; %g s for answers in flight", settings.limits.drain_s)
            with trio.move_on_after(settings.limits.drain_s):
                await pool.wait_unused()
            service.generator.end_answers()  # their clients are told while connections have their last second

        await listen(make_app(service), listener_config(settings), stop=stopped, task_status=task_status)
        nursery.cancel_scope.cancel()


def listener_config(settings: Settings) -> ListenerConfig:
    """What Hypercorn is told."""
    listen, limits = settings.listen, settings.limits
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    made = ListenerConfig()
    made.head_s = limits.slow_client_s
    made.bind = [f"{host}:{listen.port}"]
    made.accesslog = None  # our own has more
    made.errorlog = logging.getLogger("erllama.hypercorn")
    made.graceful_timeout = 1.0  # draining is over by then
    made.keep_alive_timeout = limits.idle_connection_s
    made.keep_alive_max_requests = 1_000_000
    made.include_server_header = False
    made.alpn_protocols = ["http/1.1"]
    made.backlog = 1024
    return made
