"""Every option: its name, its type, its borders, its default, and what the machine makes of it."""

from __future__ import annotations

import builtins
import dataclasses
import io
import math
import os
import sys

import numpy as np
import psutil
import pytest

from erllama import options as options_module
from erllama.errors import InvalidOption, UnknownOption
from erllama.options import (
    ContextOptions,
    EngineConfig,
    GenerationOptions,
    ModelOptions,
    default_threads,
    usable_cpus,
)

CLASSES = [ModelOptions, ContextOptions, GenerationOptions, EngineConfig]
NAN, INF, HUGE = math.nan, math.inf, 10**400

# class, field, accepted values (the borders among them), refused values (just beyond them among them)
FIELDS = [
    (ModelOptions, "n_gpu_layers", [-1, 0, 99, 2**31 - 1], [-2, 2**31, 1.0, "0", None, True]),
    (ModelOptions, "split_mode", ["none", "layer", "row"], ["tensor", None, 1]),
    (ModelOptions, "main_gpu", [0, 7, 2**31 - 1], [-1, 2**31, None]),
    (
        ModelOptions,
        "tensor_split",
        [(), (0.5, 1), [0] * 16],
        [[0] * 17, [-1], [NAN], [INF], [HUGE], "1", 1, [True]],
    ),
    (ModelOptions, "load_mode", ["auto", "none", "mmap", "mlock", "mmap_mlock", "direct_io"], ["fast", None]),
    (ModelOptions, "use_mmap", [None, True, False], [0, 1, "yes"]),
    (ModelOptions, "use_mlock", [None, True, False], [0, 1, "yes"]),
    (ModelOptions, "vocab_only", [True, False], [None, 0]),
    (ContextOptions, "n_ctx", [None, 1, 2**31 - 1], [0, 2**31, 1.5, "2048", True]),
    (ContextOptions, "n_batch", [1, 2**20], [0, 2**20 + 1, None]),
    (ContextOptions, "n_ubatch", [None, 1, 2**20], [0, 2**20 + 1]),
    (ContextOptions, "n_seq_max", [1, 128], [0, 129, None]),
    (ContextOptions, "n_threads", [None, 1, 512], [0, 513]),
    (ContextOptions, "n_threads_batch", [None, 1, 512], [0, 513]),
    (ContextOptions, "flash_attn", [True, False, "auto"], [1, 0, "on", None]),
    (ContextOptions, "type_k", ["f16", "f32", "bf16", "q4_0", "q5_0", "q5_1", "q8_0"], ["q4_1", "F16", None]),
    (ContextOptions, "type_v", ["f16", "f32", "bf16", "q4_0", "q5_0", "q5_1", "q8_0"], ["int8", None]),
    (ContextOptions, "kv_unified", [True, False], [None, 1]),
    (ContextOptions, "embeddings", [True, False], [None, 1]),
    (ContextOptions, "pooling", [None, "none", "mean", "cls", "last", "rank"], ["max", 0]),
    (ContextOptions, "prefill_chunk_size", [None, 1, 64, INF], [0, -INF, NAN, 64.5, "64", True]),
    (ContextOptions, "step_target_s", [1e-9, 0.5, 10], [0, -1, INF, NAN, HUGE, None, "1", True]),
    (ContextOptions, "decode_budget_s", [None, 0, 0.001, 30], [-0.001, INF, NAN, "30"]),
    (GenerationOptions, "max_tokens", [1, 10**9, np.int32(5)], [0, -1, None, 1.0, True, INF]),
    (GenerationOptions, "temperature", [None, 0, 0.8, 5], [-0.1, INF, NAN, HUGE, -HUGE, "hot", True]),
    (GenerationOptions, "top_k", [None, 0, 40, 2**31 - 1], [-1, 2**31, 2**40, 1.5, True]),
    (GenerationOptions, "top_p", [None, 0, 1, 0.95], [-0.01, 1.01, NAN]),
    (GenerationOptions, "min_p", [None, 0, 1], [-0.01, 1.01]),
    (GenerationOptions, "repetition_penalty", [None, 0.01, 1, 2], [0, -1, INF]),
    (GenerationOptions, "seed", [None, 0, 2**32 - 2], [-1, 2**32 - 1, 1.0, True]),
    (GenerationOptions, "grammar", [None, "root ::= x"], [b"root", 1]),
    (GenerationOptions, "grammar_first", [True, False], [None, 1]),
    (GenerationOptions, "json_schema", [None, {}, {"type": "object"}], ["{}", [], True, {1: 2}]),
    (GenerationOptions, "thinking", [True, False], [None, 1, "yes"]),
    (GenerationOptions, "thinking_budget_tokens", [None, -1, 0, 5], [1.5, "5", True]),
    (
        GenerationOptions,
        "stop",
        [(), "a", ["a", "b"], ("a",)],
        ["", [""], ["a", ""], [1], b"a", {"a"}, None, 1],
    ),
    (
        GenerationOptions,
        "logit_bias",
        [None, {}, {0: 1.5, 7: -INF}, {np.int64(3): 1}],
        [
            {0: INF},
            {0: NAN},
            {0: HUGE},
            {0: -HUGE},
            {0: "1"},
            {0: True},
            {"0": 1},
            {True: 1},
            {1.5: 1},
            [(0, 1)],
        ],
    ),
    (GenerationOptions, "logprobs", [None, 0, 100], [-1, 101, True]),
    (GenerationOptions, "on_full", ["block", "error"], ["drop", None]),
    (GenerationOptions, "cache", ["on", "read", "off"], [True, "write", None]),
    (GenerationOptions, "salt", [b"", bytes(64)], ["user", bytes(65), None, 7]),
    (GenerationOptions, "session_id", [None, "s", 7, ("a", 1)], [[], {}]),
    (GenerationOptions, "parent_key", [None, b"", bytes(32)], ["key", 7, [0]]),
    (GenerationOptions, "prefix_checkpoint_len", [None, 1, 600], [0, -1, True, 1.5]),
    (GenerationOptions, "exact", [None, "session", "cold"], ["", "warm", True, 1]),
    (EngineConfig, "stream_buffer_events", [4, 256], [3, 0, None, INF]),
    (EngineConfig, "chat_cache_size", [1, 4096], [0, 4097, None, True]),
    (EngineConfig, "thinking_signing_key", [None, b"", b"k"], ["k", 3]),
    (EngineConfig, "middleware", [(), [print]], [print, "x", [3], {"a": print}, None]),
    (GenerationOptions, "middleware", [(), [print]], [print, "x", [3], {"a": print}, None]),
    (EngineConfig, "tiers", [(), []], ["disk", b"disk", 1, None]),
    (EngineConfig, "ram_max_bytes", [0, 1 << 40], [-1, None, 1.5]),
    (EngineConfig, "ram_spill", [None, "kv"], [1, b"kv"]),
    (EngineConfig, "lookup_log", [None, "kv.log"], [1, True]),
    (EngineConfig, "writer_max_concurrent", [1, 64], [0, 65, None]),
    (EngineConfig, "evict_save_timeout_s", [0, 30.0], [-1, None, INF]),
]
ACCEPTED = [(cls, name, value) for cls, name, good, _ in FIELDS for value in good]
REFUSED = [(cls, name, value) for cls, name, _, bad in FIELDS for value in bad]


