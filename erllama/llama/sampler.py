"""A request's own sampler chain: from logits to a token."""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from erllama.backend import Guide
from erllama.errors import (
    DecodeFailed,
    ErllamaError,
    InvalidContent,
    InvalidGrammar,
    InvalidOption,
    NativeError,
    NoLogits,
    NotSupported,
)

from . import logs
from .backend import ensure_backend
from .ffi import Library, library
from .handle import Exclusive

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from erllama.backend import ThinkingSpan

    from .context import Context
    from .vocab import Vocab

# shim_sampling.cpp
NO_LOGITS, NOTHING_ALLOWED, REFUSED_BY_GRAMMAR, NOT_A_NUMBER = -1, -2, -3, -4
MAX_GRAMMAR_BYTES = 4 * 2**20
GREEDY_BELOW = 1e-6  # draws like greedy, and logits divided by much less overflow a float


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerParams:
    """How tokens are chosen. Temperature 0 (or below 1e-6) is greedy; a bias of minus infinity bans a token.

    `grammar` is GBNF text; it is asked about the sampled token, and about all tokens only when it
    rejects that one. With `grammar_first` it filters before everything else, every time: slower,
    and what the other samplers see is already legal. `guide` says where a chat's grammar and thinking begin.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    penalty_last_n: int = 64
    seed: int = 0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    grammar: str | None = None
    grammar_first: bool = False
    guide: Guide = field(default_factory=Guide)


OF_THE_CHAIN = {
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "penalty_last_n", "seed", "logit_bias"),
    "grammar_first",  # says nothing without a grammar
}


class SamplerChain:
    """logit bias → repetition penalty → top-k → top-p → min-p → temperature and draw (or greedy).

    Tokens the model suppresses are banned first. Keeps its model alive; `close()` when done.
    """

    def __init__(self, vocab: Vocab, params: SamplerParams) -> None:
        """Raises: `InvalidOption`, `InvalidContent` (a bias), `InvalidGrammar`, `HandleClosed`."""
        _check(params)
        lib = library()
        self.params = params
        self.vocab = vocab
        self._lib = lib
        bias = _biases(vocab, params)
        with vocab._model:
            self.row, self._keepalive = _native(lib, vocab, params, bias)
            ptr = self.row.sampler
            self.handle = Exclusive(lib, ptr, "sampling_free", "sampler", vocab._model.owned)
        self._prefill()

    def __enter__(self) -> SamplerChain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sample(self, context: Context, i: int) -> int:
        """Choose a token from row `i` of the last decode and accept it.

        Raises: `NotSupported` (a context of another model), `NoLogits`, `InvalidGrammar` (no token of
        the vocabulary can go on), `DecodeFailed` (the model computed no numbers), `HandleClosed`.
        """
        if context.model.vocab is not self.vocab:
            raise NotSupported("a sampler fits the model it was made for, and no other")
        with self.handle as ptr, context.handle as ctx:
            context.need_logits(i)
            token = int(self._lib.sampling_next(ptr, ctx, i))
        if token < 0:
            raise self._error(token)
        return token

    def accept(self, token: int) -> None:
        """Take a token as if it had been sampled. Raises: `InvalidGrammar` if the grammar forbids it."""
        if not 0 <= token < self.vocab.n_tokens:
            raise InvalidContent(f"token {token} is not in the vocabulary", detail={"token": token})
        with self.handle as ptr:
            code = int(self._lib.sampling_accept(ptr, token))
        if code < 0:
            raise self._error(code, token)

    def reset(self) -> None:
        """Forget what was accepted; the seed starts over."""
        with self.handle as ptr:
            self._lib.sampling_reset(ptr)
        self._prefill()

    def _prefill(self) -> None:
        guide = self.params.guide
        with self.handle as ptr:
            codes = [self._lib.sampling_prefill(ptr, token, guide.covers_prefill) for token in guide.prefill]
        for token, code in zip(guide.prefill, codes, strict=True):
            if code < 0:
                self.close()
                raise self._error(code, token)

    def close(self) -> None:
        """Free the chain. Idempotent."""
        self.handle.close()

    def _error(self, code: int, token: int | None = None) -> ErllamaError:
        if code == REFUSED_BY_GRAMMAR:
            what = "what its trigger sampled" if token is None else f"token {token}"
            return InvalidGrammar(f"the grammar does not allow {what} here", detail={"token": token})
        if code == NOTHING_ALLOWED:
            return InvalidGrammar("the grammar allows no token of the vocabulary here")
        if code == NOT_A_NUMBER:
            return DecodeFailed("the logits hold NaN", rc=0)
        return NoLogits("the last decode left no logits for this row")


def live_samplers() -> int:
    """Native sampler chains that are not freed yet; for leak tests."""
    return int(library().sampling_count())


def _check(params: SamplerParams) -> None:
    """Refuse what does not fit llama.cpp's types (NaN compares false), and a penalty window of gigabytes."""
    for name, low, high in (
        ("temperature", 0.0, math.inf), ("top_k", 0, 2**31 - 1), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0),
        ("repetition_penalty", 0.0, math.inf), ("penalty_last_n", 0, 2**20), ("seed", 0, 2**32 - 1),
    ):  # fmt: skip
        value = getattr(params, name)
        if not low <= value <= high:
            raise InvalidOption(
                f"SamplerParams.{name}={value}: expected {low:g} to {high:g}",
                detail={"key": name, "value": value},
            )


