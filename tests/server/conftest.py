"""A real server with SmolLM2, in a process of its own, once a session."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from erllama.server.listener import ListenerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

REPO = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPO)}


def start_server(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """`erllama serve` on a free port, and its address once it listens."""
    command = [sys.executable, "-m", "erllama", "serve", "--port", "0", "--quiet", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "http://" in line, f"no address but {line!r}"
    return process, line.split()[-1]


def stop_server(process: subprocess.Popen[str]) -> int:
    """As `kill` does; returns its exit status."""
    process.terminate()
    try:
        return process.wait(20)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="session")
def real_server(smollm2_path: Path) -> Iterator[str]:
    """The address of a server with the model `smol`."""
    process, url = start_server("-m", f"smol={smollm2_path}", "--no-cache", "--n-ctx", "2048")
    yield url
    stop_server(process)


@pytest.fixture
def _small_send_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel buffers is not ours, so let it be little: accepted sockets inherit it."""
    real = ListenerConfig.create_sockets

    def create(config: ListenerConfig) -> Any:
        sockets = real(config)
        for each in sockets.insecure_sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return sockets

    monkeypatch.setattr(ListenerConfig, "create_sockets", create)
