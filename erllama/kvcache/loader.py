"""Reading parts for those who hold a lease: from RAM at once, from a file tier by one flight for all who ask.

Whatever goes wrong is a miss: the caller gets None, the part is forgotten and its file quarantined.

What is read from a file for the first time passes through a buffer that the next block uses again. Read
a second time, it stays in RAM as a copy, if another used buffer is there to go on with: memory that this
process never touched is handed out by the system more slowly (0.4 GB/s) than files are read (2 to 4 GB/s).
So buffers are touched before anybody waits for them: a few at the start, and one for each copy that could
not be kept (`run`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import trio

from .arena import class_bytes
from .catalog import RamPart
from .header import Damaged
from .parts import FREE, RAM

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .arena import Buffer
    from .catalog import Catalog
    from .meta import NodeMeta
    from .recover import PartId
    from .room import Holders, RamRoom
    from .runner import Runner
    from .stats import Counters
    from .tierset import TierSet, TierState

log = logging.getLogger(__name__)
N_REMEMBERED: Final = 4096  # parts read lately: a million tokens in blocks of 256
N_READY: Final = 4  # buffers of each size: one imported from, two read into, one on its way back
READY_BYTES: Final = 64 << 20  # in all, at most


class _Flight:
    """One read going on, and how many others wait for it."""

    __slots__ = ("done", "n_waiting")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.n_waiting = 0


class Loader:
    """Loads parts into pooled buffers."""

    def __init__(
        self, catalog: Catalog, tiers: TierSet, room: RamRoom, *, run: Runner, counters: Counters
    ) -> None:
        self._catalog, self._tiers, self._room = catalog, tiers, room
        self._run, self._counters = run, counters
        self._flights: dict[PartId, _Flight] = {}
        self._read_lately: OrderedDict[PartId, None] = OrderedDict()
        self._wanted = Counter[int]()  # buffers to touch, by size
        self._wants_more = trio.Event()

    @property
    def holders(self) -> Holders:
        """Who is reading."""
        return self._room.holders

    @property
    def n_in_flight(self) -> int:
        """Reads going on."""
        return len(self._flights)

    async def run(self) -> None:
        """Touch buffers until cancelled: a few of the sizes that stored files have, then what is wanted."""
        if list(self._tiers):
            await self._make_some_ready()
        while True:
            await self._wants_more.wait()
            self._wants_more = trio.Event()
            for size, n in Counter(self._wanted).items():
                self._wanted.subtract({size: n})
                await self._make_ready(size, n)

    async def _make_some_ready(self) -> None:
        left = min(READY_BYTES, self._catalog.arena.max_bytes // 8)
        for size in await self._run(_file_sizes, self._catalog.tree.parts.columns()):
            if size * N_READY <= left:
                left -= size * N_READY
                await self._make_ready(size, N_READY)

    async def _make_ready(self, size: int, n: int) -> None:
        """Up to `n` more idle buffers that were used before: one at a time, none that others may need."""
        for _ in range(n):
            try:
                buffer = self._catalog.arena.try_take(size, N_READY * size, fresh=True)
            except OSError as why:  # no more addresses; nobody is waiting for this
                log.debug("no memory to make ready: %s", why)
                return
            if buffer is None:
                return
            try:
                await self._run(_touch, buffer.view)
            finally:
                buffer.release()

    def _want(self, n_bytes: int) -> None:
        self._wanted[class_bytes(n_bytes)] += 1
        self._wants_more.set()

    async def load(self, ref: PartId, same: Callable[[NodeMeta], bool]) -> Buffer | None:
        """The part's payload in a buffer retained for the caller, who releases it; None is a miss.

        `same` compares the head found with what the caller expects: ids, or text.
        Cancellation: a read in flight is finished and kept for the others who wait for it.
        """
        catalog = self._catalog
        while True:
            part = catalog.part_of(ref)
            if not part or not catalog.is_usable(part):
                return None
            copy = catalog.ram.get(part)
            if copy is not None:
                return self._verified(ref, copy, same)
            flight = self._flights.get(ref)
            if flight is None:
                break
            self._counters.loads_shared += 1
            flight.n_waiting += 1
            await flight.done.wait()
        self._flights[ref] = flight = _Flight()
        try:
            return await self._read(ref, part, same, flight)
        finally:
            del self._flights[ref]
            flight.done.set()

    def _verified(self, ref: PartId, copy: RamPart, same: Callable[[NodeMeta], bool]) -> Buffer | None:
        if not same(copy.meta):
            self._tiers.damaged(ref, Damaged("tokens", "not those that were asked for"))
            return None
        copy.buffer.retain()
        return copy.buffer

    async def _read(
        self, ref: PartId, part: int, same: Callable[[NodeMeta], bool], flight: _Flight
    ) -> Buffer | None:
        catalog, parts = self._catalog, self._catalog.tree.parts
        state = self._tiers.get(parts.home[part])
        buffer = await self._room.take(int(parts.size[part]))
        if buffer is None:
            self._counters.loads_no_room += 1
            return None
        kept = False
        try:
            copy = await self._read_into(state, ref, buffer)
            part = catalog.part_of(ref)  # it may have been dropped while it was read
            if copy is None or not part:
                return None
            if part not in catalog.ram and (flight.n_waiting or self._is_worth_keeping(ref, buffer)):
                catalog.keep_copy(part, copy)
                kept = True
            verified = self._verified(ref, copy, same)  # only now: what nobody looks at may be pushed out
            if kept and not self._room.fit() and part in catalog.ram:
                catalog.drop_copy(part)
            return verified
        finally:
            if not kept:
                buffer.release()

    def _is_worth_keeping(self, ref: PartId, buffer: Buffer) -> bool:
        if not self._was_read_lately(ref):
            return False
        if self._catalog.arena.is_warm(buffer.n_bytes):
            return True
        self._want(buffer.n_bytes)
        return False

    def _was_read_lately(self, ref: PartId) -> bool:
        """Whether this is not the first time; it is remembered from now on."""
        again = ref in self._read_lately
        self._read_lately[ref] = None
        self._read_lately.move_to_end(ref)
        if len(self._read_lately) > N_REMEMBERED:
            self._read_lately.popitem(last=False)
        return again

    async def _read_into(self, state: TierState, ref: PartId, buffer: Buffer) -> RamPart | None:
        began = time.perf_counter_ns()
        try:
            _, meta = await self._run(state.tier.read_part, *ref, buffer.view)
        except Damaged as damage:
            self._tiers.damaged(ref, damage)
            return None
        except OSError as broken:
            self._tiers.fail(state, broken)
            return None
        self._counters.load_total_ns += time.perf_counter_ns() - began
        self._counters.bytes_read[state.tier.name] += buffer.n_bytes
        return RamPart(buffer, meta)


def _file_sizes(columns: dict[str, NDArray[Any]]) -> list[int]:
    """Buffer sizes that parts on file tiers need, most common first."""
    on_file = columns["size"][~np.isin(columns["home"], (RAM, FREE))]
    sizes = Counter[int]()
    for size, n in zip(*np.unique(on_file, return_counts=True), strict=True):
        sizes[class_bytes(int(size))] += int(n)
    return [size for size, _ in sizes.most_common() if size]


def _touch(view: memoryview) -> None:
    """Have the system hand out the memory behind `view`. A read does it without holding the interpreter."""
    with (
        contextlib.suppress(OSError),
        open("/dev/zero", "rb", buffering=0) as zeros,
    ):  # else: slower first reads
        done = 0
        while done < len(view):
            with view[done:] as rest:
                done += zeros.readinto(rest) or len(view)
