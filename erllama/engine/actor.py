"""The actor of one model: the only writer of its sequences.

One turn of the loop: sweep out who was cancelled, admit who fits, plan a step, run it on the model's
own thread, apply the result, deliver. Where nobody waits, steps follow each other there (`burst`). Everything
between two awaits is sync, so clients may submit and cancel at any moment, also while a step runs: they only
ever touch the queue and flags.

Rule 1: a step in flight is aborted early only if every row of it belongs to cancelled requests.
Rule 2: after an abort each sequence is repaired from what memory really holds; the context is rebuilt
only after a time-out, a fatal code or an exception, and then everybody who runs fails, nobody who waits.
"""

from __future__ import annotations

import copy
import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

import trio

from erllama.backend import Row, Sampled, Step, StepResult, StepStatus
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
from .arrivals import Arrivals
from .burst import Burst, n_steps
from .cold import ColdPromise, cold_piece
from .errands import Errands
from .hits import HitBook
from .model_thread import ModelThread
from .parent_hint import ParentHint
from .planner import Limits, Share, plan_step
from .recovery import Recovery
from .resident import Resident
from .resume import Resumer
from .room import Going, Room
from .saver import Saver
from .sessions import history_of, session_of
from .state import Phase
from .statistics import ActorStatistics
from .tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from erllama.types import FinishReason

    from .cache_link import CacheLink
    from .opened import Opened
    from .sequence import Sequence
    from .sessions import Session

log = logging.getLogger("erllama.engine")
UNASKED_ABORTS = 3  # in a row; then the context is rebuilt
SHORTEST_WAIT_S = 1e-6  # then the clock shows a later time: what is due in less would stay due in as much


