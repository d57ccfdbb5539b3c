"""The actor of one model: the only writer of its sequences.

One turn of the loop: sweep out who was cancelled, admit who fits, plan a step, run it on the model's
own thread, apply the result, deliver. Where nobody waits, steps follow each other there (`burst`). Everything
between two awaits is sync, so clients may submit and cancel at any moment, also while a step runs: they only
ever touch the queue and flags.

Rule 1: a step in flight is aborted early only if every row of it belongs to cancelled requests.
Rule 2: after an abort each sequence is repaired from what memory really holds; the context is rebuilt
only after a time-out, a fatal code or an exception, and then everybody who runs fails, nobody who waits.
Rule 3: a full cache is never an error to a client: the youngest sequence waits and is computed again.
"""

from __future__ import annotations

import copy
import logging
import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import trio

from erllama.backend import Backend, BackendFacts, Row, Sampled, Step, StepResult, StepStatus
from erllama.errors import (
    DecodeAborted,
    DecodeFailed,
    DecodeTimeout,
    EngineError,
    EngineReset,
    ErllamaError,
    NoLogits,
    NotLoaded,
    NotSupported,
    SeqCapacity,
    StickyBusy,
)

from .admission import Lanes
from .burst import Burst, n_steps
from .cold import ColdPromise, cold_piece
from .hits import HitBook
from .model_thread import ModelThread
from .pace import Pace
from .parent_hint import ParentHint
from .planner import PIECE, Chunks, Limits, Share, lacks_cells, plan_step
from .recovery import Recovery
from .resident import Resident
from .resume import Resumer
from .saver import Saver
from .sessions import history_of, session_of
from .state import Phase
from .statistics import ActorStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from erllama.options import ContextOptions
    from erllama.types import FinishReason

    from .cache_link import CacheLink
    from .runner import Runner
    from .sequence import Sequence
    from .sessions import Session

log = logging.getLogger("erllama.engine")
SAVE_PATIENCE_S = 1.0  # how long others stand still so that what a resident holds can be saved

UNASKED_ABORTS = 3  # in a row; then the context is rebuilt


class Room(NamedTuple):
    """Who can go on, and how many cells they may take; None: as many as they like."""

    ready: list[Sequence]
    n_cells: int | None


