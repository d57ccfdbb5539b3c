"""`erllama serve`: models over HTTP."""

from __future__ import annotations

import gc
import logging
import os
import signal
import stat
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

import erllama
from erllama.errors import InvalidConfig, MissingConfig
from erllama.llama.backend import build_info

from .aliases import reread_aliases
from .kept import POLICY, SAVE_S, TIER, kept_tiers
from .progress import show_warnings

if TYPE_CHECKING:
    import argparse

    from erllama.server.settings import Settings

EXTRA = ("fastapi", "starlette", "hypercorn", "pydantic", "prometheus_client")
MAX_BODY_BYTES = 256 << 20  # a whole repository fits; the library's own default is 1 MiB


def run(arguments: argparse.Namespace) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Raises: `MissingConfig`, `InvalidConfig`, `NativeLibraryError`, before it listens.
    """
    settings = settings_of(arguments)
    tiers = [] if arguments.no_cache else kept_tiers(arguments.kv_dir, arguments.kv_max)
    config = erllama.EngineConfig(tiers=tiers, evict_save_timeout_s=SAVE_S)
    build_info()  # models are loaded when they are asked for: a build that is missing is told now
    _log_to_stderr(quiet=arguments.quiet)
    with show_warnings():
        try:
            trio.run(_serve, arguments, settings, config, TIER if tiers else "ram")
        except* OSError as group:
            raise _cannot_listen(settings, group) from None


def settings_of(arguments: argparse.Namespace) -> Settings:
    """From the file and the arguments, which win. Raises: `MissingConfig`, `InvalidConfig`."""
    try:
        from erllama.server.registry import DEFAULT_NAME, table_from_argument
        from erllama.server.settings import home_expanded, make_settings, read_file, table_of
    except ModuleNotFoundError as why:
        if (why.name or "").partition(".")[0] not in EXTRA:
            raise
        raise MissingConfig(
            f"the server needs {why.name}; install it with: pip install 'erllama[server]'"
        ) from None
    values: dict[str, Any] = {} if arguments.config is None else read_file(arguments.config)
    limits = {"max_request_body_bytes": MAX_BODY_BYTES, **table_of(values, "limits")}
    listen = table_of(values, "listen") | _given(arguments, "host", "port")
    context = _given(arguments, "n_ctx", "n_seq_max")
    template = arguments.chat_template
    more = {} if template is None else {"chat_template_file": str(home_expanded(template))}
    models = table_of(values, "models")
    if (context or more) and models and not arguments.model:
        raise InvalidConfig(
            "--n-ctx, --n-seq-max and --chat-template are of models given with -m; those of the file have a "
            "`context` and a `chat_template_file` there",
            detail={"key": "context" if context else "chat_template_file"},
        )
    for name, table in map(table_from_argument, arguments.model or ()):
        own = table_of(models, name, "models.")
        models[name] = {
            **own,
            **more,
            "path": table.path,
            "context": table_of(own, "context", f"models.{name}.") | context,
        }
    if (context or more) and not models:
        models[DEFAULT_NAME] = {"context": context, **more}
    settings = make_settings({**values, "limits": limits, "listen": listen, "models": models})
    _check_files(settings)
    return settings


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _check_files(settings: Settings) -> None:
    """A wrong path is told now, not to the first client."""
    for name, table in settings.models.items():
        for path in (table.path, table.chat_template_file):
            if path is not None and (why := _why_no_file(path)):
                raise InvalidConfig(f"models.{name}: {why}", detail={"key": f"models.{name}"})


def _why_no_file(path: str) -> str | None:
    """What is wrong with the path of a file; None if nothing is."""
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        is_file = False
    except (OSError, ValueError) as why:  # a name too long, a folder that may not be read, a zero byte
        return f"cannot look at {path[:256]}: {why.strerror if isinstance(why, OSError) else why}"
    return None if is_file else f"there is no file {path}"


async def _serve(
    arguments: argparse.Namespace, settings: Settings, config: erllama.EngineConfig, tier: str
) -> None:
    from erllama.server.registry import ConfiguredModels
    from erllama.server.serving import serve

    models = ConfiguredModels(settings)
    async with trio.open_nursery() as nursery:
        asked_to_end = trio.Event()
        await nursery.start(_wait_for_signal, asked_to_end)
        if arguments.config is not None:
            await nursery.start(reread_aliases, models, settings, partial(settings_of, arguments))

        async def run(*, task_status: trio.TaskStatus[list[str]]) -> None:
            await serve(
                settings,
                config,
                tier=tier,
                policy=POLICY,
                resolver=models,
                stop=asked_to_end.wait,
                task_status=task_status,
            )
            nursery.cancel_scope.cancel()

        (address,) = await nursery.start(run)
        print(f"erllama serves on {address}", flush=True)
        print(f"models: {', '.join(spec.name for spec in models.specs())}", flush=True)
        if (line := open_line(settings)) is not None:
            print(line, flush=True)
        _settle()


def _settle() -> None:
    """What is there now stays: a full collection that looked at it would hold up every stream meanwhile."""
    gc.collect()
    gc.freeze()


def open_line(settings: Settings) -> str | None:
    """Which surfaces anybody may use; None where only this machine reaches them and none has keys."""
    from erllama.server.host import is_local

    keys = {name: getattr(settings.auth, name) for name in ("openai", "anthropic", "ollama")}
    is_ours = is_local(settings.listen.host)
    without = [name for name, given in keys.items() if not given]
    if not without or (is_ours and not any(keys.values())):
        return None
    who = "every program on this machine" if is_ours else "everybody who reaches this port"
    return f"open to {who}, for they have no keys in [auth]: {', '.join(without)}"


async def _wait_for_signal(asked_to_end: trio.Event, *, task_status: trio.TaskStatus[None]) -> None:
    """The first one lets answers end; the second one does not wait for them."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            if asked_to_end.is_set():
                raise KeyboardInterrupt
            print("erllama: ending; again to end at once", file=sys.stderr, flush=True)
            asked_to_end.set()


def _log_to_stderr(*, quiet: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    for name in ("erllama.server",) if quiet else ("erllama.server", "erllama.access"):
        log = logging.getLogger(name)
        log.setLevel(logging.INFO)
        log.addHandler(handler)
        log.propagate = False


def _cannot_listen(settings: Settings, group: BaseExceptionGroup[OSError]) -> BaseException:
    failure: BaseException = group
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    assert isinstance(failure, OSError)
    if failure.filename is not None:
        return failure
    listen = settings.listen
    return InvalidConfig(f"cannot listen on {listen.host} port {listen.port}: {failure.strerror or failure}")
