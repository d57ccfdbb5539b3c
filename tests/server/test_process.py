"""`erllama serve` as a process: signals, restarts, mistakes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from erllama import cli
from server.conftest import ENVIRONMENT, start_server, stop_server

MESSAGES = "/v1/messages"
SYSTEM = "You are an assistant for people who repair bicycles and like short answers. " * 12

NEVER_ENDS = {"0": -100, "2": -100}  # SmolLM2's tokens that end an answer
ENDLESS = {"model": "smol", "prompt": "Once", "max_tokens": 1900, "logit_bias": NEVER_ENDS}


def start_draining_server(model_path, tmp_path, *, drain_s):
    """A server without a cache that gives answers so long to end."""
    config = tmp_path / "erllama.toml"
    config.write_text(f"[limits]\ndrain_s = {drain_s}\n")
    model = ("-m", f"smol={model_path}", "--n-ctx", "2048")
    return start_server("--no-cache", "--config", str(config), *model)


def ask(url, messages):
    body = {"model": "smol", "max_tokens": 12, "temperature": 0, "system": SYSTEM, "messages": messages}
    reply = httpx.post(url + MESSAGES, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.model
@pytest.mark.slow
def test_a_conversation_is_warm_after_a_restart(smollm2_path, tmp_path):
    """What was computed before the server ended is read again by the next one."""
    arguments = ("-m", f"smol={smollm2_path}", "--kv-dir", str(tmp_path), "--n-ctx", "2048")
    messages = [{"role": "user", "content": "My brake squeaks."}]
    process, url = start_server(*arguments)
    try:
        first = ask(url, messages)
    finally:
        assert stop_server(process) == 0
    messages += [
        {"role": "assistant", "content": first["content"][0]["text"]},
        {"role": "user", "content": "And now?"},
    ]
    process, url = start_server(*arguments)
    try:
        usage = ask(url, messages)["usage"]
    finally:
        stop_server(process)
    assert first["usage"]["cache_read_input_tokens"] == 0
    assert usage["cache_read_input_tokens"] > 150
    assert usage["input_tokens"] + usage["cache_creation_input_tokens"] < 60


@pytest.mark.model
@pytest.mark.slow
def test_the_first_signal_lets_answers_end(smollm2_path, tmp_path):
    """SIGTERM in the middle of a stream: it ends well, new requests are refused, the status is 0."""
    process, url = start_draining_server(smollm2_path, tmp_path, drain_s=60)
    pieces, statuses = [], []
    body = {"model": "smol", "prompt": "Once upon a time", "max_tokens": 200, "stream": True}
    try:
        httpx.post(url + "/v1/completions", json=body | {"max_tokens": 1, "stream": False}, timeout=60)
        with (
            httpx.Client(timeout=60) as other,
            httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as stream,
        ):
            other.get(url + "/health/ready").raise_for_status()
            for line in stream.iter_lines():
                if not pieces:
                    process.send_signal(signal.SIGTERM)
                    while other.get(url + "/health/ready").status_code == 200:
                        time.sleep(0.01)  # until the signal has arrived
                    statuses.append(other.get(url + "/health/ready").status_code)
                    statuses.append(other.post(url + "/v1/completions", json=body).status_code)
                pieces.append(line)
        status = process.wait(60)
    finally:
        stop_server(process)
    assert statuses == [503, 503]
    assert pieces[-2:] == ["data: [DONE]", ""] or pieces[-1] == "data: [DONE]"
    assert status == 0


def test_mistakes_are_told_before_anything_is_served(tmp_path, capsys):
    """A model that is not there, a setting that does not exist, a value that is none: one line, status 1."""

    def run_serve(*arguments):
        status = cli.main(["serve", *arguments])
        return status, capsys.readouterr().err

    config = tmp_path / "erllama.toml"
    for text, complaint in (
        ("[listen]\nprot = 1\n", "listen.prot"),
        ("[listen]\nport = 99999\n", "listen.port"),
        ("[models.a]\npath = 'a.gguf'\ncontext = { n_ctxx = 1 }\n", "n_ctxx"),
        ("[models.a]\npath = 'missing.gguf'\n", "no file"),
        ("[aliases]\nx = 'nobody'\n[models.a]\n", "nobody"),
        ("nonsense", "not TOML"),
    ):
        config.write_text(text)
        status, told = run_serve("--config", str(config))
        assert status == 1
        assert complaint in told
        assert len(told.splitlines()) == 1
    status, told = run_serve("-m", "x=missing.gguf")
    assert (status, "no file missing.gguf" in told) == (1, True)
    assert run_serve("--config", str(tmp_path / "none"))[0] == 1
    assert run_serve("--n-ctxx", "1")[0] == 2


def test_aliases_are_read_again(tmp_path):
    """H52: after SIGHUP the map is the file's."""
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    config = tmp_path / "erllama.toml"
    models = "".join(f"[models.{name}]\npath = '{name}.gguf'\n" for name in "ab")

    def swap(aliases: str) -> None:
        config.write_text(f"[aliases]\n{aliases}\n{models}")
        process.send_signal(signal.SIGHUP)

    def is_told(name: str) -> bool:
        return httpx.get(f"{url}/v1/models/{name}").status_code == 200

    def wait_for(name: str) -> None:
        deadline = time.monotonic() + 20
        while not is_told(name):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    config.write_text(f"[aliases]\nfast = 'a'\n{models}")
    process, url = start_server("--no-cache", "--config", str(config))
    try:
        assert process.stdout.readline() == "models: a, b\n"
        assert (is_told("fast"), is_told("fast:latest"), is_told("big")) == (True, True, False)
        swap("big = 'b'")
        wait_for("big")
        assert not is_told("fast")
    finally:
        assert stop_server(process) == 0


