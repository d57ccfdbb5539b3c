"""Other processes, as tests look at them."""

from __future__ import annotations

import os
import time


def is_gone(pid: int) -> bool:
    """Whether a process ends within five seconds."""
    for _ in range(500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False
