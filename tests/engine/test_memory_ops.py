"""Memory operations: in order, before the next call, never lost; a failed one stops all until a rebuild."""

from __future__ import annotations

import pytest
import trio

from erllama.backend import Step
from erllama.engine.memory_ops import Cut, MemoryOp, Share, apply_ops
from erllama.engine.model_thread import ModelThread
from erllama.engine.runner import InlineRunner, ThreadRunner
from erllama.errors import EngineError
from erllama.kvcache.arena import Arena
from erllama.testing import FakeBackend
from erllama.types import PartKind


class Spy(FakeBackend):
    """Records what is asked of its memory."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.refuses = refuses

    def cut(self, slot: int, n_keep: int) -> bool:
        """A record, and perhaps a refusal."""
        self.calls.append(f"cut {slot} {n_keep}")
        return not self.refuses

    def share(self, src: int, dst: int, start: int, end: int) -> None:
        """A record."""
        self.calls.append(f"share {src} {dst} {start} {end}")

    def export_bytes(self, slot: int, start: int, end: int, part: PartKind = PartKind.BASE) -> int:
        """A record."""
        self.calls.append(f"size {slot}")
        return 0


OPS: list[MemoryOp] = [Cut(1, 5), Share(1, 0, 0, 5), Cut(1, 0), Share(0, 1, 0, 2)]
WORDS = ["cut 1 5", "share 1 0 0 5", "cut 1 0", "share 0 1 0 2"]


def test_operations_are_done_in_order() -> None:
    """Cutting before sharing is not sharing before cutting."""
    spy = Spy()
    apply_ops(spy, OPS)
    assert spy.calls == WORDS


async def test_they_come_before_the_next_call_and_once() -> None:
    """What was decided is done before whatever is asked next, and is then forgotten."""
    spy, pending = Spy(), [OPS, []]
    thread = ModelThread(spy, InlineRunner(), lambda: pending.pop(0))
    await thread.export_bytes(7, 0, 1)
    await thread.export_bytes(8, 0, 1)
    assert spy.calls == [*WORDS, "size 7", "size 8"]


async def test_a_cancelled_call_loses_no_operation() -> None:
    """Who is cancelled before the call takes nothing with it: the next caller's memory is right."""
    spy = Spy()
    pending = list(OPS)

    def take() -> list[MemoryOp]:
        taken, pending[:] = list(pending), []
        return taken

    thread = ModelThread(spy, InlineRunner(), take)
    with trio.CancelScope() as scope:
        scope.cancel()
        await thread.export_bytes(7, 0, 1)
    assert spy.calls == []
    await thread.export_bytes(8, 0, 1)
    assert spy.calls == [*WORDS, "size 8"]


async def test_a_refused_operation_stops_every_call_until_the_rebuild() -> None:
    """Nobody computes in, exports from or restores into memory that nobody knows any more."""
    spy = Spy(refuses=True)
    pending: list[MemoryOp] = [Cut(0, 3)]

    def take() -> list[MemoryOp]:
        taken, pending[:] = list(pending), []
        return taken

    thread = ModelThread(spy, InlineRunner(), take)
    assert not thread.is_broken
    for call in (thread.export_bytes(0, 0, 1), thread.step(Step(())), thread.cut_to_known([(0, 1)])):
        with pytest.raises(EngineError, match="slot 0 could not be cut to 3"):
            await call
        assert thread.is_broken
    assert spy.calls == ["cut 0 3"]
    pending[:] = OPS
    await thread.rebuild()
    assert (thread.is_broken, pending, spy.n_rebuilt) == (False, [], 1)
    assert await thread.export_bytes(0, 0, 1) == 0


async def test_the_thread_lets_go_of_a_buffer_before_the_caller_goes_on() -> None:
    """A pooled buffer released right after the call goes back to the pool: nothing still looks at it."""
    runner, arena = ThreadRunner("test"), Arena(1 << 20)
    seen: list[int] = []
    try:
        for _ in range(300):
            buffer = arena.try_take(4096)
            assert buffer is not None
            await runner.run(lambda view: seen.append(len(view)), buffer.view.toreadonly())
            buffer.release()
    finally:
        runner.close()
    assert len(seen) == 300
    assert arena.statistics().lost == 0
