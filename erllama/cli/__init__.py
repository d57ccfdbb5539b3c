"""The `erllama` command.

What lives here: argument parsing, progress bars, and one module per command. It may use the public
API (`erllama`), `runtime` and `models`; nothing may import it. `main` turns every failure into one
line and an exit status; commands themselves just raise. Imports are late on purpose: `--help` loads
neither trio nor the native library.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

from .parser import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns: 0; 1 when it failed, with one line on stderr; 2 for wrong usage; 130 after Ctrl-C. A reader
    that closes our output early (`| head`) is not a failure.
    """
    _never_fail_to_print()
    try:
        arguments = parse(argv)
        arguments.run(arguments)
        sys.stdout.flush()
    except SystemExit as stop:  # argparse has printed help or the mistake
        return int(stop.code or 0)
    except BaseException as failure:
        return _exit_status(failure)
    return 0


def _exit_status(failure: BaseException) -> int:
    """Say what went wrong in one line, or let a bug surface with its traceback."""
    from erllama.errors import ErllamaError

    cause = _leaf(failure, (KeyboardInterrupt, BrokenPipeError, ErllamaError))
    match cause:
        case KeyboardInterrupt():
            print("erllama: interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        case BrokenPipeError():
            # Python flushes stdout once more at exit; that must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        case ErllamaError():
            sentence = " ".join(str(cause).split())
            print(f"erllama: {sentence} [{cause.reason}]", file=sys.stderr)
            return EXIT_FAILED
    raise failure


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
