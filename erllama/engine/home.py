"""Which trio loop an engine belongs to: everything but plain reads happens in it, and nowhere else."""

from __future__ import annotations

import trio

from erllama.errors import RequestError

Home = trio.lowlevel.TrioToken


def current_home() -> Home:
    """The trio loop of the calling task. Raises: `RequestError` with reason "wrong_loop" outside trio."""
    try:
        return trio.lowlevel.current_trio_token()
    except RuntimeError:
        raise RequestError(
            "this was called from outside a trio task: start the program with trio.run(main), not "
            "asyncio.run(main()), and call from worker threads through trio.from_thread",
            reason="wrong_loop",
        ) from None


def require_home(home: Home) -> None:
    """Raise `RequestError` with reason "wrong_loop" unless the calling task runs in that loop."""
    try:
        is_here = trio.lowlevel.current_trio_token() is home
    except RuntimeError:
        is_here = current_home() is home  # which says what is wrong
    if not is_here:
        raise RequestError(
            "this engine belongs to another trio loop; from a thread, hand the call over with "
            "trio.from_thread.run(…) instead of trio.run(…), or open an engine in each loop",
            reason="wrong_loop",
        )
