"""Lazy, single initialisation; log routing; what the build says about itself."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import pytest

from erllama import llama
from erllama.llama import backend, logs

from .support import run_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.model


def test_import_loads_no_native_code() -> None:
    """B4: importing erllama and its binding layer loads neither the extension nor ggml."""
    done = run_python(
        "import sys, erllama, erllama.llama\n"
        "maps = open('/proc/self/maps').read() if sys.platform == 'linux' else ''\n"
        "print('ggml' in maps, any('_binding' in m for m in sys.modules))"
    )
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_concurrent_first_loads_initialise_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """B4: of many threads that come first, one initialises and all get the same library."""
    calls: list[str] = []
    real = backend.ensure_backend()
    monkeypatch.setattr(backend, "_ready", None)
    monkeypatch.setattr(backend, "_load_backends", lambda _lib: calls.append("load"))
    gate = threading.Barrier(8)
    found: list[object] = []

    def first_use() -> None:
        gate.wait()
        found.append(backend.ensure_backend())

    threads = [threading.Thread(target=first_use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["load"]
    assert found == [real] * 8


def test_build_info_and_devices() -> None:
    """The running build names its version, backend, variant and stamp; a CPU device is there."""
    info = llama.build_info()
    assert info.llama_version
    assert info.backend == backend.ensure_backend().backend
    assert "+" in info.stamp
    assert "CPU" in info.system_info
    cpu = [device for device in llama.devices() if device.kind == "cpu"]
    assert len(cpu) == 1
    assert 0 < cpu[0].free_bytes <= cpu[0].total_bytes


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    """The records of the `llama.cpp` logger while the test runs."""
    seen: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record)

    handler = Handler()
    logs.log.addHandler(handler)
    before = logs.log.level
    logs.log.setLevel(logging.INFO)
    yield seen
    logs.log.setLevel(before)
    logs.log.removeHandler(handler)


def _delivered(lines: list[logging.LogRecord]) -> list[tuple[str, str]]:
    """All lines logged so far: stopping delivery hands over what is queued."""
    llama.shutdown_logs()
    llama.resume_logs()
    return [(record.levelname, record.getMessage()) for record in lines]


def test_levels_and_continuations(lines: list[logging.LogRecord]) -> None:
    """X30: lines arrive with their level; continuation pieces are joined to the line they continue."""
    lib = backend.ensure_backend()
    lib.log_emit(2, b"an info line\n")
    lib.log_emit(3, b"a warning, ")
    lib.log_emit(5, b"continued, ")
    lib.log_emit(5, b"ended\n")
    lib.log_emit(4, b"two\nlines\n")
    lib.log_emit(2, b"....\n")  # progress dots are no line
    assert _delivered(lines) == [
        ("INFO", "an info line"),
        ("WARNING", "a warning, continued, ended"),
        ("ERROR", "two"),
        ("ERROR", "lines"),
    ]


def test_common_logs_arrive_too(lines: list[logging.LogRecord]) -> None:
    """X30: llama-common's own logger ends in the same place, not on stderr."""
    backend.ensure_backend().log_emit_common(3, b"from llama-common\n")
    assert _delivered(lines) == [("WARNING", "from llama-common")]


def test_full_queue_drops_the_oldest_and_says_so(lines: list[logging.LogRecord]) -> None:
    """X30: with nobody taking lines out, the newest 4,096 are kept and the loss is reported."""
    lib = backend.ensure_backend()
    llama.shutdown_logs()
    lib.log_install(logs.INFO)  # the queue is open, the thread that empties it is not there
    for i in range(4100):
        lib.log_emit(2, b"%d\n" % i)
    llama.resume_logs()
    messages = [text for _, text in _delivered(lines)]
    assert messages[0] == "4 log lines of llama.cpp were dropped"
    assert messages[1:] == [str(i) for i in range(4, 4100)]


def test_long_line_is_cut_not_lost(lines: list[logging.LogRecord]) -> None:
    """A line longer than the transfer buffer arrives shortened."""
    backend.ensure_backend().log_emit(2, b"x" * 10_000 + b"\n")
    ((_, text),) = _delivered(lines)
    assert set(text) == {"x"}
    assert len(text) == 4096


def test_capture_is_per_thread() -> None:
    """The log lines of a call hold nothing that another thread logged meanwhile."""
    lib = backend.ensure_backend()
    with logs.captured(lib) as log:
        lib.log_emit(4, b"mine\n")
        other = threading.Thread(target=lib.log_emit, args=(4, b"somebody else's\n"))
        other.start()
        other.join()
    assert log.errors == ["mine"]
    with logs.captured(lib) as empty:
        pass
    assert empty.tail() == "no log output"


def test_late_lines_and_second_start(tiny_gguf: Callable[[str], Path]) -> None:
    """B9: after the logs are shut down, late lines crash nothing, and loading works again."""
    path = str(tiny_gguf("dense"))
    done = run_python(
        "from erllama import llama\n"
        "from erllama.llama import backend\n"
        f"llama.Model.open({path!r}).close()\n"
        "llama.shutdown_logs(); llama.shutdown_logs()\n"
        "backend.ensure_backend().log_emit(4, b'late\\n')\n"
        f"llama.Model.open({path!r}).close()\n"
        "llama.resume_logs()\n"
        f"llama.Model.open({path!r}).close()\n"
        "print('alive')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


def test_lines_of_an_ending_thread() -> None:
    """X30: a thread's last lines, logged by destructors of its own, arrive whole, and its memory is gone."""
    done = run_python(
        "import ctypes, logging, threading\n"
        "from erllama import llama\n"
        "from erllama.llama import backend\n"
        "logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "lib = backend.ensure_backend()\n"
        "pthread = ctypes.CDLL(None)\n"
        "call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)\n"
        "late = call(lambda _: lib.log_emit(3, b'late\\n'))\n"
        "key = ctypes.c_uint()\n"
        "assert pthread.pthread_key_create(ctypes.byref(key), late) == 0\n"
        "def work():\n"
        "    lib.log_emit(3, b'early\\n')\n"
        "    lib.log_emit(3, b'never ended')\n"
        "    pthread.pthread_setspecific(key, ctypes.c_void_p(1))\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start(); thread.join()\n"
        "import time; time.sleep(0.3)\n"
        "llama.shutdown_logs()\n"
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line in ("early", "late")] == ["early", "late"]


@pytest.mark.slow
def test_stderr_stays_empty(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    """X30: load, decode, a refused file, a bad grammar and a refused state print nothing to stderr."""
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(tiny_gguf("dense").read_bytes()[:5000])
    done = run_python(
        "from erllama.llama import *\n"
        "from erllama.errors import ErllamaError\n"
        f"m = Model.open({str(tiny_gguf('dense'))!r})\n"
        "c = Context.open(m, ContextParams(n_ctx=256, n_batch=64))\n"
        "b = Batch(64); i = b.add(0, [1, 2, 3], 0); c.decode(b)\n"
        "SamplerChain(m.vocab, SamplerParams()).sample(c, i)\n"
        "c.state_set(0, b'x' * 300)\n"
        f"for f in (lambda: Model.open({str(bad)!r}),\n"
        "          lambda: SamplerChain(m.vocab, SamplerParams(grammar='root ::= ('))):\n"
        "    try: f()\n"
        "    except ErllamaError as e: print(e.reason)\n"
    )
    assert done.returncode == 0
    assert done.stdout.split() == ["malformed_gguf", "invalid_grammar"]
    assert done.stderr == ""
