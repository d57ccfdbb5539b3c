"""What the engine needs from a model: a synchronous backend, driven from one thread.

The engine plans a `Step` (rows of several sequences), the backend computes it in one go and samples
every row that carries a sampler. `Backend` is the whole contract; only `open`, `close`, `step` and
`cut` are required, and what a backend lacks surfaces as `NotSupported` where a caller asks for it.

Thread: every method runs on the model's own thread, one call at a time, except `abort`, `abort_embed`,
`clear_abort_embed`, `piece`, `is_eog`, `tokenize`, `detokenize`, `new_sampler`, `chat_templates` and
`special_texts`, which any thread may call at any time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .types import MemoryKind as MemoryKind  # part of the contract: `BackendFacts.memory_kind`
from .types import PartKind as PartKind  # part of the contract: what is exported and imported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from .errors import ErllamaError
    from .types import EmbeddingFacts, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a sequence's memory consists of: which parts its stored blocks have, and where it may be cut.

    `base`: positions in cells, of which any range can be shared, exported and imported. `window`: how many
    tokens sliding-window layers look back (0: none); what lies further back is gone. `state`: something that
    exists only at a sequence's end: it is taken and shared only while the sequence is exactly that long.
    """

    base: bool = True
    window: int = 0
    state: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that blocks have."""
        has = {"base": self.base, "window": bool(self.window), "state": self.state}
        return tuple(name for name, there in has.items() if there)

    @property
    def cuttable(self) -> bool:
        """Whether a sequence can be cut at any token."""
        return self.base and not self.window and not self.state

    def cut(self, n_kv: int, n: int) -> int:
        """To how many tokens what holds `n_kv` can be cut for certain: `n`, or all, or none (0).

        A cell is recycled once it is `window` behind the next token, not before.
        """
        if n >= n_kv:
            return n_kv
        return 0 if self.state or (self.window and n_kv >= self.window) else n


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """What an opened backend offers.

    `n_ctx` is the length one request may use; `n_cells` how many tokens all sequences together may
    hold (per sequence where `streams_separate`); `n_slots` how many sequences may be live at once.
    """

    n_ctx: int
    n_cells: int
    n_batch: int
    n_slots: int
    n_vocab: int
    quant_tag: str = ""
    memory_bytes: int = 0  # weights, KV and compute buffers
    memory_kind: MemoryKind = MemoryKind.DENSE
    streams_separate: bool = False
    layout: Layout | None = None  # of what a sequence holds, where it can be kept; None: it cannot
    shape_hash: bytes | None = None  # whose KV this is; None: it is not kept
    compute_hash: bytes = b""  # what else decides its bits: processor variant, devices, threads
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    embeddings: EmbeddingFacts | None = None  # None: it was not opened for embeddings
    generates: bool = True  # False: it gives embeddings and nothing else
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingSpan:
    """How a thinking block begins and ends, in token ids; after `budget` tokens `forced` is sampled.

    `forced` ends with one of the `ends`.
    """

    start: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...]
    forced: tuple[int, ...]
    budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """How a grammar and a thinking block fit into an answer whose beginning the prompt already has.

    `prefill`: the tokens of that beginning; `covers_prefill` if the grammar describes them as well. A `lazy`
    grammar begins where one of its triggers is generated, a pattern (ECMAScript) or a token, outside of
    thinking blocks. `visible`: token ids and the text they show, that show none otherwise.
    """

    lazy: bool = False
    trigger_patterns: tuple[str, ...] = ()
    trigger_tokens: tuple[int, ...] = ()
    prefill: tuple[int, ...] = ()
    covers_prefill: bool = False
    thinking: ThinkingSpan | None = None
    visible: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """A fully resolved sampler chain: nothing is left to a default."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    grammar: str | None = None
    grammar_first: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    guide: Guide = field(default_factory=Guide)


class Sampler(Protocol):
    """One request's sampler chain, with whatever state it carries from token to token."""

    def close(self) -> None:
        """Free it; calling twice is harmless."""


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive tokens of one sequence in a step: positions [pos, pos + len(tokens)).

    With a `sampler`, a token is sampled after the last of them.
    """

    slot: int
    pos: int
    tokens: Sequence[int]
    sampler: Sampler | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Rows in ascending slot order, computed together; `budget_s` is the wall clock they may take."""

    rows: tuple[Row, ...]
    budget_s: float | None = None
    exact: bool = False  # compute with the threads the context was opened with, whatever else is going on

    @property
    def n_tokens(self) -> int:
        """How many tokens the step feeds to the model."""
        return sum([len(row.tokens) for row in self.rows])


