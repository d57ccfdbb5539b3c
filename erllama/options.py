"""The options users type.

Names and values are checked when an options object is made (`erllama.checks`).
Defaults follow llama.cpp's where it has one (llama.h, `llama_context_default_params`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

# Re-exported: whoever declares options of its own (the store, plugins) needs one import only.
from .checks import Rejected as Rejected
from .checks import boolean as boolean
from .checks import choice as choice
from .checks import hashable, is_finite
from .checks import integer as integer
from .checks import number as number
from .checks import option as option
from .checks import optional as optional
from .checks import options as options
from .checks import string as string
from .checks import unknown_option as unknown_option
from .errors import InvalidOption
from .machine import default_threads as default_threads
from .machine import usable_cpus as usable_cpus

INT32_MAX = 2**31 - 1  # llama.cpp's int32_t
MAX_SALT_BYTES = 64

KvType = Literal["f16", "f32", "bf16", "q4_0", "q5_0", "q5_1", "q8_0"]
LoadMode = Literal["auto", "none", "mmap", "mlock", "mmap_mlock", "direct_io"]
SplitMode = Literal["none", "layer", "row"]
Pooling = Literal["none", "mean", "cls", "last", "rank"]
KV_TYPES = get_args(KvType)
LOAD_MODES = get_args(LoadMode)


def stop_strings(value: object) -> tuple[str, ...]:
    """One non-empty string or a sequence of them."""
    wanted = "a string or a sequence of strings, none of them empty"
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(s, str) and s for s in items):
        raise Rejected(wanted)
    return tuple(items)


def functions(value: object) -> tuple[Callable[..., Any], ...]:
    """A sequence of callables."""
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence) or not all(map(callable, value)):
        raise Rejected("a sequence of functions")
    return tuple(value)


def logit_biases(value: object) -> dict[int, float]:
    """Token id → number added to its logit; minus infinity bans the token."""
    wanted = "a mapping of token id to number"
    if not isinstance(value, Mapping):
        raise Rejected(wanted)
    biases: dict[int, float] = {}
    for token, bias in value.items():
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise Rejected(wanted)
        if not is_finite(bias) and bias != -math.inf:
            raise Rejected(wanted)
        biases[int(token)] = float(bias)
    return biases


def binary(value: object) -> bytes:
    """Any bytes."""
    if not isinstance(value, (bytes, bytearray)):
        raise Rejected("bytes")
    return bytes(value)


def salt(value: object) -> bytes:
    """At most 64 bytes: they are a part of every name."""
    if not isinstance(value, (bytes, bytearray)) or len(value) > MAX_SALT_BYTES:
        raise Rejected(f"at most {MAX_SALT_BYTES} bytes")
    return bytes(value)


def mapping(value: object) -> Mapping[str, Any]:
    """Any mapping with text as keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise Rejected("a mapping")
    return value


def two_strings(value: object) -> tuple[str, str]:
    """Two different strings, none of them empty."""
    wanted = "two different strings, none of them empty"
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise Rejected(wanted)
    first, second = value
    if not (isinstance(first, str) and isinstance(second, str) and first and second) or first == second:
        raise Rejected(wanted)
    return first, second


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
        if not is_finite(share) or share < 0:
            raise Rejected(wanted)
    return tuple(float(share) for share in value)


