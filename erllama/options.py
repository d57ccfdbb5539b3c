"""The options users type, and the one mechanism that checks them.

Every option class is a frozen, keyword-only dataclass whose fields carry a *check*: a function
that returns the accepted value or a sentence saying what was expected. A wrong name raises
`UnknownOption` with the nearest right one, a wrong value `InvalidOption`; both before any native
work begins.

Defaults follow llama.cpp's where it has one (llama.h, `llama_context_default_params`).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, TypeGuard, TypeVar, cast, dataclass_transform

from .errors import InvalidOption, UnknownOption

Check = Callable[[object], object]
T = TypeVar("T")


class Rejected(Exception):
    """Raised by a check; its text completes "expected …"."""


def option(*, default: Any, check: Check) -> Any:
    """A dataclass field with its check."""
    return dataclasses.field(default=default, metadata={"check": check})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option,))
def options(cls: type[T]) -> type[T]:
    """Make `cls` a frozen keyword-only dataclass that checks names and values.

    Raises (when instantiated): `UnknownOption`, `InvalidOption`.
    """
    made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    generated = made.__init__
    fields = {f.name: f for f in dataclasses.fields(made)}  # type: ignore[arg-type]  # made a dataclass above

    def __init__(self: Any, **values: object) -> None:
        for name in values:
            if name not in fields:
                raise unknown_option(name, fields, where=cls.__name__)
        generated(self, **values)
        for name, field in fields.items():
            value = getattr(self, name)
            try:
                accepted = field.metadata["check"](value)
            except Rejected as why:
                raise InvalidOption(
                    f"{cls.__name__}.{name}={value!r}: expected {why}", detail={"key": name, "value": value}
                ) from None
            object.__setattr__(self, name, accepted)
        together = getattr(self, "check_together", None)
        if together is not None:
            together()

    made.__init__ = __init__  # type: ignore[method-assign]  # the generated one runs inside it
    return made


def unknown_option(name: str, known: Iterable[str], *, where: str) -> UnknownOption:
    """The error for an option that does not exist, naming the nearest that does."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known) or 'none'}"
    return UnknownOption(
        f"{where} has no option {name!r}; {hint}", detail={"key": name, "nearest": near[0] if near else None}
    )


# --- checks ---------------------------------------------------------------------------------------


def integer(low: int, high: int | None = None) -> Check:
    """A whole number in [low, high]; booleans are refused."""
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def check(value: object) -> int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise Rejected(wanted)
        number = int(value.__index__())
        if number < low or (high is not None and number > high):
            raise Rejected(wanted)
        return number

    return check


def _finite(value: object) -> TypeGuard[float]:
    """Whether it is a number that a double can hold: NaN compares false, whole numbers may be too large."""
    limit = sys.float_info.max
    return not isinstance(value, bool) and isinstance(value, Real) and -limit <= cast("float", value) <= limit


def number(low: float, high: float = math.inf, *, above_low: bool = False) -> Check:
    """A finite number in [low, high], or (low, high] with `above_low`."""
    border = "above" if above_low else "of at least"
    wanted = f"a finite number {border} {low:g}" + ("" if high == math.inf else f" and at most {high:g}")

    def check(value: object) -> float:
        if not _finite(value):
            raise Rejected(wanted)
        if value < low or value > high or (above_low and value == low):
            raise Rejected(wanted)
        return float(value)

    return check


def boolean(value: object) -> bool:
    """True or False, nothing else."""
    if not isinstance(value, bool):
        raise Rejected("True or False")
    return value


def choice(*allowed: object) -> Check:
    """One of a few literal values."""
    wanted = "one of " + ", ".join(repr(a) for a in allowed)

    def check(value: object) -> object:
        for candidate in allowed:
            if type(value) is type(candidate) and value == candidate:
                return value
        raise Rejected(wanted)

    return check


def optional(inner: Check) -> Check:
    """None, or what `inner` accepts."""

    def check(value: object) -> object:
        if value is None:
            return None
        try:
            return inner(value)
        except Rejected as why:
            raise Rejected(f"None or {why}") from None

    return check


def string(value: object) -> str:
    """Any text."""
    if not isinstance(value, str):
        raise Rejected("a string")
    return value


def binary(value: object) -> bytes:
    """Any bytes."""
    if not isinstance(value, (bytes, bytearray)):
        raise Rejected("bytes")
    return bytes(value)


