"""Aliases that change while the server runs: SIGHUP reads them again from its file."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import trio

from erllama.errors import ErllamaError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from erllama.server.registry import ConfiguredModels
    from erllama.server.settings import Settings

log = logging.getLogger("erllama.server")


async def reread_aliases(
    models: ConfiguredModels,
    running: Settings,
    read: Callable[[], Settings],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> NoReturn:
    """With each SIGHUP, replace the aliases by those that `read` finds; requests in flight keep their model.

    Nothing else takes effect, and the log names what else has changed. What is wrong with the
    file is logged, and the aliases stay. Cancellation: SIGHUP means again what it did before.
    """
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        while True:
            await anext(signals)
            try:
                given = await trio.to_thread.run_sync(read)
                models.set_aliases(given.aliases)
            except Exception as why:  # a mistake in a file must not end a server that runs
                is_bug = not isinstance(why, ErllamaError)
                log.error("the aliases stay as they are: %s", why, exc_info=is_bug)
                continue
            log.info("%d aliases read again", len(given.aliases))
            if names := _changed(
                running.model_dump(exclude={"aliases"}), given.model_dump(exclude={"aliases"})
            ):
                log.warning(
                    "other settings have changed too; they take effect when the server is started again: %s",
                    ", ".join(names),
                )


def _changed(before: Mapping[str, Any], after: Mapping[str, Any], under: str = "") -> list[str]:
    """Places of what differs: of tables what differs in them, and never the values, which may be keys."""
    names: list[str] = []
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            names += _changed(old, new, f"{under}{key}.")
        elif old != new:
            names.append(f"{under}{key}")
    return names
