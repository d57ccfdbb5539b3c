"""Every native call of one model, on its own thread: pending memory operations first, then the call.

Rule: operations decided between two awaits are done in that order before whatever is asked next, so a slot
that changed hands is clean by the time anybody computes in it, exports it or restores into it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import trio

from erllama.errors import ErllamaError
from erllama.types import PartKind

from .memory_ops import apply_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from erllama.backend import Backend, OptionalBackend, Step, StepResult

    from .burst import Burst
    from .memory_ops import MemoryOp
    from .runner import Announce, Runner

T = TypeVar("T")
Range = tuple[int, int]
log = logging.getLogger("erllama.engine")


class Saved(NamedTuple):
    """A part that was exported from `block`, and which of its positions are wanted of it."""

    block: Range
    wanted: Range
    data: memoryview
    kind: PartKind


class Imported(NamedTuple):
    """How many parts are in memory now, and why the one behind them is not, if there is one."""

    n: int
    refusal: str | None


class ModelThread:
    """The calls of one backend. Cancellation of any: a running step is aborted, then waited for."""

    def __init__(self, backend: Backend, runner: Runner, take_ops: Callable[[], list[MemoryOp]]) -> None:
        self._backend = cast("OptionalBackend", backend)
        self._runner = runner
        self._take_ops = take_ops
        self._broken: ErllamaError | None = None
        self._burst: Burst | None = None  # the steps that run

    @property
    def is_broken(self) -> bool:
        """A memory operation failed: nobody knows what memory holds until it is rebuilt."""
        return self._broken is not None

    async def _run(self, call: Callable[..., T], *args: Any, burst: Burst | None = None) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()  # before operations are taken that would be lost
        self.pause()  # nobody waits for more than the step that runs
        self._burst = burst
        ops = self._take_ops()

        def with_ops() -> T:
            if self._broken is not None:
                raise self._broken
            try:
                apply_ops(self._backend, ops)
            except ErllamaError as error:
                self._broken = error
                raise
            return call(*args)

        return await self._runner.run(with_ops, on_cancel=self.abort)

    async def step(self, step: Step) -> StepResult:
        """Compute a step. Raises: what the backend raises; the context must be rebuilt then."""
        self._clear_abort()
        return await self._run(self._backend.step, step)

    async def steps(self, first: Step, burst: Burst) -> StepResult:
        """Compute a step and those that follow it; the result of the last. Raises: as `step`.

        `burst` has got the results of the others before this returns or raises.
        """
        announce = self._runner.announce()
        assert announce is not None
        self._clear_abort()
        try:
            return await self._run(self._steps, first, burst, announce, burst=burst)
        finally:
            self.pause()
            self._burst = None
            burst.check()

    def _steps(self, step: Step, burst: Burst, announce: Announce) -> StepResult:
        while True:
            result = self._backend.step(step)
            following = burst.following(step, result)
            if following is None:
                return result
            # Right before the next step: its native call is the next to give the GIL to who is woken here.
            announce(burst.arrived, result)
            step = following

    @property
    def runs_beside(self) -> bool:
        """Whether the event loop runs on while a call does."""
        return self._runner.announce() is not None

    def pause(self) -> None:
        """Let the running step be the last of its burst. Trio's thread."""
        if self._burst is not None:
            self._burst.stop()

    def _clear_abort(self) -> None:
        # Here and not in the call: a cancel between here and there must not be forgotten.
        clear_abort: Callable[[], None] = getattr(self._backend, "clear_abort", lambda: None)
        clear_abort()

    async def cut_to_known(self, targets: list[tuple[int, int]]) -> list[int]:
        """Cut each (slot, most) to what memory surely holds and is wanted; returns what was kept."""
        return await self._run(self._cut_to_known, targets)

    def _cut_to_known(self, targets: list[tuple[int, int]]) -> list[int]:
        n_kv: Callable[[int], int] = getattr(self._backend, "n_kv", lambda _: 0)
        kept = []
        for slot, most in targets:
            n = min(n_kv(slot), most)
            if n and not self._backend.cut(slot, n):
                n = 0
            if not n:
                self._backend.cut(slot, 0)
            kept.append(n)
        return kept

    @property
    def can_rebuild(self) -> bool:
        """Whether the backend can make a fresh context."""
        return getattr(self._backend, "rebuild", None) is not None

    async def rebuild(self) -> None:
        """A fresh, empty context; pending operations are void with the old one."""
        self._take_ops()
        await self._runner.run(self._rebuild)

    def _rebuild(self) -> None:
        self._backend.rebuild()
        self._broken = None

    async def export_bytes(self, slot: int, start: int, end: int, part: PartKind = PartKind.BASE) -> int:
        """How large a part of [start, end) of a slot is when exported; 0 if it is not all there."""
        return await self._run(self._backend.export_bytes, slot, start, end, part)

    async def export(
        self, slot: int, start: int, end: int, into: memoryview, part: PartKind = PartKind.BASE
    ) -> int:
        """Write a part of [start, end) of a slot into a buffer; returns bytes written."""
        return await self._run(self._backend.export, slot, start, end, into, part)

    async def import_(self, slot: int, parts: Sequence[Saved]) -> Imported:
        """Add parts to a slot, in order, up to the first that does not arrive.

        Raises: `ErllamaError` where memory could not be made ready; nothing was imported then.
        """
        return await self._run(self._import, slot, parts)

    def _import(self, slot: int, parts: Sequence[Saved]) -> Imported:
        for n, (block, wanted, data, kind) in enumerate(parts):
            try:
                if not self._backend.import_(slot, block, wanted, data, kind):
                    return Imported(n, "llama.cpp took none of it")
            except ErllamaError as error:
                # As text: who keeps the exception keeps its frames, and with them the buffers.
                return Imported(n, str(error))
        return Imported(len(parts), None)

    async def is_at(self, slot: int, n: int) -> bool:
        """Whether a slot can go on at `n`."""
        return await self._run(self._backend.is_at, slot, n)

    async def probe_cold(self) -> str | None:
        """Why a warm run would not give the bits of a cold one; None if it does. Memory must be empty."""
        self._clear_abort()
        return await self._run(self._backend.probe_cold)

    def abort(self) -> None:
        """Make the running step end early, and be the last. No effect where the backend cannot."""
        self.pause()
        abort: Callable[[], None] | None = getattr(self._backend, "abort", None)
        if abort is None:
            return
        try:
            abort()
        except Exception:  # a backend's bug here must not come out of somebody's cancel
            log.exception("%r could not be told to abort", self._backend)
