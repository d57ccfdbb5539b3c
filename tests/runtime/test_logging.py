"""The logs: warnings about options that disappoint, and no errors about what we did ourselves."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import trio

import erllama
from erllama import ContextOptions, ModelOptions, llama

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.model


async def warnings_of(caplog: pytest.LogCaptureFixture, path: Path, **options: object) -> list[str]:
    """What erllama warns of while it loads that model."""
    caplog.clear()
    async with erllama.open_engine() as engine:
        await engine.load_model(path, **options)
    return [r.getMessage() for r in caplog.records if r.name.startswith("erllama")]


async def test_options_that_disappoint_are_warned_of(
    caplog: pytest.LogCaptureFixture, tiny_gguf: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More context than was trained, and GPU layers without a GPU: a warning each; otherwise none."""
    path = tiny_gguf("dense")
    monkeypatch.setattr(llama, "devices", list)  # a machine without a GPU
    assert await warnings_of(caplog, path, context=ContextOptions(n_ctx=64)) == []
    (said,) = await warnings_of(caplog, path, context=ContextOptions(n_ctx=100_000))
    assert "with n_ctx=100000, text beyond them is likely to be nonsense" in said
    gpu = ModelOptions(n_gpu_layers=-1)
    (said,) = await warnings_of(caplog, path, model=gpu, context=ContextOptions(n_ctx=64))
    assert "n_gpu_layers=-1 has no effect" in said


@pytest.mark.slow
async def test_a_cancelled_prefill_logs_no_error(
    caplog: pytest.LogCaptureFixture, smollm2_path: Path
) -> None:
    """llama.cpp calls an aborted decode a failure; we asked for it, so nothing above DEBUG is logged."""
    caplog.set_level(logging.INFO)
    async with erllama.open_engine() as engine:
        model = await engine.load_model(smollm2_path)
        for _ in range(20):
            with trio.move_on_after(0.1):
                await model.complete(list(range(1000, 2900)), max_tokens=1)
            if model.statistics().n_aborted_steps:
                break
        assert model.statistics().n_aborted_steps
    await trio.to_thread.run_sync(llama.shutdown_logs)  # hands over what is queued
    llama.resume_logs()
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.INFO] == []