class StepStatus(enum.Enum):
    """How a step ended, and what is true afterwards."""

    OK = "ok"
    NO_ROOM = "no_room"  # nothing changed; fewer tokens or fewer sequences may fit
    ABORTED = "aborted"  # some rows may be in memory: ask `n_kv` per slot
    TIMEOUT = "timeout"  # the budget ran out; the context must be rebuilt
    FATAL = "fatal"  # the context must be rebuilt; `rc` has the code


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One sampled token."""

    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The outcome of a step. `sampled` is aligned with its rows; an error concerns that row alone."""

    status: StepStatus
    sampled: tuple[Sampled | ErllamaError | None, ...] = ()
    rc: int = 0
    compute_s: float = 0.0
    sample_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EmbedRow:
    """Consecutive tokens of one input to embed: positions [pos, pos + len(tokens)).

    At `pos` 0 a lane begins anew. With `is_last` the input's vector is wanted after them.
    """

    lane: int
    pos: int
    tokens: Sequence[int]
    is_last: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedResult:
    """What came of `embed`: vectors (n_embd,) aligned with its rows, None for those that are not last."""

    status: StepStatus
    vectors: tuple[npt.NDArray[np.float32] | None, ...] = ()
    rc: int = 0
    compute_s: float = 0.0


@runtime_checkable
class Backend(Protocol):
    """A model that computes steps. See the module docstring for what is optional."""

    def open(self) -> BackendFacts:
        """Load everything. Raises a typed error and leaves nothing behind if it cannot."""

    def close(self) -> None:
        """Free everything."""

    def step(self, step: Step) -> StepResult:
        """Compute all rows and sample those that ask for it."""

    def cut(self, slot: int, n_keep: int) -> bool:
        """Keep [0, n_keep) of a sequence. False if that cannot be done exactly; 0 always can."""


class OptionalBackend(Backend, Protocol):
    """Everything a backend may offer besides."""

    def load_fraction(self) -> float:
        """How far a running `open` is, from 0 to 1. Any thread."""

    def cancel_open(self) -> None:
        """Make a running `open` give up soon. Any thread."""

    def n_kv(self, slot: int) -> int:
        """Tokens of the sequence that are in memory."""

    def share(self, src: int, dst: int, start: int, end: int) -> None:
        """Let `dst`, which ends at `start`, hold [start, end) of `src` as well. No data moves.

        With a window or a state, `src` must end at `end` or hold everything that whoever goes on there needs.
        """

    def export_bytes(self, slot: int, start: int, end: int, part: PartKind = PartKind.BASE) -> int:
        """Size of what `export` would write; 0 if memory has not, or no longer, all of it."""

    def export(
        self, slot: int, start: int, end: int, into: memoryview, part: PartKind = PartKind.BASE
    ) -> int:
        """Write a part of [start, end); returns the bytes written, 0 if memory has not all of it.

        BASE: the cells. WINDOW: what whoever goes on at `end` needs of them in sliding-window layers.
        STATE: the state of a slot that ends at `end`. The live sequence is undisturbed.
        """

    def import_(
        self,
        slot: int,
        block: tuple[int, int],
        wanted: tuple[int, int],
        data: memoryview,
        part: PartKind = PartKind.BASE,
    ) -> bool:
        """Add positions `wanted` of a part exported from `block`; False if it is refused or does not fit.

        BASE and WINDOW parts come in ascending order, each kind by itself, a STATE last. Until all parts
        of what lies before its end are there, the slot cannot go on: see `is_at`.
        """

    def is_at(self, slot: int, n: int) -> bool:
        """Whether the slot holds exactly [0, n), with all that the next token needs."""

    def clear(self) -> None:
        """Forget every sequence: memory is as it was when the context was opened."""

    def probe_cold(self) -> str | None:
        """Whether a warm run gives the bits of a cold one; None, or the reason why not. Memory is empty.

        Tried once and remembered. Without this method `exact="cold"` is not offered.
        """

    def rebuild(self) -> None:
        """Make a fresh, empty context; the weights stay loaded."""

    def abort(self) -> None:
        """Make the step that runs, or is about to, end early with ABORTED. Any thread, no lock."""

    def clear_abort(self) -> None:
        """Forget an earlier `abort`; called before a step is handed over, never by `step`. Any thread."""

    def embed(self, rows: Sequence[EmbedRow], budget_s: float | None = None) -> EmbedResult:
        """Compute rows of inputs, of which memory for generation knows nothing.

        At most `EmbeddingFacts.n_lanes` rows of `n_rows` tokens together; a row that begins behind 0 comes
        alone. After anything but OK every lane begins anew.
        """

    def abort_embed(self) -> None:
        """Make the `embed` that runs, or is about to, end early with ABORTED. Any thread, no lock."""

    def clear_abort_embed(self) -> None:
        """Forget an earlier `abort_embed`; called before rows are handed over. Any thread."""

    def new_sampler(self, params: SamplingParams) -> Sampler:
        """A sampler chain. Raises `InvalidGrammar`.

        Without this method the sampler of a row is an object whose `params` are the request's
        `SamplingParams`, and a request with a grammar is refused.
        """

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Text to token ids."""

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """Token ids to UTF-8 bytes."""

    def piece(self, token: int) -> bytes:
        """The bytes a token shows; empty for control tokens."""

    def key_pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """What identifies each token in a stored history: its text, or 0xFF and its id for control tokens."""

    def chat_templates(self, text: str | None) -> Any:
        """`erllama.llama.ChatTemplates` of the model, or of `text`; without it the backend cannot chat."""

    def special_texts(self) -> list[tuple[int, str, bool]]:
        """Id, text and whether it is a control token, of every token that is read out of text as one."""

    def longest_piece(self) -> int:
        """Bytes of the longest token: n bytes of text are at least n / that many tokens. May block."""

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation."""
