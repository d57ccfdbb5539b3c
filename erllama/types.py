"""What a request gives back (stream events, the completion, its statistics); kinds and parts of memory."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from typing import Any, Literal

HitKind = Literal["exact", "partial", "cold", "sticky", "continuation"]
FinishReason = Literal["stop", "length", "cancelled"]
MissReason = Literal[
    "cache_off",  # the request said so
    "not_cached",  # this model's memory cannot be kept
    "restore_failed",  # more is stored than could be brought back
    "evicted",  # it was stored, and had to make room
    "differs_at",  # what is kept goes on differently
    "part_missing",  # more is kept, but this memory can be gone on from only where a window or state is
    "ends_at",  # nothing that is kept goes on like the prompt
    "below_gate",  # nothing is kept, and the prompt is too short to be
    "nothing_stored",  # nothing that begins like the prompt is kept
]


class MemoryKind(enum.Enum):
    """How a model remembers, and with it what may be cut, copied and saved.

    DENSE: every position in cells; any range may be cut and copied.
    WINDOW: some layers keep a sliding window; a cut may silently lack cells (`llama.Memory.can_cut`).
    RECURRENT: one state per sequence; nothing but the whole can be removed or copied.
    HYBRID: cells plus a state.
    WHOLE: cells that cannot be cut; only whole states, never a ranged copy.
    NONE: no memory (embedding models).
    """

    DENSE = "dense"
    WINDOW = "window"
    RECURRENT = "recurrent"
    HYBRID = "hybrid"
    WHOLE = "whole"
    NONE = "none"


class PartKind(enum.IntEnum):
    """What of a block's KV a part holds; each is stored, budgeted and evicted on its own."""

    BASE = 1  # full-attention KV of the block; empty where a model has none, then it only holds the path
    WINDOW = 2  # sliding-window layers
    STATE = 3  # recurrent state at the block's end
    WHOLE = 4  # the whole sequence state up to the block's end, where ranges cannot be cut out

    @property
    def suffix(self) -> str:
        """The file-name suffix of this kind."""
        return f".{self.name.lower()}.kvc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """What a model promises about the bits of its answers.

    Every answer from the cache equals that of the same engine had it never dropped the sequence. `cold`:
    whether `exact="cold"` holds besides, the bits of a fresh context (None: not tried yet); `reason` says why
    not. `default`: what requests get that do not say. `deterministic`: all of them, at any concurrency.
    """

    cold: bool | None
    reason: str | None
    default: Literal["session", "cold"]
    deterministic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingFacts:
    """How a model that was loaded for embeddings makes its vectors.

    `n_embd` numbers each; with pooling "rank" these are scores. `pooling`: how the vectors of an input's
    tokens become one; "none" takes that of the last token. `n_rows` tokens of up to `n_lanes` inputs are
    computed at once. An input may be as long as `n_ctx`; `whole`: and it must fit into `n_rows`.
    """

    n_embd: int
    pooling: Literal["none", "mean", "cls", "last", "rank"]
    n_ctx: int
    n_rows: int
    n_lanes: int
    whole: bool

    @property
    def n_tokens_max(self) -> int:
        """Tokens of the longest input."""
        return min(self.n_ctx, self.n_rows) if self.whole else self.n_ctx


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDelta:
    """Tokens taken from the cache or live cells at admission, and tokens stored on top."""

    read: int = 0
    created: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Token counts and wall-clock seconds of one request.

    [0, n_cached) restored | [n_cached, n_prompt) prefilled | n_generated sampled.
    `first_token_s` runs from submission to the first sampled token; the others are disjoint parts.
    """

    n_prompt: int = 0
    n_cached: int = 0
    n_generated: int = 0
    queue_s: float = 0.0
    restore_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0

    @property
    def n_computed(self) -> int:
        """Prompt tokens that went through the model."""
        return self.n_prompt - self.n_cached


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural-log probability of one generated token before sampling, with the `top` alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """Why not more of a prompt was reused. `str()` of it is a sentence.

    `index`: the first token that had to be computed for that reason. With "differs_at", `stored` and
    `asked` are the texts around the first token that differs, as it is kept and as it was asked.
    """

    reason: MissReason
    message: str
    index: int = 0
    stored: str = ""
    asked: str = ""

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheHit:
    """How a request was admitted, and how many tokens at its beginning were reused."""

    kind: HitKind
    n_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """The outcome of `prefill_only`: the prompt is in memory, and nothing was sampled.

    `finish_key` names the stored history; None where it is too short for the policy and not stored.
    """

    context_tokens: list[int]
    committed_tokens: int
    finish_key: bytes | None = None
    cache_hit_kind: HitKind = "cold"
    cache_source: str | None = None
    cache_delta: CacheDelta = field(default_factory=CacheDelta)
    miss: Miss | None = None
    stats: Stats = field(default_factory=Stats)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool. `arguments_json` is its arguments as generated; `arguments` the same, decoded.

    While it is being generated `arguments` is empty and `arguments_json` a beginning.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    arguments_json: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The shape OpenAI gave calls, arguments as JSON text."""
        text = self.arguments_json or json.dumps(self.arguments, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": text}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """A message, as `chat` answers it and as it may stand in the next request's messages.

    `reasoning_content` is None where the model wrote none.
    """

    role: str
    content: str = ""
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The shape OpenAI gave messages, arguments as JSON text."""
        made: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning_content is not None:
            made["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            made["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The outcome of one request.

    `generated` holds every sampled id, end-of-generation included; `context_tokens` is the prompt
    followed by it, and `committed_tokens` its length. `reply` ends before a matched stop string. Only answers
    of `chat` have a `message`; its content is their `reply`.
    """

    reply: str
    generated: list[int]
    context_tokens: list[int]
    committed_tokens: int
    finish_reason: FinishReason
    seed: int
    stop_sequence: str | None = None
    logprobs: list[TokenLogprob] | None = None
    finish_key: bytes | None = None
    cache_hit_kind: HitKind = "cold"
    cache_source: str | None = None
    cache_delta: CacheDelta = field(default_factory=CacheDelta)
    miss: Miss | None = None
    stats: Stats = field(default_factory=Stats)
    message: ChatMessage | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Names one request; carried by each of its events."""

    id: int
    model_id: str

    def __str__(self) -> str:
        return f"{self.model_id}#{self.id}"


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of text: whole characters, never empty. One that is cut off by the end is U+FFFD."""

    text: str
    request: Request


@dataclass(frozen=True, slots=True)
class TokenId:
    """One sampled token id; every one is announced, with or without visible text.

    `logprob`: its log-probability, where `logprobs` was asked for.
    """

    id: int
    request: Request
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Thinking:
    """A piece of what the model thinks before it answers."""

    text: str
    request: Request


@dataclass(frozen=True, slots=True)
class ThinkingEnd:
    """A thinking block is over. `signature`: HMAC-SHA256 of its text, b"" where no signing key is set."""

    signature: bytes
    request: Request


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. The first of each `index` has `id` and `name` and no arguments; the others are
    None and have more of the arguments' JSON text.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str
    request: Request


@dataclass(frozen=True, slots=True)
class Done:
    """The last event of a stream."""

    completion: Completion
    request: Request


Event = Token | TokenId | Thinking | ThinkingEnd | ToolCallDelta | Done
