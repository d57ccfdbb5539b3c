"""One exception out of a nursery comes out as itself, not as a group of one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def bare_errors() -> Iterator[None]:
    """Around a nursery whose other tasks only ever get cancelled.

    A group that holds exactly one exception besides `Cancelled` is raised as that exception; groups of the
    caller's own stay whole.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        others = [error for error in group.exceptions if not isinstance(error, trio.Cancelled)]
        if len(others) != 1:
            raise
        context = others[0].__context__
        try:
            raise others[0]
        finally:
            others[0].__context__ = context  # the group itself tells the reader nothing
