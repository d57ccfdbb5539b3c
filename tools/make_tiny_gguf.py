"""Write tiny GGUF models with random weights: one of each kind of memory that llama.cpp has.

    python tools/make_tiny_gguf.py KIND OUT
    python tools/make_tiny_gguf.py --list

A few hundred kilobytes each, the same bytes every time. They talk nonsense, but everything that
matters for the engine is real: attention, windows, recurrent state, tokenizer, chat template.
Tensor names and metadata keys are those that llama.cpp's `src/models/*.cpp` ask for.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGUFWriter
from tiny_vocab import N_VOCAB, Vocab, bpe_vocab, spm_vocab, wpm_vocab

if TYPE_CHECKING:
    from collections.abc import Callable

N_EMBD, N_FF, N_HEAD, N_HEAD_KV, N_LAYER = 64, 128, 2, 1, 2
HEAD = N_EMBD // N_HEAD  # 32: one block of q8_0, so quantised KV works too
WINDOW = 64  # tokens a sliding-window layer sees
LORA_RANK = 4


@dataclass
class Tiny:
    """One model being made: metadata without the architecture prefix, tensors in ggml's order of sizes."""

    arch: str
    meta: dict[str, Any]
    rng: np.random.Generator
    vocab: Vocab = field(default_factory=bpe_vocab)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def weight(self, name: str, n_in: int, n_out: int, *, gain: float = 1.0) -> None:
        """A matrix that keeps the size of what goes through it."""
        values = self.rng.standard_normal((n_out, n_in)) * (gain / np.sqrt(n_in))
        self.tensors[f"{name}.weight"] = values.astype(np.float32)

    def constant(self, name: str, n: int, value: float = 1.0) -> None:
        """A vector of equal values: a norm or a bias."""
        self.tensors[name] = np.full(n, value, np.float32)

    def norm(self, *names: str, n: int = N_EMBD, value: float = 1.0) -> None:
        for name in names:
            self.constant(f"{name}.weight", n, value)

    def embeddings(self, *, norm: str = "output_norm", size: float = 1.0) -> None:
        """Token embeddings of about `size`, output norm and output; no control token ever wins there.

        What the layers add must not drown in the embedding, or the last token alone decides.
        """
        self.weight("token_embd", N_EMBD, N_VOCAB, gain=size * np.sqrt(N_EMBD))
        self.norm(norm)
        self.weight("output", N_EMBD, N_VOCAB, gain=3.0)
        self.tensors["output.weight"][: self.vocab.n_special] = 0.0

    def attention(
        self, block: str, prefix: str = "attn_", out: str = "attn_output", *, n_kv: int = N_HEAD_KV
    ) -> None:
        """Query, key, value and output.

        Queries and keys small enough to look at many tokens, values large enough to matter: then every
        lost, doubled or stale cell shows in the logits.
        """
        self.weight(f"{block}.{prefix}q", N_EMBD, N_EMBD, gain=1.5)
        self.weight(f"{block}.{prefix}k", N_EMBD, n_kv * HEAD, gain=1.5)
        self.weight(f"{block}.{prefix}v", N_EMBD, n_kv * HEAD, gain=2.0)
        self.weight(f"{block}.{out}", N_EMBD, N_EMBD, gain=2.0)

    def feed_forward(self, block: str) -> None:
        self.weight(f"{block}.ffn_gate", N_EMBD, N_FF)
        self.weight(f"{block}.ffn_up", N_EMBD, N_FF)
        self.weight(f"{block}.ffn_down", N_FF, N_EMBD)

    def save(self, path: Path, **writer_options: Any) -> None:
        """Write the file beside `path` and rename it into place."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        writer = GGUFWriter(temporary, self.arch, **writer_options)
        writer.add_name(f"tiny {self.arch}")
        self.vocab.write(writer)
        for key, value in self.meta.items():
            _add(writer, f"{self.arch}.{key}" if key[0] != "." else key[1:], value)
        for name, values in self.tensors.items():
            writer.add_tensor(name, values)
        _finish(writer, temporary, path)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(f"{key}: no GGUF type for {value!r}")


def _finish(writer: GGUFWriter, temporary: Path, path: Path) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(temporary, path)


def _new(arch: str, seed: int, *, n_layer: int = N_LAYER, vocab: Vocab | None = None, **meta: Any) -> Tiny:
    """The keys every architecture needs, and what `meta` adds (`__` stands for a dot)."""
    common: dict[str, Any] = {
        "context_length": 8192,
        "embedding_length": N_EMBD,
        "block_count": n_layer,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD_KV,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "vocab_size": N_VOCAB,
    }
    common |= {key.replace("__", "."): value for key, value in meta.items()}
    return Tiny(arch, common, np.random.default_rng(seed), vocab or bpe_vocab())


def dense(arch: str = "llama", seed: int = 1, vocab: Vocab | None = None) -> Tiny:
    """Full attention in every layer."""
    tiny = _new(arch, seed, vocab=vocab)
    tiny.embeddings()
    for il in range(N_LAYER):
        block = f"blk.{il}"
        tiny.norm(f"{block}.attn_norm", f"{block}.ffn_norm")
        tiny.attention(block)
        tiny.feed_forward(block)
    return tiny


def spm() -> Tiny:
    """The dense model with a SentencePiece-like vocabulary."""
    return dense(seed=2, vocab=spm_vocab())


def window() -> Tiny:
    """Layers 0 and 2 see the last 64 tokens only, 1 and 3 everything."""
    tiny = _new(
        "gemma3", 3, n_layer=4, attention__sliding_window=WINDOW, attention__sliding_window_pattern=2,
        attention__key_length=HEAD, attention__value_length=HEAD,
    )  # fmt: skip
    tiny.embeddings(size=1 / np.sqrt(N_EMBD))  # llama.cpp multiplies Gemma's by the root of their length
    for il in range(4):
        block = f"blk.{il}"
        tiny.norm(
            *(f"{block}.{n}" for n in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"))
        )
        tiny.norm(f"{block}.attn_q_norm", f"{block}.attn_k_norm", n=HEAD, value=2.0)
        tiny.attention(block)
        tiny.feed_forward(block)
    return tiny


def recurrent() -> Tiny:
    """Mamba: no attention at all, one state per layer."""
    d_inner, d_state, d_conv, dt_rank = 2 * N_EMBD, 16, 4, 4
    tiny = _new(
        "mamba", 4, ssm__conv_kernel=d_conv, ssm__inner_size=d_inner, ssm__state_size=d_state,
        ssm__time_step_rank=dt_rank, feed_forward_length=0, attention__head_count=0,
        attention__head_count_kv=0,
    )  # fmt: skip
    tiny.embeddings()
    for il in range(N_LAYER):
        block = f"blk.{il}"
        tiny.norm(f"{block}.attn_norm")
        tiny.weight(f"{block}.ssm_in", N_EMBD, 2 * d_inner)
        tiny.weight(f"{block}.ssm_conv1d", d_conv, d_inner)
        tiny.constant(f"{block}.ssm_conv1d.bias", d_inner, 0.0)
        tiny.weight(f"{block}.ssm_x", d_inner, dt_rank + 2 * d_state, gain=4.0)
        tiny.weight(f"{block}.ssm_dt", dt_rank, d_inner)
        tiny.constant(f"{block}.ssm_dt.bias", d_inner, -3.0)
        # Some states forget within a few tokens, others remember hundreds.
        decay = np.tile(-np.geomspace(0.005, 1.0, d_state, dtype=np.float32), (d_inner, 1))
        tiny.tensors[f"{block}.ssm_a"] = decay
        tiny.constant(f"{block}.ssm_d", d_inner, 0.1)
        tiny.weight(f"{block}.ssm_out", d_inner, N_EMBD, gain=4.0)
    return tiny


def hybrid() -> Tiny:
    """LFM2: short convolutions (a small state) in layers 0 and 2, attention in 1 and 3."""
    n_kv = [0, N_HEAD_KV, 0, N_HEAD_KV]
    tiny = _new("lfm2", 5, n_layer=4, shortconv__l_cache=3, attention__head_count_kv=n_kv)
    tiny.embeddings(norm="token_embd_norm")  # the name under which llama.cpp looks for LFM2's output norm
    for il, n_head_kv in enumerate(n_kv):
        block = f"blk.{il}"
        tiny.norm(f"{block}.attn_norm", f"{block}.ffn_norm")
        tiny.feed_forward(block)
        if n_head_kv:
            tiny.norm(f"{block}.attn_q_norm", f"{block}.attn_k_norm", n=HEAD)
            tiny.attention(block)
        else:
            tiny.weight(f"{block}.shortconv.conv", 3, N_EMBD)
            tiny.weight(f"{block}.shortconv.in_proj", N_EMBD, 3 * N_EMBD)
            tiny.weight(f"{block}.shortconv.out_proj", N_EMBD, N_EMBD)
    return tiny


def hybrid_window() -> Tiny:
    """LFM2 whose attention sees the last 64 tokens only: a state, a window, and nothing else."""
    tiny = hybrid()
    tiny.meta["attention.sliding_window"] = WINDOW
    return tiny


def embedding() -> Tiny:
    """A bidirectional encoder with mean pooling: gives vectors, generates nothing."""
    tiny = _new(
        "nomic-bert", 6, attention__layer_norm_epsilon=1e-5, attention__causal=False, pooling_type=1,
        attention__head_count_kv=N_HEAD,
    )  # fmt: skip
    tiny.meta[".tokenizer.ggml.token_type_count"] = 2
    tiny.weight("token_embd", N_EMBD, N_VOCAB, gain=np.sqrt(N_EMBD))
    tiny.weight("token_types", N_EMBD, 2)
    _norm_with_bias(tiny, "token_embd_norm")
    for il in range(N_LAYER):
        block = f"blk.{il}"
        tiny.attention(block, n_kv=N_HEAD)
        _norm_with_bias(tiny, f"{block}.attn_output_norm")
        tiny.feed_forward(block)
        _norm_with_bias(tiny, f"{block}.layer_output_norm")
    return tiny


def bert() -> Tiny:
    """A bidirectional encoder with learned positions, WordPiece and the first token's vector."""
    n_ctx = 128
    tiny = _new(
        "bert", 12, vocab=wpm_vocab(), context_length=n_ctx, attention__layer_norm_epsilon=1e-5,
        attention__causal=False, pooling_type=2, attention__head_count_kv=N_HEAD,
    )  # fmt: skip
    tiny.weight("token_embd", N_EMBD, N_VOCAB, gain=np.sqrt(N_EMBD))
    tiny.weight("position_embd", N_EMBD, n_ctx, gain=np.sqrt(N_EMBD))
    tiny.weight("token_types", N_EMBD, 2)
    _norm_with_bias(tiny, "token_embd_norm")
    for il in range(N_LAYER):
        block = f"blk.{il}"
        tiny.attention(block, n_kv=N_HEAD)
        _norm_with_bias(tiny, f"{block}.attn_output_norm")
        tiny.weight(f"{block}.ffn_up", N_EMBD, N_FF)
        tiny.weight(f"{block}.ffn_down", N_FF, N_EMBD)
        _norm_with_bias(tiny, f"{block}.layer_output_norm")
    return tiny