def short(value: object) -> str:
    """A test's name: a 400-digit number helps nobody."""
    return value.__name__ if isinstance(value, type) else repr(value)[:20]


def test_every_option_is_in_the_table():
    """A new option comes with its borders here."""
    declared = {(cls, f.name) for cls in CLASSES for f in dataclasses.fields(cls)}
    assert {(cls, name) for cls, name, _, _ in FIELDS} == declared


@pytest.mark.parametrize(("cls", "name", "value"), ACCEPTED, ids=short)
def test_accepted(cls: type, name: str, value: object):
    """Values up to the borders are kept."""
    got = getattr(cls(**{name: value}), name)
    assert got == ((value,) if name == "stop" and isinstance(value, str) else value) or list(got) == list(
        value
    )


SECRETS = ("thinking_signing_key",)


@pytest.mark.parametrize(("cls", "name", "value"), REFUSED, ids=short)
def test_refused(cls: type, name: str, value: object):
    """Values beyond the borders or of another type raise InvalidOption with key and value."""
    with pytest.raises(InvalidOption, match=rf"{cls.__name__}\.{name}(=.*)?: expected ") as caught:
        cls(**{name: value})
    assert caught.value.detail["key"] == name
    if name in SECRETS:
        assert caught.value.detail == {"key": name}
    else:
        assert caught.value.detail["value"] is value


@pytest.mark.parametrize(
    ("cls", "typo", "nearest"),
    [
        (ModelOptions, "n_gpu_layer", "n_gpu_layers"),
        (ContextOptions, "nctx", "n_ctx"),
        (GenerationOptions, "max_token", "max_tokens"),
        (EngineConfig, "stream_buffer_event", "stream_buffer_events"),
    ],
)
def test_a_typo_names_the_nearest(cls: type, typo: str, nearest: str):
    """Unknown options are refused with the one that was probably meant."""
    with pytest.raises(
        UnknownOption, match=f"{cls.__name__} has no option '{typo}'; did you mean '{nearest}'"
    ) as caught:
        cls(**{typo: 1})
    assert caught.value.detail == {"key": typo, "nearest": nearest}


