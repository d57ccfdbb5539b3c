"""The look at a file's first bytes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import gguf
import pytest

from erllama.errors import InvalidConfig, MalformedGguf, NotSupported
from erllama.llama.ffi import library
from erllama.llama.gguf_check import HEADER, check_gguf

if TYPE_CHECKING:
    from pathlib import Path


def _file(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (b"FUGG" + bytes(40), "not a GGUF file"),
        (b"GGUF\x03\x00", "ends inside its header"),
        (HEADER.pack(b"GGUF", 1, 1, 1), "version 1"),
        (HEADER.pack(b"GGUF", 50_331_648, 1, 1), "version 50331648"),  # the other byte order
        (HEADER.pack(b"GGUF", 3, 2**60, 1), "claims"),
        (HEADER.pack(b"GGUF", 3, 1, 2**63), "claims"),
    ],
)
def test_refusals(tmp_path: Path, content: bytes, match: str) -> None:
    """Wrong magic, version, byte order, sizes and truncated headers are malformed_gguf."""
    with pytest.raises(MalformedGguf, match=match):
        check_gguf(_file(tmp_path, content))


def test_vocabulary_only_file(tmp_path: Path) -> None:
    """X29: a file without tensors is refused, unless only the vocabulary is wanted."""
    path = _file(tmp_path, HEADER.pack(b"GGUF", 3, 0, 20))
    with pytest.raises(NotSupported, match="no weights"):
        check_gguf(path)
    check_gguf(path, vocab_only=True)


def test_what_is_no_file(tmp_path: Path) -> None:
    """What is not there, a folder or a pipe is named, with the reason."""
    os.mkfifo(tmp_path / "pipe.gguf")  # opening it would wait for a writer
    for path in (tmp_path / "absent.gguf", tmp_path, tmp_path / "pipe.gguf"):
        with pytest.raises(InvalidConfig, match=os.fspath(path)):
            check_gguf(os.fspath(path))


def fault_of(path: Path, entries: dict[str, Any], *, vocab_only: bool = False) -> str | None:
    """What the look at the metadata says of a file of these entries, below the architecture `a`."""
    writer = gguf.GGUFWriter(path, "a")
    for name, value in entries.items():
        key = name if name.startswith("tokenizer") else f"a.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    lib = library()
    fault = lib.ffi.new("struct el_gguf_fault *")
    fine = lib.gguf_check(os.fsencode(path), vocab_only, fault)
    return None if fine else lib.ffi.string(fault.message).decode()


WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
EXPERTS = {"expert_count": 8, "expert_used_count": 2}


@pytest.mark.model
@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"block_count": 0}, "a.block_count is 0, expected 1 to 512"),
        ({"block_count": 513}, "a.block_count is 513"),
        ({"block_count": 4, "nextn_predict_layers": 5}, "a.nextn_predict_layers is 5, expected 0 to 4"),
        ({"expert_count": 1025}, "a.expert_count is 1025, expected 0 to 1024"),
        ({"expert_count": 8, "expert_used_count": 0}, "a.expert_used_count is 0, expected 1 to 8"),
        ({"expert_count": 8, "expert_used_count": 9}, "a.expert_used_count is 9"),
        ({"expert_used_count": 1}, "a.expert_used_count is 1, expected 0 to 0"),
        ({"expert_group_count": 1}, "a.expert_group_count is 1"),
        ({**EXPERTS, "expert_group_count": 8}, "a.expert_group_count is 8, expected 0 to 7"),
        ({**EXPERTS, "expert_group_count": 3, "expert_group_used_count": 1}, "expected a divisor of 8"),
        ({**EXPERTS, "expert_group_count": 4}, "a.expert_group_used_count is 0, expected 1 to 3"),
        ({"rope.scaling.type": "spiral"}, "a.rope.scaling.type is spiral"),
        ({"attention.layer_norm_epsilon": -1e-5}, "a.attention.layer_norm_epsilon is -0.00001"),
        ({"block_count": 4, WINDOW: 64, PATTERN: 1}, f"a.{PATTERN} is 1"),
        ({"block_count": 4, WINDOW: 64, PATTERN: [False] * 4}, f"a.{PATTERN} is all false"),
        (
            {"block_count": 4, "nextn_predict_layers": 1, WINDOW: 64, PATTERN: [False, False, False, True]},
            f"a.{PATTERN} is all false",
        ),
        ({"tokenizer.ggml.tokens": ["x", "y", "x"]}, "token 2 is in the vocabulary twice"),
    ],
    ids=str,
)
def test_metadata_that_llama_cpp_would_abort_on(tmp_path: Path, entries: dict[str, Any], said: str) -> None:
    """Each rule of the look at the metadata refuses what is just beyond it, by name."""
    found = fault_of(tmp_path / "x.gguf", entries)
    assert found is not None
    assert said in found
    vocabulary = any(key.startswith("tokenizer") for key in entries)
    assert (fault_of(tmp_path / "y.gguf", entries, vocab_only=True) is not None) == vocabulary


@pytest.mark.model
@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"block_count": 1},
        {"block_count": 512, "nextn_predict_layers": 512},
        EXPERTS,
        {"expert_count": 1024, "expert_used_count": 1024},
        {**EXPERTS, "expert_group_count": 1},
        {**EXPERTS, "expert_group_count": 4, "expert_group_used_count": 3},
        {"rope.scaling.type": "longrope"},
        {"attention.layer_norm_epsilon": 0.0},
        {"block_count": 4, WINDOW: 64, PATTERN: 2},
        {"block_count": 4, WINDOW: 64, PATTERN: 0},
        {"block_count": 4, WINDOW: 0, PATTERN: 1},
        {"block_count": 4, WINDOW: 64, PATTERN: [False, False, True, False]},
        {"tokenizer.ggml.tokens": ["x", "y", "", ""]},
    ],
    ids=str,
)
def test_metadata_up_to_the_borders(tmp_path: Path, entries: dict[str, Any]) -> None:
    """What llama.cpp takes is not refused."""
    assert fault_of(tmp_path / "x.gguf", entries) is None