def _biases(vocab: Vocab, params: SamplerParams) -> dict[int, float]:
    biases = dict(params.logit_bias)
    for token, bias in biases.items():
        if not 0 <= token < vocab.n_tokens:
            raise InvalidContent(
                f"logit_bias: token {token} is not in the vocabulary of {vocab.n_tokens}",
                detail={"token": token},
            )
        if math.isnan(bias):
            raise InvalidContent(f"logit_bias: NaN for token {token}", detail={"token": token})
    return {**biases, **dict.fromkeys(vocab.suppressed, -math.inf)}


def _native(lib: Library, vocab: Vocab, params: SamplerParams, bias: dict[int, float]) -> tuple[Any, Any]:
    """`struct el_row *` with its sampler, which owns its parts, and what the row borrows.

    When something fails on the way, the parts are freed.
    """
    row, biases = _row(lib, params, bias)
    with ExitStack() as parts:
        grammar = lib.ffi.NULL
        if params.grammar is not None:
            grammar = _grammar(lib, vocab, params.grammar, params.guide)
            parts.callback(lib.sampler_free, grammar)
        thinking = lib.ffi.NULL
        if params.guide.thinking is not None:
            thinking = _thinking(lib, vocab, params.guide.thinking)
            parts.callback(lib.sampler_free, thinking)
        chain = lib.sampler_chain_init(lib.sampler_chain_default_params())
        parts.callback(lib.sampler_free, chain)
        _fill(lib, chain, vocab.n_tokens, params, bias)
        ptr = lib.sampling_new(
            vocab.n_tokens, chain, grammar, thinking, params.guide.lazy, params.grammar_first
        )
        parts.pop_all()
        parts.callback(lib.sampling_free, ptr)  # which owns them now
        if grammar != lib.ffi.NULL and params.guide.lazy and not params.guide.trigger_patterns:
            vocab.checked(tokens := list(params.guide.trigger_tokens))
            lib.sampling_watch(ptr, vocab._ptr, tokens, len(tokens))
        parts.pop_all()
        row.sampler, row.chain = ptr, chain
        return row, biases


def _row(lib: Library, params: SamplerParams, bias: dict[int, float]) -> tuple[Any, Any]:
    """What `sample_rows` has to know, but for the sampler itself."""
    row = lib.ffi.new("struct el_row *")
    biases = lib.ffi.new("llama_logit_bias[]", sorted(bias.items()))
    row.bias, row.n_bias = biases, len(bias)
    if _is_chain_alone(params):
        row.is_greedy = params.temperature < GREEDY_BELOW
        row.top_k = 0 if row.is_greedy else params.top_k
    return row, biases


def _is_chain_alone(params: SamplerParams) -> bool:
    """Whether nothing but biases comes before greedy or top-k: then most of the vocabulary may be left out.

    Whatever is not known here to be harmless is taken for a grammar.
    """
    if params.grammar is None and params.guide.thinking is None:
        params = dataclasses.replace(params, guide=Guide())  # it speaks to these two
    plain = type(params)()
    others = [field.name for field in dataclasses.fields(params) if field.name not in OF_THE_CHAIN]
    return not _penalizes(params) and all(getattr(params, name) == getattr(plain, name) for name in others)