def test_a_name_near_nothing_lists_all():
    """Where nothing is near, the known options are listed."""
    with pytest.raises(UnknownOption, match="known options: chat_cache_size, evict_save_timeout_s") as caught:
        EngineConfig(xyzzy=1)
    assert caught.value.detail == {"key": "xyzzy", "nearest": None}


def test_a_secret_is_in_no_repr_and_no_error():
    """The name of the option is."""
    assert "hush" not in repr(EngineConfig(thinking_signing_key=b"hush"))
    with pytest.raises(InvalidOption, match=r"EngineConfig\.thinking_signing_key: expected") as refused:
        EngineConfig(thinking_signing_key="hush")
    assert "hush" not in str(refused.value)
    assert refused.value.detail == {"key": "thinking_signing_key"}


@pytest.mark.parametrize("cls", CLASSES)
def test_options_are_frozen_keyword_only_and_replaceable(cls: type):
    """They cannot be changed in place or given by position; `replace` checks again."""
    made = cls()
    name = dataclasses.fields(cls)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, name, 1)
    with pytest.raises(InvalidOption, match=f"{name}=…"):
        cls(1)
    assert dataclasses.replace(made) == made
    with pytest.raises(InvalidOption):
        dataclasses.replace(made, **{name: "no"})


def test_values_are_normalised():
    """Numbers become plain ints and floats, stops a tuple, biases a dict, tensor shares floats."""
    assert type(GenerationOptions(max_tokens=np.int32(5)).max_tokens) is int
    assert type(GenerationOptions(temperature=1).temperature) is float
    assert GenerationOptions(stop="x").stop == ("x",)
    assert GenerationOptions(stop=["x", "y"]).stop == ("x", "y")
    ((token, bias),) = GenerationOptions(logit_bias={np.int64(3): 1}).logit_bias.items()
    assert (type(token), type(bias)) == (int, float)
    assert ModelOptions(tensor_split=[1, 2]).tensor_split == (1.0, 2.0)


def test_given_containers_are_copied():
    """Changing the caller's mapping afterwards changes no request."""
    biases = {1: 1.0}
    made = GenerationOptions(logit_bias=biases)
    biases[2] = 2.0
    assert made.logit_bias == {1: 1.0}


DEFAULTS = {
    ModelOptions: {
        "n_gpu_layers": 0,
        "split_mode": "layer",
        "main_gpu": 0,
        "tensor_split": (),
        "load_mode": "auto",
        "use_mmap": None,
        "use_mlock": None,
        "vocab_only": False,
    },
    ContextOptions: {
        "n_ctx": 2048,
        "n_batch": 512,
        "n_ubatch": None,
        "n_seq_max": 1,
        "n_threads": None,
        "n_threads_batch": None,
        "flash_attn": "auto",
        "type_k": "f16",
        "type_v": "f16",
        "kv_unified": True,
        "embeddings": False,
        "pooling": None,
        "prefill_chunk_size": None,
        "step_target_s": 0.5,
        "decode_budget_s": None,
    },
    GenerationOptions: {
        "max_tokens": 64,
        "temperature": None,
        "top_k": None,
        "top_p": None,
        "min_p": None,
        "repetition_penalty": None,
        "seed": None,
        "grammar": None,
        "grammar_first": False,
        "json_schema": None,
        "thinking": False,
        "thinking_budget_tokens": None,
        "stop": (),
        "logit_bias": None,
        "logprobs": None,
        "on_full": "block",
        "cache": "on",
        "salt": b"",
        "session_id": None,
        "parent_key": None,
        "prefix_checkpoint_len": None,
        "exact": None,
        "middleware": (),
    },
    EngineConfig: {
        "stream_buffer_events": 256,
        "tiers": (),
        "ram_max_bytes": 1 << 30,
        "ram_spill": None,
        "lookup_log": None,
        "writer_max_concurrent": 2,
        "evict_save_timeout_s": 30.0,
        "chat_cache_size": 8,
        "thinking_signing_key": None,
        "middleware": (),
    },
}


@pytest.mark.parametrize("cls", CLASSES)
def test_defaults(cls: type):
    """M15: the documented defaults."""
    assert vars(cls()) == DEFAULTS[cls]


# --- load mode (B12) ---


@pytest.mark.parametrize(
    ("mmap", "mlock", "mode"),
    [
        (None, None, "auto"),
        (None, False, "mmap"),
        (None, True, "mmap_mlock"),
        (False, None, "none"),
        (False, False, "none"),
        (False, True, "mlock"),
        (True, None, "mmap"),
        (True, False, "mmap"),
        (True, True, "mmap_mlock"),
    ],
)
def test_the_booleans_map_onto_load_mode(mmap: bool | None, mlock: bool | None, mode: str):
    """B12: every pair of the older booleans is one of upstream's modes."""
    assert ModelOptions(use_mmap=mmap, use_mlock=mlock).resolved_load_mode == mode


