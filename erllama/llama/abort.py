"""Stopping a decode from another thread, or at a deadline."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .ffi import Library

Cause = Literal["cancel", "deadline"]
CAUSES: dict[int, Cause] = {1: "cancel", 2: "deadline"}  # shim.cpp: FIRED_*


class Abort:
    """The flag and deadline that ggml's threads look at between graph nodes (CPU only).

    Thread: any; the only part of a context another thread may touch while it decodes.
    """

    def __init__(self, lib: Library) -> None:
        self._lib = lib
        self.fields: Any = lib.ffi.new("struct el_abort *")  # read by ggml; lives as long as the context
        self._next_s = math.nan  # as the native part takes it: NaN leaves the deadline as it is

    def raise_flag(self) -> None:
        """Stop the running decode, and every later one until `clear()`."""
        self._lib.abort_raise(self.fields)

    def arm(self, deadline_s: float | None) -> None:
        """Stop decodes that still run in `deadline_s` seconds from now; None disarms."""
        self._lib.abort_arm(self.fields, -1.0 if deadline_s is None else deadline_s)

    def arm_next(self, deadline_s: float | None) -> None:
        """`arm` at the moment the next decode begins, in the same native call. Thread: the context's."""
        self._next_s = -1.0 if deadline_s is None else deadline_s

    def take_next(self) -> float:
        """What `arm_next` asked for, once."""
        seconds, self._next_s = self._next_s, math.nan
        return seconds

    @property
    def is_raised(self) -> bool:
        """Whether the flag is up, or something stopped a decode, since the last `clear()`."""
        return bool(self.fields.cancel or self.fields.fired)

    def clear(self) -> None:
        """Lower the flag, disarm the deadline, forget the cause."""
        self._lib.abort_clear(self.fields)

    @property
    def cause(self) -> Cause | None:
        """What stopped a decode since the last `clear()`."""
        return CAUSES.get(self.fields.fired)