class Actor:
    """Runs the requests of one opened backend."""

    def __init__(
        self,
        model_id: str,
        backend: Backend,
        facts: BackendFacts,
        options: ContextOptions,
        runner: Runner,
        cache: CacheLink | None = None,
        cold: ColdPromise | None = None,
    ) -> None:
        self.model_id = model_id
        self.facts = facts
        self._options = options
        self._is_eog: Callable[[int], bool] = getattr(backend, "is_eog", lambda _: False)
        self._piece: Callable[[int], bytes] = getattr(backend, "piece", lambda _: b"")
        self._lanes = Lanes(facts, self._save)
        self._thread = ModelThread(backend, runner, self._lanes.take_ops)
        self._recovery = Recovery(model_id, self._lanes, self._thread, cache)
        self.cache = cache  # whose KV this is, and where it is kept
        self.cold = cold or ColdPromise(backend, facts)
        self._saver = self._resumer = self._hint = None
        if cache is not None and facts.layout is not None:
            self._saver = Saver(cache, facts, self._lanes, self._thread, self.wake)
            self._resumer = Resumer(cache, facts, self._lanes, self._thread, self._saver.wait_for_one)
            self._hint = ParentHint(cache, self._saver)
        self.hits = HitBook(
            cache,
            None if self._saver is None else self._saver.saved_names,
            self._piece,
            layout=facts.layout,
        )
        # Where prefill must stop because a state exists only there and is kept.
        self._boundary = cache.policy.block_tokens if cache is not None and self._lanes.has_state else None
        self._chunks = Chunks.of(options.prefill_chunk_size, facts.n_batch)
        self._pace = Pace()
        self._in_flight: list[Sequence] = []
        self._aborting = False
        self._probing: Sequence | None = None  # for whom the cold trial runs
        self._following: set[Sequence] = set()  # they wait for an older one that computes the same prompt
        self._unasked_aborts = 0
        self._no_room_alone: Sequence | None = None  # who starts over because memory refused it
        self._squeeze: int | None = None  # a smaller prefill chunk after a refused step
        self._stalled_since: float | None = None  # nobody goes on until residents are saved, and leave
        self._wakeup = trio.Event()
        self._stopped: ErllamaError | None = None
        self._n = dict.fromkeys(
            (
                "steps",
                "prefill_tokens",
                "decode_rows",
                "preempted",
                "parked",
                "refused_steps",
                "aborted_steps",
            ),
            0,
        )
        self._compute_s = self._sample_s = 0.0

    def __repr__(self) -> str:
        s = self.statistics()
        return (
            f"<Actor {self.model_id}: {s.n_decoding} decode, {s.n_prefilling} prefill, {s.n_waiting} queued>"
        )

    # --- what clients may do at any moment: sync, no I/O ---

    def submit(self, seq: Sequence) -> None:
        """Queue a request.

        Raises: `NotSupported` (exact="cold" where it does not hold), `StickyBusy`, `SeqCapacity`
        (on_full="error"), or the reason why the actor ended.
        """
        if self._stopped is not None:
            raise copy.copy(self._stopped)
        if seq.exact and (refusal := self.cold.refusal(self.model_id)) is not None:
            raise refusal
        if self._of_session(seq.session):
            raise _busy(seq.options.session_id)
        if seq.options.on_full == "error" and not self._lanes.can_admit_behind(seq):
            busy = f"all {self._lanes.n_slots} sequences of {self.model_id!r} are busy"
            raise SeqCapacity(
                'a request with exact="cold" runs alone' if self._lanes.is_exclusive(seq) else busy
            )
        self._lanes.waiting.append(seq)
        self.wake()

    def cancel(self, seq: Sequence) -> None:
        """End a request: at once if it waits, else at the running step's border, sooner if alone in it.

        Idempotent.
        """
        seq.cancelled = True
        if seq in self._lanes.idle():
            self._lanes.withdraw(seq)
            seq.finish("cancelled", trio.current_time())
        self.wake()
        if seq is self._probing:
            self._thread.abort()
        if not self._aborting and self._in_flight and all(s.cancelled for s in self._in_flight):
            if self._lanes.has_state and all(s.phase is Phase.DECODE for s in self._in_flight):
                return  # short, and an aborted step would take the state with it
            self._aborting = True
            self._thread.abort()

    def reset_session(self, session_id: Hashable, salt: bytes = b"") -> list[Sequence]:
        """End the session's requests with `EngineReset`, even while a step is stuck; returns them.

        Their slots are free once `ended` is set on each.
        """
        hit = self._of_session(session_of(session_id, salt))
        for seq in hit:
            seq.buffer.end(EngineReset(f"session {session_id!r} was reset"))
            seq.leaves_nothing = True
            self.cancel(seq)
        return hit

    def end_session(self, session_id: Hashable, salt: bytes = b"", *, keep_cells: bool = True) -> bool:
        """Give the session's sequence up, at once or when its turn ends; False if it had none.

        `keep_cells`: what is in memory may still be shared until the room is needed.
        """
        session = session_of(session_id, salt)
        for seq in [s for s in self.sequences() if s.session is not None and s.session == session]:
            seq.pins, seq.leaves_nothing = False, seq.leaves_nothing or not keep_cells
        ended = self._lanes.forget_session(session, keep_cells=keep_cells)
        self.wake()
        return ended

    def holds(self, session_id: Hashable, salt: bytes = b"") -> bool:
        """Whether the session has a sequence to go on from."""
        return self._lanes.pin(session_of(session_id, salt)) is not None

    def history(self, session_id: Hashable, expected: list[int] | None, salt: bytes = b"") -> list[int]:
        """What a continuation of the session goes on from.

        Raises: `NotSupported`, `StickyBusy`, `NoSession`, `TranscriptMismatch`.
        """
        if self.facts.layout is None:
            raise NotSupported(f"the memory of {self.model_id!r} cannot be cut, so no session is held")
        session = session_of(session_id, salt)
        if self._of_session(session):
            raise _busy(session_id)
        return history_of(self._lanes.pin(session), session_id, expected)

    def n_kept(self, tokens: list[int], *, exact: bool = False) -> int:
        """How many of `tokens`, from the first on, a live sequence or the store could give to another."""
        n_stored = 0 if self._resumer is None else self._resumer.n_stored(tokens, exact=exact)
        return n_stored if exact else max(n_stored, self._lanes.n_live(tokens))

    def _of_session(self, session: Session | None) -> list[Sequence]:
        if session is None:
            return []
        return [s for s in self.sequences() if s.session == session and not s.cancelled]

    def wake(self) -> None:
        """Something changed that may make a step possible, or another one than those planned."""
        self._wakeup.set()
        self.pause()

    def pause(self) -> None:
        """Let the running step be the last that nothing comes between: the thread is wanted."""
        self._thread.pause()

    def statistics(self) -> ActorStatistics:
        """A consistent reading; never waits."""
        running = self._lanes.running.values()
        return ActorStatistics(
            **{f"n_{name}": count for name, count in self._n.items()},
            n_rebuilt=self._recovery.n_rebuilt,
            compute_s=self._compute_s,
            sample_s=self._sample_s,
            n_waiting=len(self._lanes.idle()),
            n_prefilling=sum(s.phase in (Phase.RESTORE, Phase.PREFILL) for s in running),
            n_decoding=sum(s.phase is Phase.DECODE for s in running),
            n_slots=self._lanes.n_slots,
            n_available=self._lanes.n_available - self._lanes.n_pinned,
            n_pinned_idle=self._lanes.n_pinned_idle,
        )

    @property
    def n_requests(self) -> int:
        """How many run or wait."""
        return len(self._lanes.running) + len(self._lanes.waiting) + len(self._lanes.parked)

    def sequences(self) -> list[Sequence]:
        """Everything that runs or waits, in order of arrival."""
        return sorted([*self._lanes.running.values(), *self._lanes.idle()], key=lambda s: s.arrival)

    # --- the loop ---

    async def run(self, nursery: trio.Nursery) -> None:
        """Serve until cancelled. Every client gets an end, however this ends.

        `nursery` holds the tasks that restore and save beside the loop. Cancellation: the running step is
        aborted and waited for; clients get `NotLoaded`.
        """
        self._nursery = nursery
        if self._saver is not None:
            nursery.start_soon(self._saver.run)
        reason: ErllamaError = EngineError(f"the engine of {self.model_id!r} stopped")
        try:
            while True:
                await self._turn()
        except trio.Cancelled:
            reason = NotLoaded(f"model {self.model_id!r} was unloaded")
            raise
        except Exception as crash:
            what = f"the engine of {self.model_id!r} failed: {crash!r}"
            reason = EngineError(what, reason="engine_error", detail={"crash": type(crash).__name__})
            raise
        finally:
            self._stop(reason)

    def _stop(self, reason: ErllamaError) -> None:
        self._stopped = reason
        left = [seq for seq in self.sequences() if seq.phase is not Phase.FINISHED]
        for seq in left:
            if seq.has_slot and seq.options.cache == "on":
                self._save(seq)
        self._lanes.waiting.clear()
        self._lanes.parked.clear()
        self._lanes.running.clear()
        with ExitStack() as each:  # one that cannot be ended cleanly keeps nobody else waiting
            for seq in left:
                each.callback(seq.fail, reason)

    async def wait_saved(self) -> None:
        """Until everything computed so far is in the store. Cancellation: harmless."""
        if self._saver is not None:
            await self._saver.wait_idle()

    async def flush(self) -> None:
        """Save what is planned. Only once `run` has ended. Cancellation: the rest is not saved."""
        if self._saver is not None:
            try:
                await self._saver.drain()
            finally:
                self._saver.give_up()

    def _save(self, seq: Sequence) -> None:
        """Plan to save whatever `seq` has computed: it is about to leave its slot."""
        if self._saver is not None:
            self._saver.plan_end(seq)

    async def _turn(self) -> None:
        self._wakeup = trio.Event()
        self._sweep()
        self._lanes.drop_unwanted()
        self._lanes.unpark()
        now = trio.current_time()
        while True:
            if (admitted := self._lanes.admit_next(now)) is not None:
                self._start_restore(admitted)
            elif not self._park(now):
                break
        self._following = self._lanes.share_running(now)
        room = self._make_room(now)
        if self._saver is not None and self._saver.must_capture:
            await self._saver.capture()
            room = self._room()
        shares = self._plan(room)
        if shares:
            await self._step(shares)
        else:
            await self._wait(now)

    async def _wait(self, now: float) -> None:
        """Until something changes, or it is time to park somebody or to give up on a save."""
        patience = math.inf if self._stalled_since is None else self._stalled_since + SAVE_PATIENCE_S - now
        with trio.move_on_after(max(0.0, min(patience, self._lanes.park_in_s(now, self._pace)))):
            await self._wakeup.wait()

    def _start_restore(self, seq: Sequence) -> None:
        if seq.exact and (refusal := self.cold.refusal(self.model_id)) is not None:
            self._lanes.release(seq.fail(refusal))  # it was queued before anybody knew
            return
        # What an older sequence has or is computing is taken from there; the store is read once for all.
        if self._needs_store(seq) or (seq.exact and not self.cold.known):
            self._nursery.start_soon(self._restore, seq, seq.n_admitted)
        else:
            self._restored(seq)

    def _needs_store(self, seq: Sequence) -> bool:
        if self._resumer is None or self._hint is None or seq.options.cache == "off":
            return False
        if seq.continues and seq.n_kv and seq.times.restored is None:
            return False  # it goes on from what its session holds, whatever else there is
        return self._hint.is_pending(seq) or self._resumer.has_more(seq)

    async def _restore(self, seq: Sequence, stay: int) -> None:
        def waits() -> bool:
            return seq.phase is Phase.RESTORE and seq.n_admitted == stay

        try:
            if seq.exact and not self.cold.known and (error := await self._probe_cold(seq)) is not None:
                if waits() and not seq.cancelled:
                    self._lanes.release(seq.fail(error))
                return
            if seq.exact and waits():
                seq.times.admitted = trio.current_time()  # it waited for that; nothing of it was restored
            if self._hint is not None and self._hint.is_pending(seq):
                await self._hint.wait(seq)
            if waits() and self._resumer is not None and seq.options.cache != "off":
                await self._resumer.restore(seq, stay)
        finally:
            if waits():
                self._restored(seq)
            self.wake()

    async def _probe_cold(self, seq: Sequence) -> ErllamaError | None:
        """Find out whether exact="cold" holds; why it cannot be offered, if it cannot. Nobody else runs.

        Should `seq` be cancelled, the trial is aborted; who asks next has it made anew. Until its call is
        over `seq` keeps its slot: the next call would lower the flag.
        """
        log.info('%s: trying whether exact="cold" holds; this is done once', self.model_id)
        self._probing = seq
        try:
            self.cold.learned(await self._thread.probe_cold())
        except ErllamaError as error:
            return error
        finally:
            self._probing = None
        return self.cold.refusal(self.model_id)

    def _restored(self, seq: Sequence) -> None:
        self.hits.admitted(seq)
        seq.restored(trio.current_time())

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End with Done; what was computed stays in its cells and goes to the store."""
        resident = None
        if seq.has_slot:
            self.hits.ending(seq)
        if (
            seq.has_slot
            and seq.options.cache == "on"
            and not seq.leaves_nothing
            and self._lanes.can_stay(seq)
        ):
            self._save(seq)
            resident = Resident.of(seq, trio.current_time(), pinned=seq.pins)
        self._lanes.release(seq.finish(reason, trio.current_time()), resident)

    def _park(self, now: float) -> bool:
        seq = self._lanes.park_lagging(now, self._pace)
        if seq is None:
            return False
        self._n["parked"] += 1
        log.info("%s: parked %s, its reader lags and others wait", self.model_id, seq.request)
        return True

    def _sweep(self) -> None:
        for seq in [s for s in self._lanes.running.values() if s.cancelled and s is not self._probing]:
            self._finish(seq, "cancelled")

    def _ready(self) -> list[Sequence]:
        """Who can go on: its memory is settled, and its reader keeps up.

        The reader of one that runs alone is not waited for when others wait for its end.
        """
        others_wait = bool(self._lanes.waiting)
        return [
            s
            for s in self._lanes.running.values()
            if s.phase is not Phase.RESTORE
            and (s.buffer.has_room or (s.exact and others_wait))
            and s not in self._following
        ]

    def _make_room(self, now: float) -> Room:
        ready = self._ready()
        most = self._chunks.alone
        wanted = min(sum([min(most, s.n_tokens - s.n_kv) for s in ready]), self.facts.n_batch)
        n_free = self._lanes.reclaim(wanted)
        while lacks_cells(ready, self._limit(n_free)):
            if self._lanes.is_saving:
                self._stall(now)
                return self._room()
            if not self._preempt():
                break
            n_free = self._lanes.reclaim(len(self._ready()))
            self._following = self._lanes.share_running(now)  # who was waited for may have been the one to go
            ready = self._ready()
        return Room(ready, self._limit(n_free))

    def _room(self) -> Room:
        return Room(self._ready(), self._limit(self._lanes.n_free_cells))

    def _limit(self, n_free: int | None) -> int | None:
        # Nobody can make room for the only one that runs: the model itself says when it is full.
        return None if len(self._lanes.running) == 1 else n_free

    def _stall(self, now: float) -> None:
        """Residents that are being saved hold the cells that are lacking; not for ever."""
        if self._stalled_since is None:
            self._stalled_since = now
        elif now - self._stalled_since >= SAVE_PATIENCE_S:
            self._lanes.drop_resident(unsaved=True)
            self._stalled_since = None
            self.wake()

    def _preempt(self) -> bool:
        seq = self._lanes.preempt_youngest(trio.current_time())
        if seq is None:
            return False
        self._n["preempted"] += 1
        log.info("%s: preempted %s, no cell is free", self.model_id, seq.request)
        return True

    def _plan(self, room: Room) -> list[Share]:
        if self._lanes.runs_alone:
            piece = cold_piece(self.facts.n_batch)
            assert piece is not None
            return plan_step(room.ready, Limits.alone(self.facts.n_batch, piece))
        squeeze = self._squeeze or self.facts.n_batch
        limits = Limits(
            n_batch=self.facts.n_batch,
            prefill_chunk=min(self._chunks.beside, squeeze),
            lone_chunk=min(self._chunks.alone, squeeze),
            n_cells=room.n_cells,
            prefill_budget=self._pace.prefill_budget(self._options.step_target_s),
            boundary=self._boundary,
        )
        return plan_step(room.ready, limits)

    async def _step(self, shares: list[Share]) -> None:
        self._in_flight = [self._lanes.running[share.slot] for share in shares]
        self._aborting = False
        n_tokens, n_decode = sum([share.n for share in shares]), sum([share.sampled for share in shares])
        n_prefill = n_tokens - n_decode
        step = Step(
            tuple([_row(share, seq) for share, seq in zip(shares, self._in_flight, strict=True)]),
            self._pace.budget_s(self._options.decode_budget_s, n_decode, n_prefill),
            exact=self._lanes.runs_alone,
        )
        stepping = list(self._in_flight)
        burst = self._burst(shares)
        try:
            with self._lanes.reserving(n_tokens * (1 if burst is None else burst.n_steps)):
                result = await (self._thread.step(step) if burst is None else self._thread.steps(step, burst))
        except ErllamaError as error:
            # Memory that could not be set right before the step is not the fault of who steps.
            await self._recovery.rebuild(error, stepping, innocent=self._thread.is_broken)
            return
        finally:
            self._in_flight = []
        self._count_time(result)
        match result.status:
            case StepStatus.OK:
                self._count_step(n_decode, n_prefill, result)
                self._apply(shares, result)
            case StepStatus.NO_ROOM:
                self._n["refused_steps"] += 1
                if not self._yield_room(shares):
                    await self._wait(trio.current_time())
            case StepStatus.ABORTED:
                self._n["aborted_steps"] += 1
                self._unasked_aborts = 0 if self._aborting else self._unasked_aborts + 1
                if self._unasked_aborts >= UNASKED_ABORTS:
                    await self._recovery.rebuild(
                        DecodeAborted(f"{self.model_id!r} aborts steps that nobody cancelled")
                    )
                else:
                    await self._recovery.repair(shares)
            case StepStatus.TIMEOUT:
                await self._recovery.rebuild(
                    DecodeTimeout(f"a step of {step.n_tokens} tokens took longer than {step.budget_s:.3g} s")
                )
            case StepStatus.FATAL:
                await self._recovery.rebuild(DecodeFailed(rc=result.rc), stepping)

    def _burst(self, shares: list[Share]) -> Burst | None:
        """What may follow a step without asking here; None if nothing may."""
        lanes = self._lanes
        if (
            len(shares) < len(lanes.running)
            or lanes.waiting
            or lanes.parked
            or self._stalled_since is not None
            or not self._thread.runs_beside
        ):
            return None
        block = None if self.cache is None else self.cache.policy.block_tokens
        n = n_steps(self._in_flight, lanes.n_free_cells, block)
        return None if n < 2 else Burst(n, self._is_eog, lambda result: self._apply_followed(shares, result))

    # --- what a step changes ---

    def _count_time(self, result: StepResult) -> None:
        self._compute_s += result.compute_s
        self._sample_s += result.sample_s

    def _count_step(self, n_decode: int, n_prefill: int, result: StepResult) -> None:
        self._n["steps"] += 1
        self._n["decode_rows"] += n_decode
        self._n["prefill_tokens"] += n_prefill
        self._pace.observe(n_decode, n_prefill, result.compute_s)
        self._squeeze = self._stalled_since = None
        self._unasked_aborts = 0

    def _apply_followed(self, shares: list[Share], result: StepResult) -> None:
        """A step of a burst, while the next one runs."""
        self._count_time(result)
        self._count_step(len(shares), 0, result)
        self._apply(shares, result, followed=True)

    def _apply(self, shares: list[Share], result: StepResult, *, followed: bool = False) -> None:
        """`followed`: the next step began with what was sampled, so it is known even of who has left."""
        now = trio.current_time()
        for share, sampled in zip(shares, result.sampled, strict=True):
            seq = self._lanes.running[share.slot]
            seq.computed(seq.cells.n + share.n, now)
            if self._saver is not None and seq.options.cache == "on":
                self._saver.plan_blocks(seq)
            if followed:
                assert isinstance(sampled, Sampled)
                self._accept(seq, sampled, now, is_eog=False)
                continue
            if seq.cancelled or not share.sampled:
                continue
            if not seq.purpose.samples:
                self._finish(seq, "stop")
                continue
            if sampled is None:
                sampled = NoLogits(f"the backend of {self.model_id!r} sampled nothing for {seq.request}")
            if isinstance(sampled, ErllamaError):
                self._lanes.release(seq.fail(sampled))
                continue
            self._accept(seq, sampled, now, is_eog=self._is_eog(sampled.token))
        for seq in self._lanes.running.values():
            if not seq.cancelled:  # a cancelled one did not take its token
                seq.check()

    def _accept(self, seq: Sequence, sampled: Sampled, now: float, *, is_eog: bool) -> None:
        reason = seq.accept(sampled, piece=self._piece(sampled.token), is_eog=is_eog, now=now)
        if reason is not None:
            self._finish(seq, reason)

    def _yield_room(self, shares: list[Share]) -> bool:
        """The model refused for lack of cells, and nothing changed: ask for less, then for fewer.

        False: cells will be free when a resident is saved.
        """
        if self._lanes.drop_resident():
            return True
        if self._lanes.is_saving:
            self._stall(trio.current_time())
            return False
        largest = max(shares, key=lambda share: share.n)
        if self._lanes.runs_alone:  # in an empty memory, and other pieces would have other bits
            self._end_for_room(self._lanes.running[largest.slot])
        elif largest.n > PIECE:
            self._squeeze = max(PIECE, largest.n // 2 // PIECE * PIECE)
        elif not self._preempt():
            self._no_room_for_one(self._lanes.running[largest.slot])
        return True

    def _no_room_for_one(self, seq: Sequence) -> None:
        """Memory refuses a lone sequence that fits by every count: compute it once more from nothing."""
        log.warning("%s: memory has no room for %s alone", self.model_id, seq)
        if self._no_room_alone is not seq:
            self._no_room_alone = seq
            self._lanes.release(seq.preempt())
            self._lanes.requeue(seq)
            return
        self._no_room_alone = None
        self._end_for_room(seq)

    def _end_for_room(self, seq: Sequence) -> None:
        """What was generated is the answer; without any, it is our error, not the caller's."""
        if seq.n_generated:
            self._finish(seq, "length")
            return
        error = EngineError(
            f"the model has no room for {seq.n_tokens} tokens in an empty context of {self.facts.n_ctx}",
            reason="no_room",
            detail={"n_tokens": seq.n_tokens, "n_ctx": self.facts.n_ctx},
        )
        self._lanes.release(seq.fail(error))


def _busy(session_id: Hashable) -> StickyBusy:
    return StickyBusy(f"session {session_id!r} already has a request in flight; wait for its end")


def _row(share: Share, seq: Sequence) -> Row:
    tokens = seq.ledger[share.start : share.start + share.n]
    return Row(share.slot, share.start, tokens, seq.sampler if share.sampled else None)
