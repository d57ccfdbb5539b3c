"""`erllama chat`: a conversation over pipes and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time

import pytest

from .conftest import start

pytestmark = [pytest.mark.model, pytest.mark.slow]

GREEDY = ("--temperature", "0", "--max-tokens", "12")


def talk(model_path, typed, *arguments):
    """What a conversation over pipes says."""
    process = start("chat", "-m", str(model_path), *GREEDY, *arguments, stdin=subprocess.PIPE)
    out, err = process.communicate(typed.encode(), timeout=120)
    return process.returncode, out.decode(), err.decode()


def test_each_line_is_a_message(smollm2_path, tmp_path):
    """Two messages, two answers on stdout; the saved conversation holds all of it."""
    saved = tmp_path / "talk.json"
    status, out, err = talk(smollm2_path, f"Say hello.\nAgain.\n/save {saved}\n", "-s", "Be brief.")
    assert status == 0
    messages = json.loads(saved.read_text())
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert out == f"{messages[2]['content']}\n{messages[4]['content']}\n"
    assert err == f"5 messages in {saved}\n"


def test_commands(smollm2_path):
    """/stats before and after an answer, /reset, an unknown one, /quit."""
    typed = "/stats\nHi.\n/stats\n/reset\n/dance\n/save\n/quit\nnever asked\n"
    status, out, err = talk(smollm2_path, typed)
    lines = err.splitlines()
    assert status == 0
    assert lines[0] == "There is no answer yet."
    assert "answer 12 tokens" in lines[1] or "ended by stop" in lines[1]
    assert lines[2:] == [
        "The conversation is forgotten.",
        "There is no command /dance; /help lists them.",
        "Say where to: /save FILE",
    ]
    assert out.strip()


def test_messages_of_several_lines(smollm2_path, tmp_path):
    """A backslash goes on, a fence holds everything."""
    saved = tmp_path / "talk.json"
    talk(smollm2_path, f'one \\\ntwo\n"""\nthree\n/quit\n"""\n/save {saved}\n')
    said = [m["content"] for m in json.loads(saved.read_text()) if m["role"] == "user"]
    assert said == ["one \ntwo", "three\n/quit"]


def test_what_cannot_be_sent_ends_no_conversation(smollm2_path):
    """A message beyond the context: one line, and the next one is answered."""
    status, out, err = talk(smollm2_path, f"{'word ' * 3000}\nHi.\n", "--n-ctx", "256")
    assert status == 0
    assert "[context_overflow]" in err
    assert out.strip()


def test_a_template_of_ones_own(smollm2_path, tmp_path):
    """A file; one that is not there or is none ends the command with a line."""
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    status, out, _ = talk(smollm2_path, "Once upon a time\n", "--chat-template", str(file))
    assert status == 0
    assert out.strip()
    status, _, err = talk(smollm2_path, "", "--chat-template", str(tmp_path / "absent"))
    assert status == 1
    assert "cannot read the template" in err


def test_mistakes_are_found_before_loading(erllama_command):
    """As with `generate`."""
    said = erllama_command("chat", "--temperature", "-1")
    assert said.status == 2
    assert "--temperature" in said.err
    assert erllama_command("chat", "--reasoning", "deep").status == 2


def test_interrupts_end_the_answer_then_the_conversation(smollm2_path):
    """Ctrl-C while it answers: the answer stays as it is; at the prompt: it leaves."""
    master, slave = pty.openpty()
    process = start(
        "chat", "-m", str(smollm2_path), "--temperature", "0", "--max-tokens", "1500",
        stdin=slave, stdout=slave, stderr=slave, env={"TERM": "xterm"},
    )  # fmt: skip
    os.close(slave)
    screen = b""

    def read_until(text):
        nonlocal screen
        deadline = time.monotonic() + 90
        while text not in screen:
            assert time.monotonic() < deadline, screen
            screen += os.read(master, 4096)

    read_until(b"> ")
    os.write(master, b"Count from one to a thousand, in words.\n")
    read_until(b"\n")
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    read_until(b"[interrupted]")
    read_until(b"came from the cache")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    os.close(master)


def test_a_model_without_a_template_says_so_at_once(gemma_path, erllama_command):
    """In the command's own words, before anything is asked."""
    said = erllama_command("chat", "-m", str(gemma_path))
    assert said.status == 1
    assert "--chat-template FILE" in said.err
    assert said.out == ""


def test_tools_that_are_none(erllama_command, tmp_path):
    """A file that is no JSON, or holds no list."""
    file = tmp_path / "tools.json"
    for text in ("{", "{}"):
        file.write_text(text)
        said = erllama_command("chat", "--tools", str(file))
        assert said.status == 1
        assert "the tools" in said.err
