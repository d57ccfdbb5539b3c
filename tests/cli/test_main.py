"""`erllama` itself: help, misuse, failures in one line, exit statuses."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys

import pytest

import erllama
from erllama import errors
from erllama.cli import main, parser

from .conftest import start


def test_help_comes_at_once():
    """`--help` costs under 0.3 s of CPU (best of three) and needs no native library."""
    costs = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        process = start("--help")
        out, err = process.communicate()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert process.returncode == 0, err
        assert b"erllama generate" in out
        costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(costs) < 0.3


def test_help_loads_no_native_code():
    """Help does not even import the binding."""
    program = (
        "import sys; from erllama.cli import main; main(['--help'])\n"
        "print([m for m in sys.modules if m.startswith('erllama.llama') or m == '_cffi_backend'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["generate", "demo", "bench", "version"])
def test_each_command_explains_itself(erllama_command, command):
    """`erllama COMMAND --help` exits with 0."""
    said = erllama_command(command, "--help")
    assert said.status == 0
    assert command in said.out


def test_generate_help_teaches_by_example(erllama_command):
    """The help of `generate` has examples that can be typed."""
    said = erllama_command("generate", "--help")
    assert "examples:" in said.out
    assert said.out.count("  erllama generate") + said.out.count("| erllama generate") >= 4


def test_without_arguments_there_is_help(erllama_command):
    """`erllama` alone shows the help on stderr and counts as misuse."""
    said = erllama_command()
    assert said.status == 2
    assert "Try this first" in said.err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["generate", "--temprature", "1", "-p", "x"], "did you mean --temperature?"),
        (["generate", "--max-token=3", "-p", "x"], "did you mean --max-tokens?"),
        (["generate", "-p", "x", "--temperature", "-1"], "--temperature: expected a finite number"),
        (["generate", "-p", "x", "--temperature", "nan"], "--temperature: expected a finite number"),
        (["generate", "-p", "x", "--top-p", "2"], "--top-p: expected"),
        (["generate", "-p", "x", "--max-tokens", "0"], "--max-tokens: expected a whole number"),
        (["generate", "-p", "x", "--max-tokens", "ten"], "invalid int value: 'ten'"),
        (["generate", "-p", "x", "--n-ctx", "0"], "--n-ctx: expected a whole number"),
        (["generate", "-p", "x", "--threads", "0"], "--threads: expected a whole number"),
        (["generate", "-p", "x", "--stop", ""], "--stop: expected"),
        (["generate", "-p", "x", "-m", ""], "--model: expected the path of a GGUF file"),
        (["generate", "-p", "x", "--kv-max", "much"], "--kv-max: invalid size value: 'much'"),
        (["generate", "-p", "x", "--kv-dir", ""], "--kv-dir: expected a folder"),
        (["generate", "-p", "x", "--kv-dir", "k", "--no-cache"], "--no-cache: not together"),
        (["demo", "--fast"], "unknown argument --fast"),
        (["generat"], "invalid choice: 'generat'"),
    ],
)
def test_misuse_is_named_before_anything_is_loaded(erllama_command, arguments, hint):
    """A wrong argument gives status 2 and a hint, and no model is touched."""
    said = erllama_command(*arguments)
    assert said.status == 2
    assert hint in said.err.replace("\n", " ")
    assert said.out == ""


def _failing(monkeypatch, failure: BaseException) -> None:
    def parse(argv: object) -> None:
        raise failure

    monkeypatch.setattr(parser, "parse", parse)


def test_an_error_is_one_line_with_its_reason(monkeypatch, capsys):
    """A typed error: status 1, one line on stderr, the reason at its end."""
    _failing(monkeypatch, errors.NotLoaded("no model\nhere"))
    assert main([]) == 1
    assert capsys.readouterr() == ("", "erllama: no model here [not_loaded]\n")


def test_an_error_inside_groups_is_found(monkeypatch, capsys):
    """Nurseries wrap errors in groups; the user sees the error."""
    inner = ExceptionGroup("inner", [errors.LoadFailed("cannot load")])
    _failing(monkeypatch, ExceptionGroup("outer", [inner]))
    assert main([]) == 1
    assert capsys.readouterr().err == "erllama: cannot load [load_failed]\n"


def test_an_interrupt_wins_over_what_it_caused(monkeypatch, capsys):
    """Ctrl-C beside other errors is still Ctrl-C: status 130."""
    group = BaseExceptionGroup("both", [errors.LoadFailed("stopped"), KeyboardInterrupt()])
    _failing(monkeypatch, group)
    assert main([]) == 130
    assert capsys.readouterr().err == "erllama: interrupted\n"


def test_a_bug_keeps_its_traceback(monkeypatch):
    """What is no typed error is not dressed up as one."""
    _failing(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main([])


@pytest.mark.parametrize("arguments", [("--version",), ("version",)])
def test_a_full_disk_is_one_line(arguments):
    """Output that cannot be written: status 1 and what the system says, no traceback."""
    with open("/dev/full", "wb") as full:
        process = start(*arguments, stdout=full)
        _, err = process.communicate()
    assert process.returncode == 1
    assert err.decode() == f"erllama: cannot write the output: {os.strerror(errno.ENOSPC)}\n"


def test_the_version_is_one_everywhere():
    """`erllama --version`, `python -m erllama --version` and `erllama.__version__` agree."""
    process = start("--version")
    out, _ = process.communicate()
    module = [sys.executable, "-m", "erllama", "--version"]
    done = subprocess.run(module, capture_output=True, check=True)
    assert out.decode() == done.stdout.decode() == f"erllama {erllama.__version__}\n"


def test_ctrl_c_before_anything_runs_is_one_line():
    """While the command's modules are imported, SIGINT ends the process with status 130 and one line."""
    program = (
        "import os, signal, sys; from erllama.cli import main, parser\n"
        "parser.parse = lambda argv: os.kill(os.getpid(), signal.SIGINT)\n"
        "main(['version'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"erllama: interrupted\n")


def test_the_handler_for_ctrl_c_is_put_back(erllama_command):
    """A call from a program of one's own leaves its signal handling alone."""
    before = signal.getsignal(signal.SIGINT)
    erllama_command("--version")
    assert signal.getsignal(signal.SIGINT) is before
