"""Programs on a leash: none is left behind, neither by an exception nor by kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from erllama import child
from erllama.child import leashed

from processes import is_gone  # isort: skip  # tests/ is on the path

# A program with a program of its own, as a compiler driver has; both say who they are.
FAMILY = ["sh", "-c", "sleep 60 & echo $$ $!; wait"]


@pytest.mark.parametrize("code", [0, 3])
def test_the_program_s_output_and_exit_code_are_its_own(code):
    """Both streams arrive in one, and the exit code is the program's."""
    command = ["sh", "-c", f"echo out; echo err >&2; exit {code}"]
    with leashed(command, stdout=subprocess.PIPE, text=True) as process:
        assert sorted(process.stdout) == ["err\n", "out\n"]
        assert process.wait() == code


def test_arguments_are_passed_as_they_are():
    """Spaces, quotes and dollar signs mean nothing to the shell in between."""
    words = ["a b", "$HOME", "'", '"', "`id`", ""]
    command = [sys.executable, "-c", "import sys; print(sys.argv[1:])", *words]
    with leashed(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.read() == f"{words}\n"


def test_a_program_that_is_not_there_is_127():
    """No such program: the shell says so, and the exit code is 127."""
    with leashed(["/no/such/program"], stdout=subprocess.PIPE, text=True) as process:
        assert "/no/such/program" in process.stdout.read()
        assert process.wait() == 127


def test_a_program_killed_by_a_signal_says_so():
    """128 plus the signal, as shells have it."""
    with leashed(["sh", "-c", "kill -KILL $$"], stdout=subprocess.DEVNULL) as process:
        assert process.wait() == 128 + signal.SIGKILL


def test_leaving_the_block_ends_the_whole_family():
    """An exception in the middle, Ctrl-C included, ends the program and what it started."""
    pids: list[int] = []

    def interrupted() -> None:
        with leashed(FAMILY, stdout=subprocess.PIPE, text=True) as process:
            pids.extend(map(int, process.stdout.readline().split()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [is_gone(pid) for pid in pids] == [True, True]


@pytest.mark.slow
def test_kill_9_ends_the_whole_family():
    """Killed without a chance to clean up, we leave no program behind."""
    code = f"""
        import subprocess, sys
        from erllama.child import leashed
        with leashed({FAMILY!r}, stdout=subprocess.PIPE, text=True) as process:
            print(process.stdout.readline(), flush=True)
            process.wait()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    ) as us:
        pids = [int(word) for word in us.stdout.readline().split()]
        us.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    assert [is_gone(pid) for pid in pids] == [True, True]


@pytest.mark.slow
def test_a_program_that_will_not_end_is_killed(monkeypatch):
    """A program that ignores the SIGTERM is killed after a while."""
    monkeypatch.setattr(child, "KILL_AFTER_S", 0.3)
    stubborn = ["sh", "-c", "trap '' TERM; echo $$; while :; do sleep 0.05; done"]
    with leashed(stubborn, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
    assert is_gone(pid)


@pytest.mark.parametrize("number", [3, 4])
def test_every_descriptor_can_be_kept(number):
    """The leash takes none of the numbers that the program is to inherit."""
    code = f"""
        import os, subprocess
        from erllama.child import leashed
        kept = os.dup2(os.open("/dev/null", os.O_RDONLY), {number})
        command = ["sh", "-c", ": <&{number} && echo kept"]
        with leashed(command, stdout=subprocess.PIPE, text=True, keep=[kept]) as process:
            print(process.stdout.read())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "kept"


def test_nothing_holds_an_inherited_lock_once_the_program_is_over():
    """`keep`: the descriptor is the program's for its life, and closed when it has ended."""
    mine, theirs = os.pipe()
    command = ["sh", "-c", f"echo x > /dev/fd/{theirs}"]
    with leashed(command, stdout=subprocess.DEVNULL, keep=[theirs]) as process:
        assert process.wait() == 0
        os.close(theirs)
        assert os.read(mine, 10) == b"x\n"
        assert os.read(mine, 10) == b""  # ends only when nobody holds the other side
    os.close(mine)


def test_works_from_any_thread():
    """Nothing depends on the thread that started the program, and warnings as errors stay silent."""
    codes: list[int] = []

    def work() -> None:
        with leashed(["true"], stdout=subprocess.DEVNULL) as process:
            codes.append(process.wait())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert codes == [0]