class Actor:
    """Runs the requests of one opened backend."""

    def __init__(
        self, opened: Opened, cache: CacheLink | None = None, cold: ColdPromise | None = None
    ) -> None:
        model_id, backend, facts = opened.model_id, opened.backend, opened.facts
        self.model_id = model_id
        self.facts = facts
        self._options = opened.options
        self._is_eog: Callable[[int], bool] = getattr(backend, "is_eog", lambda _: False)
        self._piece: Callable[[int], bytes] = getattr(backend, "piece", lambda _: b"")
        self._lanes = Lanes(facts, self._save)
        self._thread = ModelThread(backend, opened.runner, self._lanes.take_ops)
        self._recovery = Recovery(model_id, self._lanes, self._thread, cache)
        self.cache = cache  # whose KV this is, and where it is kept
        self.cold = cold or ColdPromise(backend, facts)
        self._errands = Errands()
        self._saver = self._resumer = hint = None
        if cache is not None and facts.layout is not None:
            self._saver = Saver(cache, facts, self._lanes, self._thread, self.wake)
            wait_for_a_save = self._saver.wait_for_one
            self._resumer = Resumer(cache, facts, self._lanes, self._thread, self._errands, wait_for_a_save)
            hint = ParentHint(cache, self._saver)
        self.hits = HitBook(
            cache,
            None if self._saver is None else self._saver.saved_names,
            self._piece,
            layout=facts.layout,
        )
        self._arrivals = Arrivals(
            model_id,
            self._lanes,
            self._thread,
            self._errands,
            self.cold,
            self.hits,
            self.wake,
            self._resumer,
            hint,
        )
        # Where prefill must stop because a state exists only there and is kept.
        self._boundary = cache.policy.block_tokens if cache is not None and self._lanes.has_state else None
        self._in_flight: list[Sequence] = []
        self._aborting = False
        self._unasked_aborts = 0
        self._wakeup = trio.Event()
        self._stopped: ErllamaError | None = None
        self._tally = Tally(cache)
        self._room = Room(opened, self._lanes, self._tally, self.wake, self._end_for_room)

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
        if seq is self._arrivals.tried_for:
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
        running, tally = self._lanes.running.values(), self._tally
        return ActorStatistics(
            n_steps=tally.n_steps,
            n_prefill_tokens=tally.n_prefill_tokens,
            n_decode_rows=tally.n_decode_rows,
            n_preempted=tally.n_preempted,
            n_parked=tally.n_parked,
            n_refused_steps=tally.n_refused_steps,
            n_aborted_steps=tally.n_aborted_steps,
            n_rebuilt=self._recovery.n_rebuilt,
            compute_s=tally.compute_s,
            sample_s=tally.sample_s,
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
        now = self._change_places()
        if self._errands.n:
            await self._errands.settle()
            now = self._change_places()  # no step for who left meanwhile; who came may take part
        going = self._room.make(now)
        if self._saver is not None and self._saver.must_capture:
            await self._saver.capture()
            going = self._room.going()
        shares = self._plan(going)
        if shares:
            await self._step(shares)
        else:
            await self._wait(now)

    def _change_places(self) -> float:
        """Who was cancelled goes, who waits comes in; returns when."""
        self._sweep()
        self._lanes.drop_unwanted()
        self._lanes.unpark()
        now = trio.current_time()
        while True:
            if (admitted := self._lanes.admit_next(now)) is not None:
                self._arrivals.start(admitted, self._nursery)
            elif not self._park(now):
                return now

    async def _wait(self, now: float) -> None:
        """Until something changes, or it is time to park somebody or to give up on a save."""
        in_s = min(self._room.patience_s(now), self._lanes.park_in_s(now, self._tally.pace))
        with trio.move_on_after(max(SHORTEST_WAIT_S, in_s)):
            await self._wakeup.wait()

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
        seq = self._lanes.park_lagging(now, self._tally.pace)
        if seq is None:
            return False
        self._tally.n_parked += 1
        log.info("%s: parked %s, its reader lags and others wait", self.model_id, seq.request)
        return True

    def _sweep(self) -> None:
        for seq in [
            s for s in self._lanes.running.values() if s.cancelled and s is not self._arrivals.tried_for
        ]:
            self._finish(seq, "cancelled")

    def _plan(self, going: Going) -> list[Share]:
        if self._lanes.runs_alone:
            piece = cold_piece(self.facts.n_batch)
            assert piece is not None
            return plan_step(going.ready, Limits.alone(self.facts.n_batch, piece))
        chunks, squeeze = self._room.chunks, self._room.squeeze or self.facts.n_batch
        limits = Limits(
            n_batch=self.facts.n_batch,
            prefill_chunk=min(chunks.beside, squeeze),
            lone_chunk=min(chunks.alone, squeeze),
            n_cells=going.n_cells,
            prefill_budget=self._tally.pace.prefill_budget(self._options.step_target_s),
            boundary=self._boundary,
        )
        return plan_step(going.ready, limits)

    async def _step(self, shares: list[Share]) -> None:
        self._in_flight = [self._lanes.running[share.slot] for share in shares]
        self._aborting = False
        n_tokens, n_decode = sum([share.n for share in shares]), sum([share.sampled for share in shares])
        n_prefill = n_tokens - n_decode
        step = Step(
            tuple([_row(share, seq) for share, seq in zip(shares, self._in_flight, strict=True)]),
            self._tally.pace.budget_s(self._options.decode_budget_s, n_decode, n_prefill),
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
        if result.status is not StepStatus.OK:
            self._tally.add_lost(result)
        match result.status:
            case StepStatus.OK:
                self._count_step(shares, n_decode, n_prefill, result)
                self._apply(shares, result)
            case StepStatus.NO_ROOM:
                self._tally.n_refused_steps += 1
                if not self._room.refused(shares):
                    await self._wait(trio.current_time())
            case StepStatus.ABORTED:
                self._tally.n_aborted_steps += 1
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
            or self._room.stalled_since is not None
            or not self._thread.runs_beside
        ):
            return None
        block = None if self.cache is None else self.cache.policy.block_tokens
        n = n_steps(self._in_flight, lanes.n_free_cells, block)
        return None if n < 2 else Burst(n, self._is_eog, lambda result: self._apply_followed(shares, result))

    # --- what a step changes ---

    def _count_step(self, shares: list[Share], n_decode: int, n_prefill: int, result: StepResult) -> None:
        self._tally.add_step(shares, n_decode, n_prefill, result)
        self._room.squeeze = self._room.stalled_since = None
        self._unasked_aborts = 0

    def _apply_followed(self, shares: list[Share], result: StepResult) -> None:
        """A step of a burst, while the next one runs."""
        self._count_step(shares, len(shares), 0, result)
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
