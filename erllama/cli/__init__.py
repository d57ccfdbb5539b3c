"""The `erllama` command.

What lives here: argument parsing, progress bars, and one module per command. It may use the public
API (`erllama`), `runtime` and `models`; nothing may import it. `main` turns every failure into one
line and an exit status; commands themselves just raise. Imports are late on purpose: `--help` loads
neither trio nor the native library, and Ctrl-C is answered from the first moment.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import contextmanager

TYPE_CHECKING = False  # as type checkers know it, without the import: until `main`, Ctrl-C is a traceback
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import NoReturn

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
INTERRUPTED = "erllama: interrupted"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns: 0; 1 when it failed, with one line on stderr; 2 for wrong usage; 130 after Ctrl-C. A reader
    that closes our output early (`| head`) is not a failure.
    """
    try:
        _never_fail_to_print()
        status = _run(argv)
        sys.stdout.flush()
    except BaseException as failure:
        return _exit_status(failure)
    return status


def _run(argv: Sequence[str] | None) -> int:
    try:
        with _interrupts_end_at_once():
            from importlib import import_module

            from . import parser

            arguments = parser.parse(argv)
            command = import_module(f"erllama.cli.{arguments.command}")
        command.run(arguments)
    except SystemExit as stop:  # argparse has printed help or the mistake
        return int(stop.code or 0)
    return 0


@contextmanager
def _interrupts_end_at_once() -> Iterator[None]:
    """For the block, which holds nothing worth cleaning up, Ctrl-C ends the process.

    As an exception it would come out of half an import, which may turn it into another one.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # ignored (a background job), or somebody else's
        return
    try:
        signal.signal(signal.SIGINT, _end_at_once)
    except ValueError:  # not in the main thread, which no signal reaches
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_at_once(*_: object) -> NoReturn:
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(EXIT_INTERRUPTED)


def _exit_status(failure: BaseException) -> int:
    """Say what went wrong in one line, or let a bug surface with its traceback."""
    from erllama.errors import ErllamaError

    cause = _leaf(failure, (KeyboardInterrupt, BrokenPipeError, ErllamaError, OSError))
    match cause:
        case KeyboardInterrupt():
            print(INTERRUPTED, file=sys.stderr)
            return EXIT_INTERRUPTED
        case BrokenPipeError():
            _discard_output()
            return 0
        case ErllamaError():
            sentence = " ".join(str(cause).split())
            print(f"erllama: {sentence} [{cause.reason}]", file=sys.stderr)
            return EXIT_FAILED
        case OSError(filename=None, strerror=str(why)):  # a full disk, a terminal that is gone
            _discard_output()
            print(f"erllama: cannot write the output: {why}", file=sys.stderr)
            return EXIT_FAILED
    raise failure


def _discard_output() -> None:
    """Python flushes stdout once more at exit; that must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leaf(failure: BaseException, kinds: tuple[type[BaseException], ...]) -> BaseException | None:
    """The first exception of these kinds in a group and its subgroups, earlier kinds first."""
    for kind in kinds:
        if isinstance(failure, kind):
            return failure
        if isinstance(failure, BaseExceptionGroup):
            for inner in failure.exceptions:
                if (found := _leaf(inner, (kind,))) is not None:
                    return found
    return None


def _never_fail_to_print() -> None:
    """Where the terminal cannot show a character, show a replacement instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
