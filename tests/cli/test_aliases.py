"""SIGHUP and the aliases of a running server."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from server.scenes import until

from erllama.cli.aliases import reread_aliases
from erllama.errors import ModelNotFound
from erllama.server.registry import ConfiguredModels
from erllama.server.settings import make_settings

if TYPE_CHECKING:
    from erllama.server.settings import Settings

MODELS = {name: {"path": f"{name}.gguf"} for name in "ab"}


def settings(aliases: dict[str, str], **more: Any) -> Settings:
    """Two models, and these aliases."""
    return make_settings({"models": MODELS, "aliases": aliases, **more})


async def test_wrong_files_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """H52: a mistake is logged and the aliases stay; what else has changed is logged, and waits."""
    running = settings({"fast": "a"})
    models = ConfiguredModels(running)
    files: list[dict[str, Any]] = [
        {"aliases": {"fast": "nobody"}},
        {"aliases": {"a": "b"}},
        {"aliases": {"b": "a"}, "models": {"a": MODELS["a"]}},  # gone from the file, but it still runs
        {
            "aliases": {"fast": "b"},
            "keep_alive_s": 7.0,
            "auth": {"openai": ["secret"]},
            "models": MODELS | {"b": {**MODELS["b"], "exact": "cold"}},
        },
        {"aliases": {}},
    ]
    n_read = 0

    def read() -> Settings:
        nonlocal n_read
        n_read += 1
        return settings(**files[n_read - 1])

    async def hang_up() -> None:
        expected = n_read + 1
        n_lines = len(caplog.records)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: n_read == expected and len(caplog.records) > n_lines)
        await trio.testing.wait_all_tasks_blocked()

    caplog.set_level("INFO", "erllama.server")
    async with trio.open_nursery() as nursery:
        await nursery.start(reread_aliases, models, running, read)
        for complaint in ("no such model", "a model has this name", "a model has this name"):
            await hang_up()
            assert complaint in caplog.records[-1].getMessage()
            assert models.resolve("fast").name == "a"
            assert models.resolve("b").name == "b"
        await hang_up()
        assert models.resolve("fast").name == "b"
        assert (
            caplog.records[-1]
            .getMessage()
            .endswith("started again: auth.openai, keep_alive_s, models.b.exact")
        )
        await hang_up()
        assert caplog.records[-1].getMessage() == "0 aliases read again"
        with pytest.raises(ModelNotFound):
            models.resolve("fast")
        nursery.cancel_scope.cancel()


async def test_no_file_ends_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever comes of reading is logged, and the next signal is heard."""
    running = settings({"fast": "a"})
    models = ConfiguredModels(running)
    found: list[Settings | Exception] = [RuntimeError("no home"), settings({"fast": "b"})]

    def read() -> Settings:
        given = found.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    caplog.set_level("INFO", "erllama.server")
    async with trio.open_nursery() as nursery:
        await nursery.start(reread_aliases, models, running, read)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: any(record.exc_info for record in caplog.records))
        assert models.resolve("fast").name == "a"
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: models.resolve("fast").name == "b")
        nursery.cancel_scope.cancel()
