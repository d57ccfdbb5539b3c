"""Write the tiny model that the self-test decodes: random weights, 2 layers, about 1 MB.

Its sizes are multiples of 256 and its tensors are of three quantised types, so that a decode runs the
plain, the repacked and the tile (AMX) kernels of a CPU variant. It has no vocabulary: token ids go in,
logits come out. The same bytes come out on every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

N_EMBD = 256
N_FF = 512
N_HEAD = 4
N_LAYER = 2
N_VOCAB = 256
_Q4_K_BLOCK_BYTES = 144  # gguf-py constants: d f16, dmin f16, 12 scale bytes, 128 bytes of nibbles
_Q4_K_BLOCK = 256


def write_selftest_model(path: Path) -> None:
    """Write the model to `path`."""
    rng = np.random.default_rng(20240229)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_block_count(N_LAYER)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(N_EMBD // N_HEAD)
    writer.add_vocab_size(N_VOCAB)
    writer.add_tokenizer_model("no_vocab")
    _add(writer, rng, "token_embd.weight", N_VOCAB, N_EMBD, gguf.GGMLQuantizationType.Q8_0)
    _add(writer, rng, "output.weight", N_VOCAB, N_EMBD, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(N_EMBD, dtype=np.float32))
    types = (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_K)
    for layer in range(N_LAYER):
        _add_layer(writer, rng, f"blk.{layer}.", types[layer % len(types)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_layer(
    writer: gguf.GGUFWriter, rng: np.random.Generator, prefix: str, kind: gguf.GGMLQuantizationType
) -> None:
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"{prefix}{name}.weight", np.ones(N_EMBD, dtype=np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        _add(writer, rng, f"{prefix}{name}.weight", N_EMBD, N_EMBD, kind)
    for name in ("ffn_gate", "ffn_up"):
        _add(writer, rng, f"{prefix}{name}.weight", N_FF, N_EMBD, kind)
    _add(writer, rng, f"{prefix}ffn_down.weight", N_EMBD, N_FF, kind)


def _add(
    writer: gguf.GGUFWriter,
    rng: np.random.Generator,
    name: str,
    n_rows: int,
    n_columns: int,
    kind: gguf.GGMLQuantizationType,
) -> None:
    if kind is gguf.GGMLQuantizationType.Q4_K:
        data = _random_q4_k(rng, n_rows, n_columns)
    else:
        values = rng.standard_normal((n_rows, n_columns), dtype=np.float32) / np.sqrt(n_columns)
        data = gguf.quants.quantize(values.astype(np.float32), kind)
    writer.add_tensor(name, data, raw_dtype=kind)


def _random_q4_k(rng: np.random.Generator, n_rows: int, n_columns: int) -> np.ndarray:
    """Random Q4_K blocks, made as bytes because the gguf package cannot quantise to that type.

    A weight is d·scale·q − dmin·min with scale, min in 0..63 and q in 0..15; with dmin = 7.5·d weights
    lie around zero, and d is set so that their size is that of the other tensors.
    """
    n_blocks = n_columns // _Q4_K_BLOCK
    blocks = rng.integers(0, 256, (n_rows, n_blocks, _Q4_K_BLOCK_BYTES), dtype=np.uint8)
    d = np.float16(1.0 / (32 * 7.5 * np.sqrt(n_columns)))
    blocks[:, :, 0:2] = np.frombuffer(d.tobytes(), dtype=np.uint8)
    blocks[:, :, 2:4] = np.frombuffer(np.float16(7.5 * d).tobytes(), dtype=np.uint8)
    return blocks.reshape(n_rows, n_blocks * _Q4_K_BLOCK_BYTES)