def positions() -> Tiny:
    """GPT-2: a generator with learned positions, of which there are 128."""
    tiny = _new(
        "gpt2", 13, context_length=128, attention__layer_norm_epsilon=1e-5, attention__head_count_kv=N_HEAD
    )
    tiny.embeddings()
    tiny.constant("output_norm.bias", N_EMBD, 0.0)
    tiny.weight("position_embd", N_EMBD, 128, gain=np.sqrt(N_EMBD))
    for il in range(N_LAYER):
        block = f"blk.{il}"
        for name, n_in, n_out in (
            ("attn_qkv", N_EMBD, 3 * N_EMBD),
            ("attn_output", N_EMBD, N_EMBD),
            ("ffn_up", N_EMBD, N_FF),
            ("ffn_down", N_FF, N_EMBD),
        ):
            tiny.weight(f"{block}.{name}", n_in, n_out)
            tiny.constant(f"{block}.{name}.bias", n_out, 0.0)
        _norm_with_bias(tiny, f"{block}.attn_norm")
        _norm_with_bias(tiny, f"{block}.ffn_norm")
    return tiny


def reranker() -> Tiny:
    """The encoder with a head that gives one score."""
    tiny = bert()
    tiny.meta["pooling_type"] = 4
    tiny.weight("cls", N_EMBD, N_EMBD)
    tiny.weight("cls.output", N_EMBD, 1)
    return tiny


