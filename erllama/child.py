"""Start a program that does not outlive us, however we end.

The program runs below a small shell in a process group of its own. The shell's standard input is a
pipe that only we hold: when we are gone (`kill -9` included) or let go of it, the pipe ends and the
whole group gets a SIGTERM, the programs that the program started among them. That needs neither a
handler nor a call between fork and exec, so it works from any thread. Standard library only: the
build uses it too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

KILL_AFTER_S = 10.0

# The program starts before there is a trap: a shell that has just been forked drops a signal it has a
# trap for. For the same reason the watcher is ended by a signal that no trap can take. It is kept off
# the program's output, whose reader would wait for it too, and is gone before the shell, because it
# holds the kept descriptors. A `wait` that the trap interrupted is repeated: the program may take a moment.
_LEASH = """
exec FD<&0
"$@" </dev/null FD<&- & program=$!
exec 2>/dev/null
trap 'ended=1' TERM
{ read -r _ <&FD; kill -TERM 0; } >/dev/null & watcher=$!
wait "$program"; code=$?
[ -z "$ended" ] || wait "$program"
kill -KILL "$watcher"
exit "$code"
"""


@contextlib.contextmanager
def leashed(
    command: Sequence[str],
    *,
    stdout: int | IO[Any],
    text: bool = False,
    environment: Mapping[str, str] | None = None,
    keep: Sequence[int] = (),
) -> Iterator[subprocess.Popen[Any]]:
    """Run `command`; its errors go where its output goes, and it reads nothing.

    Leaving the block ends the program if it still runs, with all that it started, and waits for it:
    to let it finish, wait for it inside. `keep` are descriptors that it inherits (locks, which are
    then held until it is gone). A program that a signal killed has 128 + the signal as its exit code.

    Raises: OSError if there is no shell; a program that does not exist is exit code 127.
    """
    # A job in the background has its standard input replaced, so the pipe needs another number.
    free = next(number for number in range(3, 10) if number not in keep)
    process: subprocess.Popen[Any] = subprocess.Popen(
        ["/bin/sh", "-c", _LEASH.replace("FD", str(free)), "sh", *command],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=text,
        errors="replace" if text else None,
        env=environment,
        pass_fds=tuple(keep),
        process_group=0,
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(KILL_AFTER_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        if process.stdout is not None:
            process.stdout.close()
