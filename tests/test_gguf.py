"""Reading a GGUF's metadata without native code, and telling models for embeddings."""

from __future__ import annotations

import contextlib
import struct

import pytest

from erllama.errors import MalformedGguf
from erllama.models.gguf import embeds, read_metadata


def test_metadata_is_read(tiny_gguf):
    """Scalars and strings as they are, arrays as their length."""
    metadata = read_metadata(tiny_gguf("embedding"))
    assert metadata["general.architecture"] == "nomic-bert"
    assert metadata["nomic-bert.pooling_type"] == 1
    assert metadata["nomic-bert.attention.causal"] is False
    assert metadata["tokenizer.ggml.tokens"] == 512
    assert metadata["nomic-bert.attention.layer_norm_epsilon"] == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"general.architecture": "bert"}, True),
        ({"general.architecture": "nomic-bert-moe"}, True),
        ({"general.architecture": "jina-bert-v2"}, True),
        ({"general.architecture": "modern-bert"}, True),
        ({"general.architecture": "qwen3", "qwen3.pooling_type": 3}, True),
        ({"general.architecture": "qwen3", "qwen3.pooling_type": 0}, False),
        ({"general.architecture": "qwen3"}, False),
        ({"general.architecture": "llama", "qwen3.pooling_type": 1}, False),
        ({}, False),
    ],
)
def test_models_for_embeddings_are_told(metadata, expected):
    """H48: who says how to pool, and encoders."""
    assert embeds(metadata) is expected


def test_damaged_files_are_typed_errors(tiny_gguf, tmp_path):
    """Cut at any place, or with odd numbers in it: `MalformedGguf`, or what is readable."""
    whole = tiny_gguf("bert").read_bytes()
    file = tmp_path / "x.gguf"
    for n in [*range(0, 200, 7), 1000, 3000]:
        file.write_bytes(whole[:n])
        with pytest.raises(MalformedGguf):
            read_metadata(file)
    for at in range(0, 1500, 13):
        file.write_bytes(whole[:at] + b"\xff" * 8 + whole[at + 8 :])
        with contextlib.suppress(MalformedGguf):
            assert read_metadata(file)
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60)
    file.write_bytes(head + bytes(100))
    with pytest.raises(MalformedGguf):
        read_metadata(file)


def test_the_default_model_is_none(smollm2_path):
    """A model that generates."""
    metadata = read_metadata(smollm2_path)
    assert metadata["general.architecture"] == "llama"
    assert not embeds(metadata)