def _norm_with_bias(tiny: Tiny, name: str) -> None:
    tiny.norm(name)
    tiny.constant(f"{name}.bias", N_EMBD, 0.0)


def encdec() -> Tiny:
    """T5: an encoder and a decoder that looks at it."""
    tiny = _new(
        "t5", 7, attention__relative_buckets_count=32, decoder_start_token_id=0,
        attention__head_count_kv=N_HEAD, attention__key_length=HEAD, attention__value_length=HEAD,
    )  # fmt: skip
    tiny.embeddings(norm="dec.output_norm")
    tiny.norm("enc.output_norm")
    for side in ("enc", "dec"):
        for il in range(N_LAYER):
            block = f"{side}.blk.{il}"
            tiny.norm(f"{block}.attn_norm", f"{block}.ffn_norm")
            tiny.attention(block, out="attn_o", n_kv=N_HEAD)
            tiny.weight(f"{block}.attn_rel_b", N_HEAD, 32)
            tiny.feed_forward(block)
            if side == "dec":
                tiny.norm(f"{block}.cross_attn_norm")
                tiny.attention(block, "cross_attn_", "cross_attn_o", n_kv=N_HEAD)
    return tiny


def diffusion() -> Tiny:
    """Dream: denoises whole blocks instead of predicting the next token."""
    return dense("dream", seed=8)