def test_a_port_that_is_taken_is_told():
    """One line and status 1; the server that has it goes on."""
    process, url = start_server("--no-cache")
    try:
        command = [sys.executable, "-m", "erllama", "serve", "--no-cache", "--port", url.rpartition(":")[2]]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT, check=False
        )
        assert done.returncode == 1
        assert "cannot listen" in done.stderr
        assert httpx.get(url + "/health").status_code == 200
    finally:
        assert stop_server(process) == 0


def test_a_second_signal_ends_at_once(smollm2_path):
    """Who asks twice does not wait for answers."""
    process, url = start_server("-m", f"smol={smollm2_path}", "--no-cache", "--n-ctx", "2048")

    def hang() -> None:
        try:
            ended.append(httpx.post(url + "/v1/completions", json=ENDLESS, timeout=60).status_code)
        except httpx.HTTPError as why:
            ended.append(why)

    ended: list[int | httpx.HTTPError] = []
    client = threading.Thread(target=hang)
    client.start()
    try:
        deadline = time.monotonic() + 120
        while 'erllama_active_answers{model="smol"} 1.0' not in httpx.get(url + "/metrics").text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(40) in (130, -signal.SIGINT)  # either way a shell says 130
        assert time.monotonic() - begun < 20
        client.join(10)
        assert len(ended) == 1
        assert ended[0] == 500 or isinstance(ended[0], httpx.HTTPError), "no answer that looks whole"
    finally:
        stop_server(process)


@pytest.mark.model
@pytest.mark.slow
def test_who_is_cut_off_by_the_end_is_told(smollm2_path, tmp_path):
    """An answer that takes longer than `drain_s`: its stream ends with an error, the status is 0."""
    process, url = start_draining_server(smollm2_path, tmp_path, drain_s=0.2)
    body = ENDLESS | {"stream": True}
    try:
        lines = []
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    if not lines:
                        process.send_signal(signal.SIGTERM)
                    lines.append(line)
        assert process.wait(30) == 0
    finally:
        stop_server(process)
    assert "shutting_down" in "".join(lines[-2:])
