"""`erllama generate` on the real model: text on stdout, everything else on stderr or in the status."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

import erllama

from .conftest import on_terminal, start

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPT = "The capital of France is"
GREEDY = ("--max-tokens", "8", "--temperature", "0")
# Recorded for the pin with SmolLM2-135M-Instruct Q4_1, f16 KV, on x86-64 (zen4 variant).
GOLDEN_IDS = [7042, 30, 198, 198, 504, 1797, 1918, 553]
GOLDEN_TEXT = " Paris.\n\nThe United States has"


@pytest.fixture
def model_path(smollm2_path) -> str:
    return str(smollm2_path)


def test_the_capital_of_france(erllama_command, model_path):
    """The recorded text of the pin, and not a byte besides it."""
    said = erllama_command("generate", "-m", model_path, "-p", PROMPT, *GREEDY)
    assert said == (0, GOLDEN_TEXT + "\n", "")


async def test_the_recorded_ids(model_path):
    """The first eight greedy token ids are those recorded for the pin."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(model_path)
        result = await model.complete(PROMPT, max_tokens=8, temperature=0.0)
    assert result.generated == GOLDEN_IDS
    assert result.reply == GOLDEN_TEXT


def test_without_a_path_the_default_model_answers(erllama_command, smollm2_path):
    """No `-m` means the default model."""
    said = erllama_command("generate", "-p", PROMPT, *GREEDY)
    assert said.status == 0
    assert "Paris" in said.out


def test_statistics_go_to_stderr(erllama_command, model_path):
    """`--stats` adds one line on stderr and leaves stdout alone."""
    said = erllama_command("generate", "-m", model_path, "-p", PROMPT, *GREEDY, "--stats")
    assert said.out == GOLDEN_TEXT + "\n"
    assert said.err.count("\n") == 1
    assert "answer 8 tokens" in said.err
    assert "ended by length" in said.err


def test_the_prompt_may_come_from_standard_input(model_path):
    """A piped prompt loses its one trailing newline and otherwise counts as typed."""
    process = start("generate", "-m", model_path, *GREEDY, stdin=subprocess.PIPE)
    out, err = process.communicate(PROMPT.encode() + b"\n")
    assert (process.returncode, out.decode(), err) == (0, GOLDEN_TEXT + "\n", b"")


def test_standard_input_must_be_text(model_path):
    """Bytes that are no UTF-8: one line that says where."""
    process = start("generate", "-m", model_path, stdin=subprocess.PIPE)
    _, err = process.communicate(b"abc\xff")
    assert process.returncode == 1
    assert b"byte 0xff at 3" in err
    assert err.count(b"\n") == 1


def test_stop_and_seed(erllama_command, model_path):
    """The answer ends before a stop text; the same seed says the same."""
    said = erllama_command("generate", "-m", model_path, "-p", PROMPT, *GREEDY, "--stop", "United")
    assert said.out == " Paris.\n\nThe \n"
    drawn = [
        erllama_command("generate", "-m", model_path, "-p", "Once", "--max-tokens", "12", "--seed", "7").out
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1]


def test_a_grammar_file_binds(erllama_command, model_path, tmp_path):
    """Only what the grammar allows is printed; one that is none, or not there, is named."""
    grammar = tmp_path / "yes.gbnf"
    grammar.write_text('root ::= " yes" | " no"')
    arguments = ("generate", "-m", model_path, "-p", "Is water wet?", "--grammar", str(grammar))
    assert erllama_command(*arguments).out in (" yes\n", " no\n")
    grammar.write_text("root ::= nobody")
    said = erllama_command(*arguments)
    assert said.status == 1
    assert said.err.startswith(f"erllama: {grammar}: the grammar, line 1: ")
    assert said.err.endswith("[invalid_grammar]\n")
    grammar.unlink()
    said = erllama_command(*arguments)
    assert said.status == 1
    assert "cannot read the grammar" in said.err


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "invalid_config"), (b"", "malformed_gguf"), (b"hello" * 99, "malformed_gguf")],
    ids=["missing", "empty", "text"],
)
def test_what_is_no_model_is_refused_in_one_line(erllama_command, tmp_path, content, reason):
    """Missing, empty and foreign files: status 1, one line, nothing from llama.cpp on stderr."""
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    said = erllama_command("generate", "-m", str(path), "-p", "x")
    assert said.status == 1
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.endswith(f"[{reason}]\n")