def unknown_arch() -> Tiny:
    """An architecture that llama.cpp has never heard of."""
    return dense("erllama-unknown", seed=9)


def vocab() -> Tiny:
    """A vocabulary and no tensors: loads with `vocab_only=True` and not otherwise."""
    return _new("llama", 10)


KINDS: dict[str, Callable[[], Tiny]] = {
    make.__name__: make
    for make in (
        dense,
        spm,
        window,
        recurrent,
        hybrid,
        hybrid_window,
        embedding,
        bert,
        reranker,
        positions,
        encdec,
        diffusion,
        unknown_arch,
        vocab,
    )
}
ALL_KINDS = (*KINDS, "lora", "split")


def _save_lora(path: Path) -> None:
    """A LoRA adapter for `dense`, strong enough to change what it says."""
    rng = np.random.default_rng(11)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    writer = GGUFWriter(temporary, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(LORA_RANK))
    for il in range(N_LAYER):
        for name, n_in, n_out in (("attn_q", N_EMBD, N_EMBD), ("ffn_down", N_FF, N_EMBD)):
            tensor = f"blk.{il}.{name}.weight"
            down = rng.standard_normal((LORA_RANK, n_in)) / np.sqrt(n_in)
            up = rng.standard_normal((n_out, LORA_RANK)) / np.sqrt(LORA_RANK)
            writer.add_tensor(f"{tensor}.lora_a", down.astype(np.float32))
            writer.add_tensor(f"{tensor}.lora_b", up.astype(np.float32))
    _finish(writer, temporary, path)


def _save_split(path: Path) -> Path:
    """The dense model in two files; the first one's path, `…-00001-of-00002.gguf`, is what one loads."""
    stem = path.with_suffix("")
    tiny = dense()
    n_first = (len(tiny.tensors) + 1) // 2
    names = list(tiny.tensors)
    for number, part in enumerate((names[:n_first], names[n_first:])):
        target = stem.with_name(f"{stem.name}-{number + 1:05d}-of-00002.gguf")
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        writer = GGUFWriter(temporary, tiny.arch)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(names))
        if number == 0:
            tiny.vocab.write(writer)
            for key, value in tiny.meta.items():
                _add(writer, f"{tiny.arch}.{key}", value)
        for name in part:
            writer.add_tensor(name, tiny.tensors[name])
        _finish(writer, temporary, target)
    return stem.with_name(f"{stem.name}-00001-of-00002.gguf")


def make_tiny_gguf(kind: str, path: Path) -> Path:
    """Write the tiny model `kind` to `path`.

    Returns: the path to load, which is `path` except for `split`.
    Raises: KeyError for an unknown kind.
    """
    if kind == "lora":
        _save_lora(path)
    elif kind == "split":
        return _save_split(path)
    else:
        KINDS[kind]().save(path)
    return path


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write a tiny GGUF model with random weights.")
    parser.add_argument("kind", nargs="?", choices=ALL_KINDS)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--list", action="store_true", help="list the kinds and what they are")
    args = parser.parse_args(argv)
    if args.list:
        for kind, make in KINDS.items():
            print(f"{kind:13} {(make.__doc__ or '').splitlines()[0]}")
        print("lora          A LoRA adapter for `dense`.\nsplit         The dense model in two files.")
        return 0
    if args.kind is None or args.out is None:
        parser.error("give KIND and OUT (or --list)")
    path = make_tiny_gguf(args.kind, args.out)
    print(f"{path}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