def hashable(value: object) -> Hashable:
    """Any value that can be a key."""
    try:
        hash(value)
    except TypeError:
        raise Rejected("a hashable value") from None
    return value


def stop_strings(value: object) -> tuple[str, ...]:
    """One non-empty string or a sequence of them."""
    wanted = "a string or a sequence of strings, none of them empty"
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(s, str) and s for s in items):
        raise Rejected(wanted)
    return tuple(items)


def logit_biases(value: object) -> dict[int, float]:
    """Token id → number added to its logit; minus infinity bans the token."""
    wanted = "a mapping of token id to number"
    if not isinstance(value, Mapping):
        raise Rejected(wanted)
    biases: dict[int, float] = {}
    for token, bias in value.items():
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise Rejected(wanted)
        if not _finite(bias) and bias != -math.inf:
            raise Rejected(wanted)
        biases[int(token)] = float(bias)
    return biases


def sequence(value: object) -> tuple[object, ...]:
    """Any sequence but text."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise Rejected("a sequence")
    return tuple(value)


def tensor_shares(value: object) -> tuple[float, ...]:
    """At most 16 non-negative numbers (llama.cpp's `llama_max_devices()` on every build)."""
    wanted = "at most 16 non-negative numbers"
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > 16:
        raise Rejected(wanted)
    for share in value:
        if not _finite(share) or share < 0:
            raise Rejected(wanted)
    return tuple(float(share) for share in value)


# --- what the machine offers ----------------------------------------------------------------------


def usable_cpus() -> int:
    """CPUs this process may use: its affinity mask, capped by a cgroup quota where there is one."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as f:  # cgroup v2: "<quota|max> <period>", microseconds
            quota, period = f.read().split()
        if quota != "max":
            n = min(n, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return n  # no cgroup v2 here: the affinity mask is all there is to know
    return n


def default_threads() -> int:
    """Physical cores, but never more than the usable CPUs."""
    import psutil  # 30 ms that `erllama --help` need not spend

    return max(1, min(psutil.cpu_count(logical=False) or usable_cpus(), usable_cpus()))


# --- the options ----------------------------------------------------------------------------------

KvType = Literal["f16", "f32", "bf16", "q4_0", "q5_0", "q5_1", "q8_0"]
KV_TYPES = ("f16", "f32", "bf16", "q4_0", "q5_0", "q5_1", "q8_0")
LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap_mlock", "direct_io")


@options
class ModelOptions:
    """How the weights are loaded.

    `use_mmap`/`use_mlock` are the older spelling of `load_mode`; giving both is refused.
    """

    n_gpu_layers: int = option(default=0, check=integer(-1))
    split_mode: Literal["none", "layer", "row"] = option(
        default="layer", check=choice("none", "layer", "row")
    )
    main_gpu: int = option(default=0, check=integer(0))
    tensor_split: Sequence[float] = option(default=(), check=tensor_shares)
    load_mode: Literal["auto", "none", "mmap", "mlock", "mmap_mlock", "direct_io"] = option(
        default="auto", check=choice(*LOAD_MODES)
    )
    use_mmap: bool | None = option(default=None, check=optional(boolean))
    use_mlock: bool | None = option(default=None, check=optional(boolean))
    vocab_only: bool = option(default=False, check=boolean)

    def check_together(self) -> None:
        """Refuse what each field allows and both together do not."""
        if self.load_mode != "auto" and (self.use_mmap is not None or self.use_mlock is not None):
            raise InvalidOption(
                "ModelOptions: give load_mode or use_mmap/use_mlock, not both",
                detail={"key": "load_mode", "value": self.load_mode},
            )

    @property
    def resolved_load_mode(self) -> str:
        """`load_mode`, or what the two booleans mean. An absent boolean is llama.cpp's former default."""
        if self.use_mmap is None and self.use_mlock is None:
            return self.load_mode
        mmap, mlock = self.use_mmap is not False, self.use_mlock is True
        return {(0, 0): "none", (1, 0): "mmap", (0, 1): "mlock", (1, 1): "mmap_mlock"}[mmap, mlock]


@options
class ContextOptions:
    """How one model's context is laid out and driven.

    `n_ctx` is the number of tokens one request may use (None: what the model was trained for).
    `n_ubatch`, `n_threads`, `n_threads_batch` and `prefill_chunk_size` take a value from the others
    when None; `resolved()` fills them in.
    """

    n_ctx: int | None = option(default=2048, check=optional(integer(1, 2**31 - 1)))
    n_batch: int = option(default=512, check=integer(1, 2**20))
    n_ubatch: int | None = option(default=None, check=optional(integer(1, 2**20)))
    n_seq_max: int = option(default=1, check=integer(1, 128))
    n_threads: int | None = option(default=None, check=optional(integer(1, 512)))
    n_threads_batch: int | None = option(default=None, check=optional(integer(1, 512)))
    flash_attn: bool | Literal["auto"] = option(default="auto", check=choice(True, False, "auto"))
    type_k: KvType = option(default="f16", check=choice(*KV_TYPES))
    type_v: KvType = option(default="f16", check=choice(*KV_TYPES))
    kv_unified: bool = option(default=True, check=boolean)
    embeddings: bool = option(default=False, check=boolean)
    pooling: Literal["none", "mean", "cls", "last", "rank"] | None = option(
        default=None, check=optional(choice("none", "mean", "cls", "last", "rank"))
    )
    prefill_chunk_size: int | float | None = option(
        default=None, check=lambda v: v if v == math.inf else optional(integer(1))(v)
    )
    step_target_s: float = option(default=0.5, check=number(0, above_low=True))
    decode_budget_s: float | None = option(default=None, check=optional(number(0)))

    def resolved(self) -> ContextOptions:
        """The same options with every derived value filled in; `n_threads` never exceeds the usable CPUs."""
        n_ubatch = min(self.n_ubatch or self.n_batch, self.n_batch)
        n_threads = min(self.n_threads or default_threads(), usable_cpus())
        chunk = self.prefill_chunk_size
        if chunk is None:
            # Pieces of at least 64 rows use the same flash-attention kernel, so they give equal bits.
            chunk = max(64, self.n_batch // 4 // 64 * 64)
        return dataclasses.replace(
            self,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
            n_threads_batch=min(self.n_threads_batch or n_threads, usable_cpus()),
            prefill_chunk_size=chunk,
        )


@options
class GenerationOptions:
    """What one request may say about its generation. None: the model's own value, else the default.

    Sampling defaults are the GGUF's `general.sampling.*` where present, else temperature 0.8,
    top_k 40, top_p 0.95, min_p 0.05, repetition_penalty 1.0. `seed=None` draws one.
    """

    max_tokens: int = option(default=64, check=integer(1))
    temperature: float | None = option(default=None, check=optional(number(0)))
    top_k: int | None = option(default=None, check=optional(integer(0)))
    top_p: float | None = option(default=None, check=optional(number(0, 1)))
    min_p: float | None = option(default=None, check=optional(number(0, 1)))
    repetition_penalty: float | None = option(default=None, check=optional(number(0, above_low=True)))
    seed: int | None = option(default=None, check=optional(integer(0, 2**32 - 2)))
    grammar: str | None = option(default=None, check=optional(string))
    grammar_first: bool = option(default=False, check=boolean)
    stop: str | Sequence[str] = option(default=(), check=stop_strings)
    logit_bias: Mapping[int, float] | None = option(default=None, check=optional(logit_biases))
    logprobs: int | None = option(default=None, check=optional(integer(0, 100)))
    on_full: Literal["block", "error"] = option(default="block", check=choice("block", "error"))
    cache: Literal["on", "read", "off"] = option(default="on", check=choice("on", "read", "off"))
    session_id: Hashable = option(default=None, check=hashable)
    parent_key: bytes | None = option(default=None, check=optional(binary))
    prefix_checkpoint_len: int | None = option(default=None, check=optional(integer(1)))


@options
class EngineConfig:
    """What holds for a whole engine.

    `stream_buffer_events`: how many events wait for a slow reader before its sequence skips steps.
    `tiers`: where KV is kept besides RAM (`DiskTier`, `RamFileTier`). `ram_max_bytes`: budget of the RAM
    tier. `writer_max_concurrent`: saves written at once. `evict_save_timeout_s`: how long an unload waits
    for what is still to be saved.
    """

    stream_buffer_events: int = option(default=256, check=integer(4))
    tiers: Sequence[Any] = option(default=(), check=sequence)
    ram_max_bytes: int = option(default=1 << 30, check=integer(0))
    writer_max_concurrent: int = option(default=2, check=integer(1, 64))
    evict_save_timeout_s: float = option(default=30.0, check=number(0))
