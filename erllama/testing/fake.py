"""FakeBackend: a model made of arithmetic, whose memory really has to be right.

Its vocabulary is the 256 bytes, an end-of-generation token and a control token, so any text is its
own tokens. The next token is a hash of every token that *memory* holds for the sequence, position by
position and part by part (`fake_memory`), of the sampler's parameters and of how often that sampler has
drawn: a wrong slot, a stale cell, a swapped sampler or a missed restore each change the answer. With the
same history in memory, every kind of memory gives the same one.

A `script` makes it say something definite instead: it maps the prompt's text to the ids to generate,
followed by end of generation.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from erllama.backend import (
    BackendFacts,
    EmbedResult,
    EmbedRow,
    Layout,
    MemoryKind,
    PartKind,
    Row,
    Sampled,
    SamplingParams,
    Step,
    StepResult,
    StepStatus,
)
from erllama.errors import InvalidContent, InvalidGrammar, InvalidOption, NotSupported
from erllama.types import TokenLogprob

from .fake_memory import LAYOUTS, FakeMemory, State
from .fake_memory import Cell as Cell  # what `memory` consists of

if TYPE_CHECKING:
    from .fake_embedder import FakeEmbedder

EOG = 256  # ends a generation
CONTROL = 257  # shows nothing
N_VOCAB = 258
SPECIAL: Mapping[str, list[int]] = {"<eog>": [EOG], "<control>": [CONTROL]}


Script = Callable[[str], Sequence[int]]


@dataclass(eq=False)
class FakeSampler:
    """A sampler chain: its parameters and how often it has drawn."""

    params: SamplingParams
    live: set[FakeSampler]
    n_drawn: int = 0
    script: list[int] | None = None

    def __post_init__(self) -> None:
        self.live.add(self)

    def close(self) -> None:
        """See `erllama.backend.Sampler`."""
        self.live.discard(self)


@dataclass
class FakeBackend:
    """Implements `erllama.backend.Backend`.

    `step_delay_s` passes in every step: on the mock clock when `threaded` is False (calls run inline in
    the trio thread), for real otherwise, where `abort` ends it early. `before_step` sees each step first
    and may return a `StepResult` to answer instead, or raise. With an `embedder` it gives embeddings too, and
    unless it `generates` nothing else. `window` is how far back WINDOW memory looks (0 there: 64).
    """

    n_ctx: int = 4096
    n_cells: int | None = None
    n_batch: int = 512
    n_slots: int = 1
    memory_kind: MemoryKind = MemoryKind.DENSE
    window: int = 0
    streams_separate: bool = False
    threaded: bool = False
    step_delay_s: float = 0.0
    script: Script | None = None
    before_step: Callable[[Step], StepResult | None] | None = None
    embedder: FakeEmbedder | None = None
    generates: bool = True

    steps: list[Step] = field(default_factory=list, init=False)
    slots: dict[int, FakeMemory] = field(default_factory=dict, init=False)
    live_samplers: set[FakeSampler] = field(default_factory=set, init=False)
    n_opened: int = field(default=0, init=False)
    n_rebuilt: int = field(default=0, init=False)
    is_open: bool = field(default=False, init=False)
    _abort: threading.Event = field(default_factory=threading.Event, init=False)
    _before: dict[State, tuple[State, tuple[int, ...]]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        is_window = self.memory_kind is MemoryKind.WINDOW
        if self.window < 0 or (self.window and not is_window):
            raise InvalidOption(f"window={self.window}: {self.memory_kind.value} memory has none")
        self.window = (self.window or 64) if is_window else 0
        self._layout = Layout(window=self.window) if is_window else LAYOUTS.get(self.memory_kind, Layout())
        if self.threaded:
            self.inline_delay_s: Callable[[], float] | None = None
        else:
            self.inline_delay_s = lambda: self.step_delay_s

    # --- required ---

    def open(self) -> BackendFacts:
        """See `Backend.open`."""
        self.n_opened += 1
        self.is_open = True
        return BackendFacts(
            n_ctx=self.n_ctx,
            n_cells=self.n_ctx if self.n_cells is None else self.n_cells,
            n_batch=self.n_batch,
            n_slots=self.n_slots,
            n_vocab=N_VOCAB,
            memory_kind=self.memory_kind,
            streams_separate=self.streams_separate,
            shape_hash=f"FakeBackend {self.memory_kind.value} {self.window}".encode(),
            layout=self._layout if self._is_kept else None,
            embeddings=None if self.embedder is None else self.embedder.facts,
            generates=self.generates,
        )

    @property
    def _is_kept(self) -> bool:
        return not self.streams_separate and (
            self.memory_kind in LAYOUTS or self.memory_kind is MemoryKind.WINDOW
        )

    @property
    def memory(self) -> dict[int, dict[int, int]]:
        """Base cells by slot: token by position."""
        return {slot: dict(held.cells) for slot, held in self.slots.items()}

    def close(self) -> None:
        """See `Backend.close`."""
        self.is_open = False
        self.slots.clear()

    def step(self, step: Step) -> StepResult:
        """Check what llama.cpp would assert on, then compute."""
        assert self.is_open
        self.steps.append(step)
        slots = [row.slot for row in step.rows]
        assert slots == sorted(set(slots)), f"rows are not in ascending slot order: {slots}"
        assert 0 < step.n_tokens <= self.n_batch
        answer = self.before_step(step) if self.before_step else None
        if answer is None and self.threaded and self._pass_time(step.budget_s):
            answer = StepResult(status=StepStatus.ABORTED)
        if answer is not None:
            return answer
        if not self.streams_separate and self._n_used() + step.n_tokens > (self.n_cells or self.n_ctx):
            return StepResult(status=StepStatus.NO_ROOM, rc=1)
        for row in step.rows:
            self._remember(row)
        for row in step.rows:
            self.slots[row.slot].forget()
        sampled = tuple(self._draw(row) if row.sampler is not None else None for row in step.rows)
        return StepResult(status=StepStatus.OK, sampled=sampled, compute_s=self.step_delay_s)

    def cut(self, slot: int, n_keep: int) -> bool:
        """See `Backend.cut`."""
        if n_keep == 0:
            self.slots.pop(slot, None)
            return True
        held = self._held(slot)
        if self.memory_kind is MemoryKind.WHOLE:
            return held.n == n_keep
        return held.cut(n_keep)

    # --- parts: where memory is not in separate streams ---

    def share(self, src: int, dst: int, start: int, end: int) -> None:
        """See `OptionalBackend.share`."""
        self.slots.setdefault(dst, FakeMemory(self._layout)).share(self.slots[src], start, end)

    def export_bytes(self, slot: int, start: int, end: int, part: PartKind = PartKind.BASE) -> int:
        """See `OptionalBackend.export_bytes`: two numbers of four bytes a cell, 24 bytes a state."""
        return len(self._held(slot).export(start, end, part))

    def export(
        self, slot: int, start: int, end: int, into: memoryview, part: PartKind = PartKind.BASE
    ) -> int:
        """See `OptionalBackend.export`."""
        payload = self._held(slot).export(start, end, part)
        into[: len(payload)] = payload
        return len(payload)

    def import_(
        self,
        slot: int,
        block: tuple[int, int],
        wanted: tuple[int, int],
        data: memoryview,
        part: PartKind = PartKind.BASE,
    ) -> bool:
        """See `OptionalBackend.import_`."""
        # The whole block passes through a sequence of its own.
        n_used = block[1] - block[0] if part is PartKind.BASE and self._layout.base else 0
        if self._n_used() + n_used > (self.n_cells or self.n_ctx):
            return False
        held = self._held(slot)
        arrived = held.import_(block, wanted, data, part)
        if arrived:
            self.slots[slot] = held
        return arrived

    def is_at(self, slot: int, n: int) -> bool:
        """See `OptionalBackend.is_at`."""
        return self._held(slot).complaint(n) is None

    # --- optional ---

    def n_kv(self, slot: int) -> int:
        """See `OptionalBackend.n_kv`."""
        return self._held(slot).n

    def clear(self) -> None:
        """See `OptionalBackend.clear`."""
        self.slots.clear()

    def probe_cold(self) -> str | None:
        """See `OptionalBackend.probe_cold`: arithmetic has no other bits."""
        return None

    def rebuild(self) -> None:
        """See `OptionalBackend.rebuild`."""
        self.n_rebuilt += 1
        self.slots.clear()

    def abort(self) -> None:
        """See `OptionalBackend.abort`."""
        self._abort.set()

    def clear_abort(self) -> None:
        """See `OptionalBackend.clear_abort`."""
        self._abort.clear()

    def embed(self, rows: Sequence[EmbedRow], budget_s: float | None = None) -> EmbedResult:
        """See `OptionalBackend.embed`."""
        if self.embedder is None:
            raise NotSupported("this FakeBackend has no embedder")
        return self.embedder.embed(rows, budget_s)

    def abort_embed(self) -> None:
        """See `OptionalBackend.abort_embed`."""
        if self.embedder is not None:
            self.embedder.abort()

    def clear_abort_embed(self) -> None:
        """See `OptionalBackend.clear_abort_embed`."""
        if self.embedder is not None:
            self.embedder.clear_abort()

    def new_sampler(self, params: SamplingParams) -> FakeSampler:
        """See `OptionalBackend.new_sampler`. The only grammar it knows is `root ::= digits`."""
        if params.grammar is not None and params.grammar != "root ::= digits":
            raise InvalidGrammar(f"FakeBackend cannot read this grammar: {params.grammar!r}")
        return FakeSampler(params, self.live_samplers)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """UTF-8 bytes; with `parse_special`, `<eog>` and `<control>` are their tokens."""
        special = SPECIAL if parse_special else {}
        parts = re.split("(<eog>|<control>)", text)
        try:
            return [t for part in parts for t in special.get(part) or part.encode()]
        except UnicodeEncodeError as why:
            raise InvalidContent(f"the text has a lone surrogate: {why}") from None

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """The inverse of `tokenize`."""
        if any(not 0 <= t < N_VOCAB for t in tokens):
            raise InvalidContent(f"a token is not in the vocabulary of {N_VOCAB}")
        names = {ids[0]: name.encode() for name, ids in SPECIAL.items()}
        return b"".join(names.get(t) or bytes([t]) for t in tokens)

    def piece(self, token: int) -> bytes:
        """The byte itself; nothing for the control token."""
        return bytes([token]) if token < EOG else b""

    def key_pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """See `OptionalBackend.key_pieces`."""
        return [bytes([t]) if t < EOG else b"\xff" + t.to_bytes(4, "big") for t in tokens]

    def is_eog(self, token: int) -> bool:
        """Only EOG."""
        return token == EOG

    # --- arithmetic ---

    def _n_used(self) -> int:
        return len({id(cell) for held in self.slots.values() for cell in held.cells.values()})

    def _held(self, slot: int) -> FakeMemory:
        """What a slot holds; a fresh, empty memory that belongs to nobody if it holds nothing."""
        return self.slots.get(slot) or FakeMemory(self._layout)

    def _pass_time(self, budget_s: float | None) -> bool:
        """Wait `step_delay_s`; True if `abort` ended it."""
        return self._abort.wait(self.step_delay_s) if self.step_delay_s else False

    def _remember(self, row: Row) -> None:
        held = self.slots.setdefault(row.slot, FakeMemory(self._layout))
        complaint = held.complaint(row.pos)
        assert complaint is None, f"slot {row.slot} {complaint}, the row starts at {row.pos}"
        before = held.state
        held.append(row.tokens)
        if self.script and before and held.state and not held.layout.base:
            self._before[held.state] = before, tuple(row.tokens)

    def _draw(self, row: Row) -> Sampled:
        sampler = row.sampler
        assert isinstance(sampler, FakeSampler)
        assert sampler in self.live_samplers, "a closed sampler was used"
        held = self.slots[row.slot]
        token = self._scripted(sampler, held) if self.script else _hashed(sampler, held.evidence())
        sampler.n_drawn += 1
        logprob = None
        if sampler.params.logprobs is not None:
            top = tuple((i, -1.0 - i) for i in range(sampler.params.logprobs))
            logprob = TokenLogprob(token=token, logprob=-0.5, top=top)
        return Sampled(token=token, logprob=logprob)

    def _scripted(self, sampler: FakeSampler, held: FakeMemory) -> int:
        if sampler.script is None:
            assert self.script is not None
            prompt = self.detokenize(self._history(held)).decode(errors="replace")
            sampler.script = [*self.script(prompt), EOG]
        return sampler.script[min(sampler.n_drawn, len(sampler.script) - 1)]

    def _history(self, held: FakeMemory) -> list[int]:
        """The tokens of a sequence. A state alone does not tell them: what led there is looked up."""
        if held.layout.base:
            return [held.cells[pos] for pos in range(held.n)]
        state, tokens = held.state, list[int]()
        while state and state.n:
            assert state in self._before, (
                "a script needs the prompt's text, and this state came from elsewhere"
            )
            state, row = self._before[state]
            tokens[:0] = row
        return tokens


def _hashed(sampler: FakeSampler, evidence: tuple[int, ...]) -> int:
    """A printable ASCII byte, so that replies are text and never end by themselves."""
    p = sampler.params
    low, n = (48, 10) if p.grammar else (32, 95)
    seed = p.seed if p.temperature else 0
    chain = (p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty, seed, p.grammar, p.logit_bias)
    what = repr((evidence, chain, sampler.n_drawn))
    return low + int.from_bytes(hashlib.blake2b(what.encode(), digest_size=4).digest(), "big") % n
