"""The peer: started, asked, and stopped, whatever happens. With a small server of our own in its place."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import trio

from erllama.bench import peer
from erllama.bench.http import LOOPBACK, request
from erllama.bench.peer import LlamaServer, open_peer, serving
from erllama.bench.programs import Programs
from erllama.bench.settings import Settings
from erllama.errors import EngineError

FAKE = Path(__file__).with_name("fake_server.py")
REPO = Path(__file__).resolve().parents[2]


def fake(mode):
    return [sys.executable, str(FAKE), mode]


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


async def test_an_answer_has_a_time_per_piece_and_the_peers_own_counts(tmp_path):
    """Events that come in halves are counted once, and the closing one is no token."""
    async with serving(fake("good"), tmp_path) as port:
        answer = await LlamaServer(port).ask([1, 2, 3], 5, cache=False)
    assert (answer.n_prompt, answer.n_computed, answer.n_generated) == (3, 2, 5)
    assert len(answer.times) == 5
    assert answer.began < answer.times[0] < answer.times[-1] < answer.ended
    assert answer.first_token_s < answer.total_s


@pytest.mark.parametrize("cache", [True, False])
async def test_the_request_says_what_ours_says(tmp_path, monkeypatch, cache):
    """Token ids as they are, greedy, exactly n tokens, cached or not as the workload wants."""
    sent = []

    async def stream_events(port, path, body, on_event):
        sent.append((path, body))
        return b'{"timings": {"prompt_n": 2, "predicted_n": 0}}'

    monkeypatch.setattr(peer, "stream_events", stream_events)
    await LlamaServer(1).ask((7, 8), 4, cache=cache)
    ((path, body),) = sent
    assert path == "/completion"
    assert (body["prompt"], body["n_predict"], body["cache_prompt"]) == ([7, 8], 4, cache)
    assert (body["temperature"], body["ignore_eos"]) == (0.0, True)


async def test_the_server_ends_with_the_block(tmp_path):
    """Nobody listens any more, and no process is left."""
    async with serving(fake("good"), tmp_path) as port:
        assert listens(port)
        ours = psutil.Process().children(recursive=True)
    assert not listens(port)
    with trio.fail_after(10):  # a grandchild notices a moment later
        while any(map(still_runs, ours)):  # noqa: ASYNC110  # no process tells of its end
            await trio.sleep(0.01)


def still_runs(process):
    """A grandchild is init's to collect: until then it is a zombie, which holds nothing."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt])
async def test_the_server_ends_when_the_block_fails(tmp_path, raised):
    """Also with Ctrl-C in the middle of a workload."""
    with pytest.raises(raised):
        async with serving(fake("good"), tmp_path) as port:
            raise raised
    assert not listens(port)


async def test_the_server_ends_when_the_block_is_cancelled(tmp_path):
    """Cancellation waits for it."""
    with trio.move_on_after(5) as scope:
        async with serving(fake("good"), tmp_path) as port:
            scope.cancel()
            await trio.sleep_forever()
    assert not listens(port)


async def test_one_that_dies_at_its_start_is_quoted(tmp_path):
    """The error has its status and its last lines."""
    with pytest.raises(EngineError, match=r"ended at its start with status 3.*this model is no model"):
        async with serving(fake("dies"), tmp_path):
            pass


async def test_a_program_that_is_not_there(tmp_path):
    """127 is what a shell says of it."""
    with pytest.raises(EngineError, match="status 127"):
        async with serving([str(tmp_path / "nothing")], tmp_path):
            pass


async def test_one_that_never_gets_ready_is_given_up(tmp_path):
    """And it is gone afterwards."""
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(EngineError, match="was not ready after 1 s"):
        async with serving(fake("slow"), tmp_path, within_s=1):
            pass
    assert set(psutil.Process().children(recursive=True)) == before


async def test_a_port_that_somebody_took_is_not_asked(tmp_path, monkeypatch):
    """Another server on the port answers /health too; ours died, so another port is tried."""
    free = peer._free_port
    async with serving(fake("good"), tmp_path) as taken:
        ports = [taken, free()]
        monkeypatch.setattr(peer, "_free_port", lambda: ports.pop(0))
        async with serving(fake("good"), tmp_path) as port:
            assert port != taken
            assert (await request(port, "GET", "/health"))[0] == 200
    assert ports == []


async def test_a_refused_request_is_quoted(tmp_path):
    """The peer's own words."""
    async with serving(fake("refuses"), tmp_path) as port:
        with pytest.raises(EngineError, match=r"500.*no room for it"):
            await LlamaServer(port).ask([1], 3, cache=True)


async def test_a_stream_that_breaks_off_is_an_error(tmp_path):
    """Half an answer is never taken for a whole one."""
    async with serving(fake("breaks"), tmp_path) as port:
        with pytest.raises(EngineError, match="closed the connection"):
            await LlamaServer(port).ask([1], 3, cache=True)


async def test_slots_are_saved_and_restored_by_name(tmp_path):
    """Times are ours; a refusal is an error."""
    async with serving(fake("good"), tmp_path) as port:
        server = LlamaServer(port)
        assert await server.slot("save", "a.bin") > 0
        with pytest.raises(EngineError, match="could not restore"):
            await server.slot("restore", "missing.bin")


async def test_the_peer_gets_the_options_of_our_side(tmp_path):
    """Threads, cells, batch, layout, KV types: the command line says what the settings say."""
    program = tmp_path / "llama-server"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/args\nexec {sys.executable} {FAKE} good "$@"\n')
    program.chmod(0o755)
    settings = Settings(
        model=Path("m.gguf"),
        folder=tmp_path,
        n_threads=3,
        programs=Programs(program, program),
        type_kv="q8_0",
    )
    async with open_peer(settings, n_ctx=640, n_seq_max=4) as server:
        answer = await server.ask([5, 6], 2, cache=False)
    assert answer.n_generated == 2
    given = (tmp_path / "args").read_text()
    for wanted in (
        *("--model m.gguf", "--ctx-size 640", "--parallel 4", "--batch-size 512", "--ubatch-size 512"),
        *("--threads 3", "--threads-batch 3", "--flash-attn on", "--kv-unified", "--cache-ram 0"),
        *("--cache-type-k q8_0", "--cache-type-v q8_0", f"--host {LOOPBACK}"),
    ):
        assert wanted in given


def test_the_server_ends_with_a_killed_bench(tmp_path):
    """kill -9 of the bench: the leash pulls."""
    program = textwrap.dedent(f"""
        import trio, sys
        from pathlib import Path
        from erllama.bench.peer import serving
        async def main():
            async with serving({fake("good")!r}, Path({str(tmp_path)!r})) as port:
                print(port, flush=True)
                await trio.sleep_forever()
        trio.run(main)
    """)
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    bench = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    )
    port = int(bench.stdout.readline())
    assert listens(port)
    bench.send_signal(signal.SIGKILL)
    bench.wait()
    bench.stdout.close()
    ends = time.monotonic() + 10
    while listens(port) and time.monotonic() < ends:
        time.sleep(0.02)
    assert not listens(port)
