"""Publishing on file tiers behind the requests: a queue bounded in bytes, a few workers, groups of parts.

Rule 1: a part being written stays readable in RAM; once it is published its home changes (announce).
Rule 2: parents before children, bases before what is beside them: a job is ready when the part it needs is on
        the tier or earlier in the same group.
Rule 3: whatever happens to a job, its part stops being busy and its bytes leave the queue exactly once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from .catalog import FileRef
from .files import NO_SPACE, READ_ONLY, TOO_LARGE
from .kinds import Refusal
from .parts import RAM
from .publish import Outcome, Outgoing
from .root import TierBusy, TierFull

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .arena import Buffer
    from .catalog import Catalog
    from .evictor import Evictor
    from .recover import PartId
    from .runner import Runner
    from .stats import Counters
    from .tierset import TierSet, TierState

log = logging.getLogger(__name__)
GROUP_PARTS = 64
GROUP_BYTES = 512 << 20


@dataclass(slots=True, eq=False)
class Job:
    """One part on its way to a file tier. `outcome` is True when it is there, a refusal when it is not."""

    ref: PartId
    slot: int
    n_bytes: int
    done: trio.Event = field(default_factory=trio.Event)
    outcome: Refusal | bool | None = None

    def __repr__(self) -> str:
        state = "pending" if self.outcome is None else self.outcome
        return f"<Job {self.ref[0].hex()[:12]} {self.ref[1].name.lower()}: {state}>"

    async def wait(self) -> bool:
        """Wait until the part is durable or refused; True if durable. Cancellation: leaves nothing behind."""
        await self.done.wait()
        return self.outcome is True


class Writer:
    """The writer pool. `run_worker` is one worker; the store starts as many as it is allowed."""

    def __init__(
        self,
        catalog: Catalog,
        tiers: TierSet,
        evictor: Evictor,
        *,
        run: Runner,
        counters: Counters,
        max_bytes: int,
    ) -> None:
        self._catalog, self._tiers, self._evictor = catalog, tiers, evictor
        self._run, self._counters = run, counters
        self.max_bytes = max_bytes
        self.queued_bytes = 0
        self._queue: dict[PartId, Job] = {}
        self._flying: dict[PartId, Job] = {}
        self._stopped = False
        self._wake = trio.lowlevel.ParkingLot()
        self._idle = trio.lowlevel.ParkingLot()

    @property
    def n_queued(self) -> int:
        """Parts waiting or being written."""
        return len(self._queue) + len(self._flying)

    def has_room(self, n_bytes: int) -> bool:
        """Whether the queue takes so many more bytes; an empty queue takes anything."""
        return not self.n_queued or self.queued_bytes + n_bytes <= self.max_bytes

    def pending(self, ref: PartId) -> Job | None:
        """The job of a part, if it is on its way."""
        return self._queue.get(ref) or self._flying.get(ref)

    def submit(self, row: int, slot: int) -> list[Job]:
        """Queue what must be written so that a node's RAM parts become durable: its ancestors' first.

        The caller has checked `has_room`. Returns the jobs of the node itself.
        """
        tree, jobs = self._catalog.tree, []
        for node in tree.path(row):
            # The base first: a window or state without its base is worth nothing.
            parts = sorted(tree.part_rows(node), key=tree.parts.is_base, reverse=True)
            jobs = [self._submit_part(part, slot) for part in parts if tree.parts.home[part] == RAM]
        self._wake.unpark_all()
        return jobs

    def _submit_part(self, part: int, slot: int) -> Job:
        tree = self._catalog.tree
        ref = tree.names.name(tree.parts.node[part]), tree.parts.kind(part)
        job = self.pending(ref)
        if job is None:
            job = self._queue[ref] = Job(ref, slot, int(tree.parts.size[part]))
            self._catalog.busy[ref] += 1
            self.queued_bytes += job.n_bytes
        return job

    async def flush(self) -> None:
        """Wait until nothing is queued or being written, or nobody is left to write it.

        Cancellation: leaves the queue as it is.
        """
        while self.n_queued and not self._stopped:
            await self._idle.park()

    async def run_worker(self) -> None:
        """Write groups for ever. Cancellation: a group being written is finished and announced first."""
        try:
            while True:
                group = self._next_group()
                if not group:
                    await self._wake.park()
                    continue
                try:
                    await self._write_group(self._tiers.get(group[0].slot), group)
                finally:
                    for job in group:
                        self._finish(job, Refusal.CLOSED)
        finally:
            # Workers end together, on cancellation or when one of them fails: nothing will be written now.
            self._stopped = True
            self._idle.unpark_all()

    # --- choosing ---------------------------------------------------------------------------------

    def _next_group(self) -> list[Job]:
        """Jobs that may be written together now; those that never may are refused on the way."""
        while True:
            n_before = len(self._queue)
            group = self._choose()
            if group or len(self._queue) == n_before:
                return group  # otherwise refusals have decided about others: look again

    def _choose(self) -> list[Job]:
        group: list[Job] = []
        n_bytes = 0
        waiting = {*self._queue, *self._flying}
        for job in list(self._queue.values()):
            if group and (job.slot != group[0].slot or n_bytes + job.n_bytes > GROUP_BYTES):
                continue
            ready = self._is_ready(job, group, waiting)
            if ready is None:
                self._flying[job.ref] = self._queue.pop(job.ref)
                self._finish(job, Refusal.NO_PARENT)
            elif ready:
                group.append(job)
                n_bytes += job.n_bytes
                if len(group) == GROUP_PARTS:
                    break
        for job in group:
            self._flying[job.ref] = self._queue.pop(job.ref)
        return group

    def _is_ready(self, job: Job, group: Sequence[Job], waiting: set[PartId]) -> bool | None:
        """Whether a job may be written now; None if it never may: it, or what it needs, is gone."""
        catalog = self._catalog
        part = catalog.part_of(job.ref)
        if not part or job.ref in catalog.abandoned:
            return None
        needed = catalog.needed_part(part)
        if not needed or catalog.tree.parts.home[needed] == job.slot:
            return True
        ref = catalog.ref_of(needed)
        if any(other.ref == ref for other in group):
            return True
        return False if ref in waiting else None

    # --- writing ----------------------------------------------------------------------------------

    async def _write_group(self, state: TierState, group: list[Job]) -> None:
        """Publish a group; on lack of room evict once, then try in halves: some may fit where all do not."""
        await self._tiers.empty_trash()
        live = [job for job in group if self._is_wanted(job)]  # after the last await before the publish
        refused = await self._try_write(state, live)
        if refused is Refusal.NO_ROOM and len(live) > 1:
            half = len(live) // 2
            await self._write_group(state, live[:half])
            await self._write_group(state, live[half:])
            return
        for job in group:
            self._finish(job, refused or Refusal.ABANDONED)  # those that were written have finished

    def _is_wanted(self, job: Job) -> bool:
        """Whether a job's part is still in RAM, as it was when the job was made."""
        catalog = self._catalog
        return job.ref not in catalog.abandoned and catalog.part_of(job.ref) in catalog.ram

    async def _try_write(self, state: TierState, jobs: list[Job]) -> Refusal | None:
        if not jobs:
            return None
        if not state.writable:
            return Refusal.TIER_OFF
        catalog, tree = self._catalog, self._catalog.tree
        ceiling = max(
            catalog.ceiling(tree.shape[row], tree.start[row], tree.n_tokens[row], job.n_bytes)
            for job in jobs
            for row in [tree.parts.node[catalog.part_of(job.ref)]]
        )
        buffers: list[Buffer] = []
        outgoing = self._outgoing(jobs, buffers)
        try:
            for may_evict in (True, False):
                await state.wait_publishable()
                try:
                    outcomes = await self._run(state.tier.publish, outgoing)
                except (TierFull, OSError) as no:
                    refused = await self._no_room(state, outgoing, no, may_evict, ceiling)
                    if refused is not None:
                        return refused
                else:
                    self._announce(state, jobs, outcomes)
                    return None
        except TierBusy:
            log.warning("tier %s: its lock was not to be had", state.tier.name)
        finally:
            for buffer in buffers:
                buffer.release()
        return Refusal.NO_ROOM

    async def _no_room(
        self,
        state: TierState,
        outgoing: Sequence[Outgoing],
        error: TierFull | OSError,
        may_evict: bool,
        ceiling: float,
    ) -> Refusal | None:
        """After a publish that failed: None to try again, otherwise why not."""
        n_bytes = sum(part.file_bytes for part in outgoing)
        if isinstance(error, TierFull):
            if n_bytes > state.tier.options.max_bytes:
                return Refusal.TOO_LARGE if len(outgoing) == 1 else Refusal.NO_ROOM
            made = may_evict and await self._evictor.make_room(state, n_bytes, ceiling=ceiling)
            return None if made else Refusal.NO_ROOM
        if error.errno in TOO_LARGE and len(outgoing) == 1:
            return Refusal.TOO_LARGE
        state.tier.root.distrust()  # some may have been linked before the error: the next look adopts them
        if error.errno in NO_SPACE:
            # The device is full before the budget is: evict as much as we want to write, once.
            may_evict &= error.errno not in TOO_LARGE
            evicted = await self._evictor.evict(state, n_bytes, force=False) if may_evict else (0, 0)
            return None if evicted[0] else Refusal.NO_ROOM
        state.tier.root.read_only |= error.errno in READ_ONLY
        self._tiers.fail(state, error)
        return Refusal.TIER_OFF

    def _outgoing(self, jobs: Sequence[Job], buffers: list[Buffer]) -> list[Outgoing]:
        catalog, outgoing = self._catalog, []
        for job in jobs:
            part = catalog.part_of(job.ref)
            copy = catalog.ram[part]
            copy.buffer.retain()  # the catalog may drop the part while a thread reads its bytes
            buffers.append(copy.buffer)
            outgoing.append(
                Outgoing(
                    needs=catalog.ref_of(needed) if (needed := catalog.needed_part(part)) else None,
                    meta=copy.meta,
                    kind=job.ref[1],
                    payload=copy.buffer.view,
                    wanted=_Wanted(catalog, job.ref),
                )
            )
        return outgoing

    def _announce(self, state: TierState, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> None:
        for job, outcome in zip(jobs, outcomes, strict=True):
            self._counters.outcomes[outcome.value] += 1
            if outcome in (Outcome.PUBLISHED, Outcome.REPLACED):
                self._counters.bytes_written[state.tier.name] += job.n_bytes
            part = self._catalog.part_of(job.ref)
            if not outcome.is_there:
                gone = Refusal.NO_PARENT if outcome is Outcome.NO_PARENT else Refusal.ABANDONED
                self._finish(job, gone)
            elif not part or job.ref in self._catalog.abandoned:
                self._tiers.discard([FileRef(state.slot, *job.ref)])
                self._finish(job, Refusal.ABANDONED)
            else:
                self._catalog.announce(part, state.slot)
                self._finish(job, True)

    def _finish(self, job: Job, outcome: Refusal | bool) -> None:
        if self._flying.pop(job.ref, None) is None:
            return
        busy = self._catalog.busy
        busy[job.ref] -= 1
        if not busy[job.ref]:
            del busy[job.ref]
            self._catalog.abandoned.discard(job.ref)
        self.queued_bytes -= job.n_bytes
        if isinstance(outcome, Refusal):
            self._counters.refusals[outcome] += 1
            log.info("part %s not published: %s", job.ref[0].hex()[:16], outcome)
        job.outcome = outcome
        job.done.set()
        self._wake.unpark_all()
        if not self.n_queued:
            self._idle.unpark_all()


class _Wanted:
    """Asked from the worker thread right before the link: one look into a set."""

    def __init__(self, catalog: Catalog, ref: PartId) -> None:
        self._abandoned, self._ref = catalog.abandoned, ref

    def __call__(self) -> bool:
        return self._ref not in self._abandoned
