"""Pooled memory for payloads: buffers come from here, and go back to be used again.

Copying into fresh memory runs at page-fault speed, into used memory at memcpy speed, so a returned buffer
keeps its pages. Sizes are rounded up to classes an eighth apart (waste at most 12.5 %), so that the blocks of
one model, all equally large, reuse each other's pages exactly.

Rule 1: the budget covers every byte held, in use or idle, and is checked before memory is asked for.
Rule 2: a buffer that somebody still looks at is never given to anybody else. If a view outlives its owner's
        release, the memory leaves the pool (and the budget) with it, and is counted.
Thread: any; take and release hold a lock for a few instructions.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

PAGE: Final = mmap.PAGESIZE
HUGE_PAGE: Final = 2 << 20


def class_bytes(n_bytes: int) -> int:
    """The size of the buffer that a request for `n_bytes` gets."""
    if n_bytes <= PAGE:
        return PAGE if n_bytes else 0
    step = max(PAGE, 1 << (n_bytes - 1).bit_length() - 4)
    return -(-n_bytes // step) * step


class Buffer:
    """`n_bytes` of pooled memory, shared by whoever retains it. `view` dies with the last `release()`.

    One of no bytes has no memory: a part may be empty.
    """

    __slots__ = ("_arena", "_memory", "_n_users", "n_bytes", "view")

    def __init__(self, arena: Arena, memory: mmap.mmap | None, n_bytes: int) -> None:
        self._arena = arena
        self._memory = memory
        self._n_users = 1
        self.n_bytes = n_bytes
        self.view = memoryview(bytearray() if memory is None else memory)[:n_bytes]

    @property
    def held_bytes(self) -> int:
        """What the buffer takes from the budget."""
        return 0 if self._memory is None else len(self._memory)

    @property
    def is_shared(self) -> bool:
        """Whether it has more than one user."""
        return self._n_users > 1

    def retain(self) -> None:
        """One more user; each calls `release` once."""
        assert self._n_users > 0, "a released buffer cannot be retained"
        self._n_users += 1

    def release(self) -> None:
        """One user less; the last one gives the memory back. More calls than users do nothing."""
        self._n_users = max(0, self._n_users - 1)
        if self._n_users or self._memory is None:
            return
        memory, self._memory = self._memory, None
        try:
            self.view.release()
            # Slices of the view are invisible to it, but not to the mapping: it refuses to be resized.
            memory.resize(len(memory))
        except BufferError:
            self._arena.lose(memory)
            return
        except SystemError:  # no mremap(2) here (macOS): the view's own count has to do
            pass
        self._arena.give_back(memory)

    def __repr__(self) -> str:
        return f"<Buffer {self.n_bytes} B{' released' if self._memory is None else ''}>"


def _map(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: 4 KiB ones do
            memory.madvise(mmap.MADV_HUGEPAGE)  # measured: memcpy 1.25 ×, reads 1.1 × as fast
    return memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaStatistics:
    """Bytes held by users and by the pool; buffers reused, made, lost (a view outlived its release)."""

    max_bytes: int
    used_bytes: int
    idle_bytes: int
    reused: int
    made: int
    lost: int


class Arena:
    """Hands out buffers within `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._extra = 0  # bytes other owners charge to the same budget (node heads, the index)
        self._used = 0
        self._idle_bytes = 0
        self._idle: OrderedDict[int, list[mmap.mmap]] = OrderedDict()
        self._reused = self._made = self._lost = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Arena {self._used + self._extra} of {self._max} B used, {self._idle_bytes} idle>"

    @property
    def max_bytes(self) -> int:
        """The budget."""
        return self._max

    @property
    def used_bytes(self) -> int:
        """Bytes in users' hands and charged by other owners; idle buffers do not count."""
        return self._used + self._extra

    def charge(self, n_bytes: int) -> None:
        """Count bytes that live elsewhere against the budget; negative to take them off."""
        with self._lock:
            self._extra += n_bytes

    def shortfall(self, n_bytes: int, spare: int = 0) -> int:
        """How many bytes users must give back before `n_bytes` more, and `spare`, fit; 0 if they fit now."""
        return max(0, self.used_bytes + class_bytes(n_bytes) + spare - self._max)

    def try_take(self, n_bytes: int, spare: int = 0, *, fresh: bool = False) -> Buffer | None:
        """A buffer, or None if the budget has no room for it and `spare` bytes more.

        `fresh`: none that was used before, and only where it fits beside those that are idle.
        Raises: OSError where the system has no more memory.
        """
        size = class_bytes(n_bytes)
        with self._lock:
            if self._used + self._extra + size + max(spare, self._idle_bytes if fresh else 0) > self._max:
                return None
            if not size:
                return Buffer(self, None, 0)
            stack = self._idle.get(size)
            if stack and not fresh:
                memory = stack.pop()
                self._idle_bytes -= size
                self._reused += 1
            else:
                self._shrink_idle(self._max - self._used - self._extra - size)
                memory = _map(size)
                self._made += 1
            self._used += size
        return Buffer(self, memory, n_bytes)

    def is_warm(self, n_bytes: int) -> bool:
        """Whether the next buffer of that size will be one that was used before.

        Either one is idle, or the budget is spent and somebody's will have to go.
        """
        size = class_bytes(n_bytes)
        with self._lock:
            held = self._used + self._extra + self._idle_bytes
            return bool(self._idle.get(size)) or held + size > self._max

    def give_back(self, memory: mmap.mmap) -> None:
        """Take a buffer's memory into the pool; only `Buffer.release` calls this."""
        with self._lock:
            self._used -= len(memory)
            self._idle.setdefault(len(memory), []).append(memory)
            self._idle.move_to_end(len(memory))
            self._idle_bytes += len(memory)
            self._shrink_idle(self._max - self._used - self._extra)

    def lose(self, memory: mmap.mmap) -> None:
        """Forget memory that somebody still looks at; only `Buffer.release` calls this."""
        with self._lock:
            self._used -= len(memory)
            self._lost += 1

    def trim(self) -> int:
        """Give all idle memory back to the system; returns how many bytes that were."""
        with self._lock:
            before = self._idle_bytes
            self._shrink_idle(0)
            return before

    def _shrink_idle(self, limit: int) -> None:
        """Unmap idle buffers, least recently used classes first, until at most `limit` bytes idle."""
        while self._idle_bytes > max(limit, 0):
            size, stack = next(iter(self._idle.items()))
            if not stack:
                del self._idle[size]
                continue
            stack.pop().close()
            self._idle_bytes -= size

    def statistics(self) -> ArenaStatistics:
        """Sizes and counters."""
        return ArenaStatistics(
            max_bytes=self._max,
            used_bytes=self.used_bytes,
            idle_bytes=self._idle_bytes,
            reused=self._reused,
            made=self._made,
            lost=self._lost,
        )
