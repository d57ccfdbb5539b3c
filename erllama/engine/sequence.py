"""The token state of one request, from submission to its last event.

Invariants, asserted by `check` after every step:
  0 <= n_kv <= len(ledger), and len(ledger) - n_kv == 1 while decoding;
  a slot is owned exactly in RESTORE, PREFILL and DECODE.
The ledger is the prompt followed by every sampled token; its last token is *pending*: known, but not
yet in memory.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import trio

from erllama.types import (
    CacheDelta,
    Completion,
    Done,
    Event,
    FinishReason,
    HitKind,
    Miss,
    Request,
    Stats,
    Token,
    TokenId,
    TokenLogprob,
)

from .cells import Cells
from .evidence import Evidence
from .node_path import NodePath
from .purpose import Purpose
from .state import Happening, Lifecycle, Phase
from .text import TextAssembler

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from collections.abc import Sequence as Seq

    from erllama.backend import Sampled, Sampler
    from erllama.kvcache.key import Prompt
    from erllama.options import GenerationOptions

    from .resident import Resident
    from .stream import EventBuffer


EMPTY: Mapping[int, bytes] = MappingProxyType({})


@dataclass(slots=True)
class Timeline:
    """When things happened, on trio's clock; None until they did."""

    submitted: float
    admitted: float | None = None
    restored: float | None = None
    prefilled: float | None = None
    first_token: float | None = None
    finished: float | None = None


OWNS_A_SLOT = Phase.RESTORE, Phase.PREFILL, Phase.DECODE