@pytest.mark.parametrize("mode", options_module.LOAD_MODES)
def test_an_explicit_load_mode_is_kept(mode: str):
    """B12: `load_mode` given alone is what the loader gets."""
    assert ModelOptions(load_mode=mode).resolved_load_mode == mode


@pytest.mark.parametrize("older", [{"use_mmap": True}, {"use_mmap": False}, {"use_mlock": False}])
def test_both_spellings_are_refused(older: dict[str, bool]):
    """An explicit mode beside a boolean is ambiguous."""
    with pytest.raises(InvalidOption, match="not both"):
        _ = ModelOptions(load_mode="mmap", **older).resolved_load_mode


# --- resolved values ---


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"n_ubatch": 512, "prefill_chunk_size": None}),
        ({"n_batch": 2048}, {"n_ubatch": 2048}),
        ({"n_batch": 300}, {"n_ubatch": 300}),
        ({"n_batch": 32}, {"n_ubatch": 32}),
        ({"n_ubatch": 128}, {"n_ubatch": 128}),
        ({"n_ubatch": 4096}, {"n_ubatch": 512}),
        ({"prefill_chunk_size": math.inf}, {"prefill_chunk_size": math.inf}),
        ({"prefill_chunk_size": 16}, {"prefill_chunk_size": 16}),
        ({"n_ctx": None}, {"n_ctx": None}),
    ],
    ids=str,
)
def test_derived_values(given: dict[str, object], expected: dict[str, object]):
    """M15: the ubatch never exceeds the batch; what is not derived stays."""
    resolved = ContextOptions(**given).resolved()
    assert {name: getattr(resolved, name) for name in expected} == expected


def test_resolving_twice_changes_nothing():
    """What is resolved stays as it is."""
    once = ContextOptions(n_batch=300, n_threads=1).resolved()
    assert once.resolved() == once


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Pretend a machine: CPUs in the affinity mask, physical cores, content of cgroup's cpu.max."""

    def pretend(affinity: int, physical: int | None, cpu_max: str | None) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
        monkeypatch.setattr(psutil, "cpu_count", lambda logical: None if logical else physical)
        real = builtins.open

        def fake_open(path, *args, **kwargs):
            if path == "/sys/fs/cgroup/cpu.max":
                if cpu_max is None:
                    raise FileNotFoundError(path)
                return io.StringIO(cpu_max)
            return real(path, *args, **kwargs)

        monkeypatch.setattr(builtins, "open", fake_open)

    return pretend


@pytest.mark.parametrize(
    ("affinity", "cpu_max", "usable"),
    [
        (8, None, 8),
        (8, "max 100000\n", 8),
        (8, "200000 100000\n", 2),
        (8, "150000 100000\n", 2),
        (8, "50000 100000\n", 1),
        (2, "400000 100000\n", 2),
        (8, "unreadable", 8),
        (8, "", 8),
    ],
)
def test_usable_cpus(machine, affinity: int, cpu_max: str | None, usable: int):
    """The affinity mask, capped by a cgroup quota rounded up; without a readable quota the mask alone."""
    machine(affinity, 8, cpu_max)
    assert usable_cpus() == usable


@pytest.mark.parametrize(
    ("affinity", "physical", "cpu_max", "threads"),
    [(16, 8, None, 8), (4, 8, None, 4), (16, 8, "300000 100000", 3), (16, None, None, 16), (1, 8, None, 1)],
)
def test_default_threads(machine, affinity: int, physical: int | None, cpu_max: str | None, threads: int):
    """Physical cores, never more than the usable CPUs; where cores are unknown, the usable CPUs."""
    machine(affinity, physical, cpu_max)
    assert default_threads() == threads
    assert ContextOptions().resolved().n_threads == threads


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (4, 4)),
        ({"n_threads": 64}, (4, 4)),
        ({"n_threads": 2}, (2, 2)),
        ({"n_threads": 2, "n_threads_batch": 3}, (2, 3)),
        ({"n_threads_batch": 64}, (4, 4)),
    ],
    ids=str,
)
def test_threads_never_exceed_the_usable_cpus(machine, given: dict[str, int], expected: tuple[int, int]):
    """M15: whatever was asked for; prefill takes the decode threads where it was not told."""
    machine(4, 32, None)
    resolved = ContextOptions(**given).resolved()
    assert (resolved.n_threads, resolved.n_threads_batch) == expected


def test_on_this_machine_threads_fit():
    """The real thing: at least one thread, at most what this process may use."""
    assert 1 <= ContextOptions().resolved().n_threads <= usable_cpus() <= (os.cpu_count() or sys.maxsize)