def _penalizes(params: SamplerParams) -> bool:
    return params.repetition_penalty != 1.0 and params.penalty_last_n != 0


def _fill(lib: Library, chain: Any, n_vocab: int, params: SamplerParams, bias: dict[int, float]) -> None:
    if bias:
        entries = lib.ffi.new("llama_logit_bias[]", list(bias.items()))
        lib.sampler_chain_add(chain, lib.sampler_init_logit_bias(n_vocab, len(bias), entries))
    if _penalizes(params):
        penalties = lib.sampler_init_penalties(
            n_vocab, params.penalty_last_n, params.repetition_penalty, 0.0, 0.0
        )
        lib.sampler_chain_add(chain, penalties)
    if params.temperature < GREEDY_BELOW:
        lib.sampler_chain_add(chain, lib.sampler_init_greedy())
        return
    if params.top_k > 0:
        lib.sampler_chain_add(chain, lib.sampler_init_top_k(params.top_k))
    if params.top_p < 1:
        lib.sampler_chain_add(chain, lib.sampler_init_top_p(params.top_p, 1))
    if params.min_p > 0:
        lib.sampler_chain_add(chain, lib.sampler_init_min_p(params.min_p, 1))
    lib.sampler_chain_add(chain, lib.sampler_init_temp(params.temperature))
    lib.sampler_chain_add(chain, lib.sampler_init_dist(params.seed))


def _thinking(lib: Library, vocab: Vocab, span: ThinkingSpan) -> Any:
    ends = [token for end in span.ends for token in end]
    vocab.checked([*span.start, *ends, *span.forced])
    budget = span.budget if span.budget is not None else 2**31 - 1
    return lib.thinking_new(
        vocab._ptr, list(span.start), len(span.start), ends, [len(end) for end in span.ends], len(span.ends),
        list(span.forced), len(span.forced), budget,
    )  # fmt: skip


def _grammar(lib: Library, vocab: Vocab, text: str, guide: Guide) -> Any:
    data = _grammar_bytes(text)
    _check_grammar(lib, vocab._ptr, data)
    with logs.captured(lib) as log:
        if guide.lazy:
            patterns = [lib.ffi.new("char[]", pattern.encode()) for pattern in guide.trigger_patterns]
            try:
                grammar = lib.sampler_init_grammar_lazy_patterns(
                    vocab._ptr, data, b"root", patterns, len(patterns),
                    list(guide.trigger_tokens), len(guide.trigger_tokens),
                )  # fmt: skip
            except NativeError as error:  # std::regex
                raise InvalidGrammar(f"a trigger of the grammar: {error}") from None
        else:
            grammar = lib.sampler_init_grammar(vocab._ptr, data, b"root")
    if grammar == lib.ffi.NULL:
        raise InvalidGrammar(f"the grammar: {log.tail()}", detail={"message": log.tail()})
    return grammar


def check_grammar(text: str) -> None:
    """Raise `InvalidGrammar` for what llama.cpp would refuse, with the line. Needs no model."""
    lib = ensure_backend()
    _check_grammar(lib, lib.ffi.NULL, _grammar_bytes(text))


def _check_grammar(lib: Library, vocab: Any, data: bytes) -> None:
    fault = lib.ffi.new("struct el_grammar_fault *")
    if not lib.grammar_check(vocab, data, fault):
        said = lib.ffi.string(fault.message).decode("utf-8", "replace")
        raise InvalidGrammar(
            f"the grammar, line {fault.line}: {said}", detail={"line": fault.line, "message": said}
        )


def _grammar_bytes(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidGrammar(
            f"the grammar has a lone surrogate at position {error.start}", detail={"position": error.start}
        ) from None
    if not text.strip() or "\0" in text:
        raise InvalidGrammar("the grammar is empty" if not text.strip() else "the grammar has a NUL byte")
    if len(data) > MAX_GRAMMAR_BYTES:
        raise InvalidGrammar(f"the grammar has {len(data)} bytes; the most is {MAX_GRAMMAR_BYTES}")
    return data