@pytest.mark.parametrize("kind", ["embedding", "encdec", "diffusion", "unknown_arch", "vocab"])
def test_what_cannot_generate_says_so(erllama_command, tiny_gguf, kind):
    """X29: models that load but cannot answer, or do not load: one typed line."""
    said = erllama_command("generate", "-m", str(tiny_gguf(kind)), "-p", "x")
    assert said.status == 1
    assert said.err.count("\n") == 1


def test_a_prompt_longer_than_the_context_is_refused(erllama_command, model_path):
    """Too long: the message has both lengths."""
    said = erllama_command("generate", "-m", model_path, "-p", "word " * 300, "--n-ctx", "256")
    assert said.status == 1
    assert "301 tokens" in said.err or "300 tokens" in said.err
    assert "256" in said.err
    assert "give a larger --n-ctx" in said.err


def test_more_context_than_was_trained_is_warned_of(erllama_command, model_path):
    """n_ctx beyond the trained length works, with one line on stderr."""
    said = erllama_command("generate", "-m", model_path, "-p", PROMPT, *GREEDY, "--n-ctx", "9000")
    assert said.status == 0
    assert said.err.count("\n") == 1
    assert "was trained for 8192 tokens; with n_ctx=9000" in said.err


def test_arguments_that_are_no_text_are_refused(model_path):
    """A lone surrogate (an argument that is no UTF-8) is typed, not a crash."""
    process = start("generate", "-m", model_path, "-p", b"abc\xff")
    _, err = process.communicate()
    assert process.returncode == 1
    assert err.endswith(b"[invalid_content]\n")
    assert err.count(b"\n") == 1


def test_a_reader_that_leaves_early_is_no_failure(model_path):
    """`| head -c 5`: status 0, silence."""
    process = start("generate", "-m", model_path, "-p", PROMPT, "--max-tokens", "400")
    assert process.stdout is not None
    assert process.stderr is not None
    assert len(process.stdout.read(5)) == 5
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 0


@pytest.mark.parametrize("when", ["while loading", "while answering"])
def test_ctrl_c_ends_it_cleanly(model_path, when):
    """SIGINT: status 130, one line, no traceback."""
    process = start("generate", "-m", model_path, "-p", "Once upon a time", "--max-tokens", "1500")
    assert process.stdout is not None
    if when == "while answering":
        process.stdout.read(20)
    else:
        _wait_until_mapped(process.pid, model_path)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"erllama: interrupted\n")


def _wait_until_mapped(pid: int, path: str) -> None:
    """Until the process has the model's file open or mapped: it is loading."""
    name = os.path.realpath(path)
    while True:
        with open(f"/proc/{pid}/maps") as maps:
            if name in maps.read():
                return


def test_a_terminal_gets_a_progress_bar(model_path):
    """On a terminal, loading is shown on stderr and wiped afterwards; stdout has the text alone."""
    process, out, shown = on_terminal("generate", "-m", model_path, "-p", PROMPT, *GREEDY)
    assert process.returncode == 0
    assert out.decode() == GOLDEN_TEXT + "\n"
    assert b"Loading" in shown


def test_a_default_model_that_cannot_be_fetched_says_what_to_do(tmp_path):
    """No index reachable: status 1 and one line with the way out."""
    process = start("generate", "-p", "x", env={"ERLLAMA_CACHE_DIR": str(tmp_path), "PIP_NO_INDEX": "1"})
    out, err = process.communicate()
    assert process.returncode == 1
    assert out == b""
    assert err.splitlines()[-1].endswith(b"[no_index]")