class Sequence:
    """One request in the engine."""

    def __init__(
        self,
        *,
        request: Request,
        prompt: Seq[int],
        options: GenerationOptions,
        sampler: Sampler | None,
        seed: int,
        n_ctx: int,
        buffer: EventBuffer,
        now: float,
        purpose: Purpose = Purpose.ANSWER,
        visible: Mapping[int, bytes] = EMPTY,
        exact: bool = False,
        is_text: bool = False,
    ) -> None:
        self.request = request
        self.arrival = request.id  # order of submission
        self.options = options
        self.purpose = purpose
        self.sampler = sampler
        self.seed = seed
        self.buffer = buffer
        self.ledger = list(prompt)
        self.n_prompt = len(prompt)
        self.cells = Cells()
        self.path = NodePath()  # stored nodes that hold what is in memory
        self.n_cached = 0  # prompt tokens that were not computed for this request
        self.source: str | None = None  # where they came from: "live", or a tier's name
        self.n_stored = 0  # tokens this request added to the store
        self.miss: Miss | None = None  # why not more was reused; known when it ends
        self.unproven: set[bytes] = set()  # restored nodes that no step has gone on from yet
        self.n_admitted = 0  # which of its stays in a slot this is
        self.has_computed = False  # in this stay: otherwise everything it has is kept elsewhere
        self.saves_refused = False  # the store did not keep a node: what follows waits for the end
        self.retried = False
        self._slot: int | None = None
        self.times = Timeline(now)
        self.cancelled = False
        self.pins = options.session_id is not None  # its session keeps its slot
        self.leaves_nothing = False  # its session was reset, or nobody knows what its memory holds
        self.exact = exact  # it runs alone, for the bits of a fresh context
        self.n_head = options.prefix_checkpoint_len  # tokens of its prompt's head, where the caller named one
        self.looked_up: Prompt | None = None  # its prompt as the store sees it
        self.is_text = is_text  # its prompt came as text: other ids that spell the same do as well
        self.evidence = Evidence()
        self.ended = trio.Event()  # its slot and sampler are given back
        self._n_ctx = n_ctx
        self._kept: tuple[HitKind, int] | None = None  # it runs on in its session's slot, from there
        self._life = Lifecycle()
        self.phase = self._life.phase  # where it is; `_move` writes it
        self._text = TextAssembler(options.stop)
        self._visible = visible  # control tokens whose text shows
        self._logprobs: list[TokenLogprob] | None = None if options.logprobs is None else []

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request} {self.phase.value} {self.n_kv}/{len(self.ledger)} slot={self._slot}>"
        )

    # --- what the planner sees ---

    @property
    def slot(self) -> int:
        """The lane it owns. Only while it owns one."""
        assert self._slot is not None
        return self._slot

    @property
    def has_slot(self) -> bool:
        """Whether it owns a lane."""
        return self._slot is not None

    @property
    def n_kv(self) -> int:
        """Tokens in memory."""
        return self.cells.n

    @property
    def shareable(self) -> bool:
        """Others may hold what it holds."""
        return self.options.cache != "off"

    @property
    def salt(self) -> bytes:
        """Whose it is: what others computed under another one is not for it."""
        return self.options.salt

    @property
    def session(self) -> tuple[bytes, Hashable] | None:
        """Its session: its salt, and the id under it."""
        return None if self.options.session_id is None else (self.salt, self.options.session_id)

    @property
    def is_restoring(self) -> bool:
        """Whether its memory is being filled from the store."""
        return self.phase is Phase.RESTORE

    @property
    def n_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.ledger)

    @property
    def n_generated(self) -> int:
        """Sampled tokens."""
        return len(self.ledger) - self.n_prompt

    @property
    def n_left(self) -> int:
        """Tokens it may still generate."""
        n = len(self.ledger)
        return min(self.options.max_tokens + self.n_prompt, self._n_ctx) - n

    def check(self) -> None:
        """Assert the invariants above."""
        n_kv, n, phase = self.cells.n, len(self.ledger), self.phase
        assert 0 <= n_kv <= n, self
        assert phase is not Phase.DECODE or n - n_kv == 1, self
        assert (self._slot is not None) == (phase in OWNS_A_SLOT), self

    # --- transitions ---

    def _move(self, happening: Happening) -> None:
        self.phase = self._life.fire(happening)

    def admit(
        self,
        slot: int,
        now: float,
        shared: Cells | None = None,
        path: NodePath | None = None,
        kind: HitKind | None = None,
    ) -> None:
        """It gets a lane whose memory holds `shared`, a beginning of its tokens, and nothing else.

        `kind`: its session left it that, "sticky" or "continuation".
        """
        self._slot, self.cells, self.path = slot, shared or Cells(), path or NodePath()
        self.unproven, self.has_computed = set(), False
        self.n_admitted += 1
        self._move(Happening.ADMITTED)
        if self.times.admitted is None:
            self.times.admitted = now
            self._reused(self.n_kv, "live")
            self._kept = None if kind is None else (kind, self.n_cached)

    def restored_to(self, n_kv: int, source: str) -> None:
        """Its memory was extended from the store."""
        n_new = n_kv - self.n_kv
        self.cells.grow_to(n_kv)
        if self.times.restored is None and n_new:
            self._reused(n_kv, source)

    def respell(self, prompt: Seq[int], n_head: int | None) -> None:
        """Its prompt's text in other ids, of which memory holds a beginning."""
        assert not self.n_generated
        self.ledger, self.n_head, self.looked_up = list(prompt), n_head, None
        self.n_prompt = len(prompt)

    def lost(self, n_kv: int) -> None:
        """While it was being restored, memory beyond `n_kv` had to be given up."""
        if n_kv < self.n_kv and self.times.restored is None:
            self._reused(n_kv, self.source or "live")
        self.cells.cut_to(n_kv)
        self.path.cut_to(n_kv)

    def _reused(self, n: int, source: str) -> None:
        self.n_cached = min(n, self.n_prompt)
        self.source = source if n else None

    def share(self, other: Sequence | Resident, n_kv: int, now: float) -> None:
        """It holds what `other` computed, up to `n_kv`."""
        if self.n_kv == self.n_cached:  # it has computed nothing itself yet
            self._reused(n_kv, "live")
        self.cells.adopt(other.cells, n_kv)
        self.unproven |= other.unproven
        for name, end in other.path.up_to(n_kv).nodes:
            if end > self.path.end:
                self.path.add(name, end)
        self._note_prefill(now)

    def restored(self, now: float) -> None:
        """Whatever could be reused is there; the rest is computed."""
        self._move(Happening.RESTORED)
        if self.times.restored is None:
            self.times.restored = now
        self._note_prefill(now)

    def preempt(self) -> int:
        """It gives its lane up and waits; returns the lane."""
        self._move(Happening.PREEMPTED)
        return self._leave_slot()

    def rewind(self, n_kv: int) -> None:
        """Memory beyond `n_kv` was lost; the last known token always remains to be computed."""
        assert n_kv < len(self.ledger)
        self.cells.cut_to(n_kv)
        self.cells.grow_to(n_kv)  # an aborted step may have left more than was known
        self.path.cut_to(n_kv)
        if len(self.ledger) - n_kv > 1 or self.phase is Phase.PREFILL:
            self._move(Happening.REWOUND)

    def computed(self, n_kv: int, now: float) -> None:
        """The model has seen the tokens before `n_kv`."""
        self.cells.grow_to(n_kv)
        self.has_computed = True
        if self.unproven:
            self.unproven = set()
        if self.phase is Phase.PREFILL:
            self._note_prefill(now)

    def _note_prefill(self, now: float) -> None:
        if self.phase is Phase.PREFILL and self.cells.n >= len(self.ledger) - 1:
            self._move(Happening.PREFILLED)
            if self.times.prefilled is None:
                self.times.prefilled = now

    def _leave_slot(self) -> int:
        slot = self.slot
        self._slot, self.cells, self.path = None, Cells(), NodePath()
        return slot

    # --- output ---

    def accept(self, sampled: Sampled, *, piece: bytes, is_eog: bool, now: float) -> FinishReason | None:
        """Take the sampled token, deliver what it shows, say whether that ends the answer."""
        if self.times.first_token is None:
            self.times.first_token = now
        self.ledger.append(sampled.token)
        logprob = None if self._logprobs is None else sampled.logprob
        if self._logprobs is not None and logprob is not None:
            self._logprobs.append(logprob)
        shown = self._visible.get(sampled.token, b"" if is_eog else piece)
        text = self._text.feed(shown) if shown else ""
        events: list[Event] = [TokenId(sampled.token, self.request, logprob)]
        if text:
            events.append(Token(text, self.request))
        self.buffer.put_nowait(*events)
        if is_eog or self._text.stop_sequence is not None:
            return "stop"
        return "length" if self.n_left <= 0 else None

    def finish(self, reason: FinishReason, now: float) -> int | None:
        """Deliver the rest and Done; returns the lane it gives up, if it had one."""
        rest = self._text.finish()
        if self._text.stop_sequence is not None:
            reason = "stop"  # the flush may complete a stop string: an unfinished character is U+FFFD
        if rest:
            self.buffer.put_nowait(Token(rest, self.request))
        self.times.finished = now
        self.buffer.put_nowait(Done(self._completion(reason), self.request))
        return self._end(None)

    def fail(self, error: BaseException | None) -> int | None:
        """End without Done: the reader gets a copy of `error`. Returns the lane it gives up, if any."""
        return self._end(copy.copy(error))

    def _end(self, error: BaseException | None) -> int | None:
        slot = self._leave_slot() if self.has_slot else None
        self._move(Happening.FINISHED)
        self.buffer.end(error)
        try:
            if self.sampler is not None:
                self.sampler.close()
        finally:
            self.ended.set()
        return slot

    def _completion(self, reason: FinishReason) -> Completion:
        return Completion(
            reply=self._text.text,
            generated=self.ledger[self.n_prompt :],
            context_tokens=list(self.ledger),
            committed_tokens=len(self.ledger),
            finish_reason=reason,
            seed=self.seed,
            stop_sequence=self._text.stop_sequence,
            logprobs=self._logprobs,
            finish_key=self.path.tip,
            cache_hit_kind=self.hit_kind,
            cache_source=self.source,
            cache_delta=CacheDelta(read=self.n_cached, created=self.n_stored),
            miss=self.miss,
            stats=self._stats(),
        )

    @property
    def continues(self) -> bool:
        """Whether it took its session's history as it is, without looking anything up."""
        return self._kept is not None and self._kept[0] == "continuation"

    @property
    def is_sticky(self) -> bool:
        """Whether it runs on where its session's last turn ended, and got nothing from elsewhere."""
        return self._kept is not None and (self.continues or self._kept[1] == self.n_cached)

    @property
    def hit_kind(self) -> HitKind:
        """How it was admitted."""
        if self._kept is not None and self.is_sticky and self.n_cached:
            return self._kept[0]
        if not self.n_cached:
            return "cold"
        return "exact" if self.n_cached >= self.n_prompt - 1 else "partial"

    def _stats(self) -> Stats:
        t = self.times
        end = t.finished if t.finished is not None else t.submitted
        admitted = t.admitted if t.admitted is not None else end
        restored = t.restored if t.restored is not None else end
        prefilled = t.prefilled if t.prefilled is not None else end
        first = t.first_token if t.first_token is not None else end
        return Stats(
            n_prompt=self.n_prompt,
            n_cached=self.n_cached,
            n_generated=self.n_generated,
            queue_s=admitted - t.submitted,
            restore_s=restored - admitted,
            prefill_s=prefilled - restored,
            first_token_s=first - t.submitted,
            decode_s=end - prefilled,
        )
