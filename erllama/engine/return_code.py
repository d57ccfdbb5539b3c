"""What llama_decode's return code means for whoever asked."""

from __future__ import annotations

from erllama.backend import StepStatus


def status_of(rc: int, cause: str | None) -> StepStatus:
    """llama.h, llama_decode: 1 no room, 2 aborted, negative fatal (-1: our batch was invalid)."""
    if rc == 0:
        return StepStatus.OK
    if rc == 1:
        return StepStatus.NO_ROOM
    if rc == 2:
        return StepStatus.TIMEOUT if cause == "deadline" else StepStatus.ABORTED
    return StepStatus.FATAL