@options
class ModelOptions:
    """How the weights are loaded.

    `use_mmap`/`use_mlock` are the older spelling of `load_mode`; giving both is refused.
    """

    n_gpu_layers: int = option(default=0, check=integer(-1, INT32_MAX))
    split_mode: SplitMode = option(default="layer", check=choice(*get_args(SplitMode)))
    main_gpu: int = option(default=0, check=integer(0, INT32_MAX))
    tensor_split: Sequence[float] = option(default=(), check=tensor_shares)
    load_mode: LoadMode = option(default="auto", check=choice(*LOAD_MODES))
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
    `n_ubatch`, `n_threads` and `n_threads_batch` take a value from the others when None; `resolved()` fills
    them in.
    """

    n_ctx: int | None = option(default=2048, check=optional(integer(1, INT32_MAX)))
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
    pooling: Pooling | None = option(default=None, check=optional(choice(*get_args(Pooling))))
    prefill_chunk_size: int | float | None = option(
        default=None, check=lambda v: v if v == math.inf else optional(integer(1))(v)
    )
    step_target_s: float = option(default=0.5, check=number(0, above_low=True))
    decode_budget_s: float | None = option(default=None, check=optional(number(0)))

    def resolved(self) -> ContextOptions:
        """The same options with every derived value filled in; `n_threads` never exceeds the usable CPUs."""
        n_ubatch = min(self.n_ubatch or self.n_batch, self.n_batch)
        n_threads = min(self.n_threads or default_threads(), usable_cpus())
        return dataclasses.replace(
            self,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
            n_threads_batch=min(self.n_threads_batch or n_threads, usable_cpus()),
        )


@options
class GenerationOptions:
    """What one request may say about its generation. None: the model's own value, else the default.

    Sampling defaults are the GGUF's `general.sampling.*` where present, else temperature 0.8,
    top_k 40, top_p 0.95, min_p 0.05, repetition_penalty 1.0. `seed=None` draws one. Temperatures
    below 1e-6 are greedy, as 0 is.

    `json_schema`: the answer is JSON that satisfies it; `grammar`: the answer is of this GBNF grammar. With
    `thinking`, text between the model's `thinking_markers` arrives as `Thinking` events and is not in the
    reply; `thinking_budget_tokens` (above 0) limits them. `middleware` is around this call, and inside of the
    engine's.

    `salt` separates users: requests with different salts share no KV, neither in memory nor in the store,
    and a session goes on only under the salt it began with.
    """

    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        "timeout": "time limits are trio's: `with trio.fail_after(seconds):` around the call",
        "stream": "write `async with model.stream(prompt) as events:`",
        **dict.fromkeys(
            ("n_predict", "max_new_tokens", "num_predict", "n_tokens", "max_length"),
            "it is called max_tokens",
        ),
        **dict.fromkeys(("repeat_penalty", "penalty_repeat"), "it is called repetition_penalty"),
        "n_ctx": "it belongs to the model: load_model(path, context=ContextOptions(n_ctx=…))",
        "n_threads": "it belongs to the model: load_model(path, context=ContextOptions(n_threads=…))",
    }

    max_tokens: int = option(default=64, check=integer(1))
    temperature: float | None = option(default=None, check=optional(number(0)))
    top_k: int | None = option(default=None, check=optional(integer(0, INT32_MAX)))
    top_p: float | None = option(default=None, check=optional(number(0, 1)))
    min_p: float | None = option(default=None, check=optional(number(0, 1)))
    repetition_penalty: float | None = option(default=None, check=optional(number(0, above_low=True)))
    seed: int | None = option(default=None, check=optional(integer(0, 2**32 - 2)))
    grammar: str | None = option(default=None, check=optional(string))
    grammar_first: bool = option(default=False, check=boolean)
    json_schema: Mapping[str, Any] | None = option(default=None, check=optional(mapping))
    thinking: bool = option(default=False, check=boolean)
    thinking_budget_tokens: int | None = option(default=None, check=optional(integer(-INT32_MAX, INT32_MAX)))
    stop: str | Sequence[str] = option(default=(), check=stop_strings)
    logit_bias: Mapping[int, float] | None = option(default=None, check=optional(logit_biases))
    logprobs: int | None = option(default=None, check=optional(integer(0, 100)))
    on_full: Literal["block", "error"] = option(default="block", check=choice("block", "error"))
    cache: Literal["on", "read", "off"] = option(default="on", check=choice("on", "read", "off"))
    salt: bytes = option(default=b"", check=salt)
    session_id: Hashable = option(default=None, check=hashable)
    parent_key: bytes | None = option(default=None, check=optional(binary))
    prefix_checkpoint_len: int | None = option(default=None, check=optional(integer(1)))
    exact: Literal["session", "cold"] | None = option(default=None, check=optional(choice("session", "cold")))
    middleware: Sequence[Callable[..., Any]] = option(default=(), check=functions)

    def check_together(self) -> None:
        """Refuse two constraints at once."""
        if self.grammar is not None and self.json_schema is not None:
            raise InvalidOption(
                "GenerationOptions: give grammar or json_schema, not both",
                detail={"key": "grammar", "value": self.grammar},
            )


@options
class EngineConfig:
    """What holds for a whole engine.

    `stream_buffer_events`: how many events wait for a slow reader before its sequence skips steps.
    `tiers`: where KV is kept besides RAM (`DiskTier`, `RamFileTier`). `ram_max_bytes`: budget of the RAM
    tier. `ram_spill`: the tier that gets what RAM has no room for. `lookup_log`: a file for `kvc sim`.
    `writer_max_concurrent`: saves written at once. `evict_save_timeout_s`: how long an unload waits for what
    is still to be saved. `chat_cache_size`: parsed chat templates kept, one a model.
    `thinking_signing_key`: signs the end of thinking blocks. `middleware`: functions around every call of its
    models (`erllama.middleware`), the first one outermost.
    """

    stream_buffer_events: int = option(default=256, check=integer(4))
    tiers: Sequence[Any] = option(default=(), check=sequence)
    ram_max_bytes: int = option(default=1 << 30, check=integer(0))
    ram_spill: str | None = option(default=None, check=optional(string))
    lookup_log: str | None = option(default=None, check=optional(string))
    writer_max_concurrent: int = option(default=2, check=integer(1, 64))
    evict_save_timeout_s: float = option(default=30.0, check=number(0))
    chat_cache_size: int = option(default=8, check=integer(1, 4096))
    thinking_signing_key: bytes | None = option(default=None, check=optional(binary), secret=True)
    middleware: Sequence[Callable[..., Any]] = option(default=(), check=functions)
