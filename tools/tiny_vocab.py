"""Vocabularies for the tiny models of `make_tiny_gguf.py`: byte-level BPE and SentencePiece-like.

Both hold all 256 bytes, so any text becomes tokens and comes back unchanged (SentencePiece writes a
space as U+2581, so that one character comes back as a space). Merges are learnt from the paragraph
below, which makes words of several tokens and tokens of several characters, as in real models.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass

from gguf import GGUFWriter, TokenType

N_VOCAB = 512

BOS, IM_START, IM_END, PAD = range(4)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

CORPUS = (
    "The lighthouse keeper wrote down every ship that passed, and the weather, and the hour. "
    "When the harbour asked which ships had passed in the storm, she read the answer from the book "
    "and did not have to watch the sea again. A model that reads a long prompt can do the same: what "
    "it has read once it need not read another time. The user asks, the assistant answers, and the "
    "next question starts where the last answer stopped. The capital of France is Paris, the capital "
    "of Italy is Rome, and there are 365 days in a year. Straße, café, naïve, 日本語, прибой and 🙂 are "
    "text as well.\n\nOnce upon a time there was a small model. It could count from one to ten, it "
    "could not do much more than that, and everybody who tested it was happy with the answers.\n"
)


@dataclass(frozen=True)
class Vocab:
    """What the tokenizer section of a GGUF holds."""

    model: str
    tokens: list[str]
    types: list[TokenType]
    merges: list[str]
    scores: list[float]

    def write(self, writer: GGUFWriter) -> None:
        """Add the tokenizer keys to `writer`."""
        writer.add_tokenizer_model(self.model)
        if self.merges:
            writer.add_tokenizer_pre("gpt-2")
            writer.add_token_merges(self.merges)
        if self.scores:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(False)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_bos_token_id(self.tokens.index("<s>") if self.scores else BOS)
        writer.add_eos_token_id(self.tokens.index("<|im_end|>"))
        writer.add_pad_token_id(self.tokens.index("<|pad|>"))
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(False)
        writer.add_chat_template(CHAT_TEMPLATE)

    @property
    def n_special(self) -> int:
        """Leading tokens that are no text: the models never prefer them."""
        return sum(
            kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED) for kind in self.types
        )


def bpe_vocab() -> Vocab:
    """GPT-2 style: every byte is a printable character, words are merged from pairs."""
    alphabet = _byte_alphabet()
    words = [
        "".join(alphabet[b] for b in word.encode()) for word in re.findall(r" ?\w+| ?[^\w\s]+|\s", CORPUS)
    ]
    n_pieces = N_VOCAB - len(CONTROL) - len(MARKUP) - len(alphabet)
    pairs = _learn_merges(words, n_pieces)
    return Vocab(
        model="gpt2",
        tokens=[*CONTROL, *MARKUP, *alphabet, *(a + b for a, b in pairs)],
        types=[
            *[TokenType.CONTROL] * len(CONTROL),
            *[TokenType.USER_DEFINED] * len(MARKUP),
            *[TokenType.NORMAL] * (len(alphabet) + len(pairs)),
        ],
        merges=[f"{a} {b}" for a, b in pairs],
        scores=[],
    )


def spm_vocab() -> Vocab:
    """SentencePiece style: pieces with scores, characters outside the vocabulary fall back to bytes."""
    special = ("<unk>", "<s>", "</s>", *CONTROL[1:])
    text = CORPUS.replace(" ", "▁")
    chars = sorted({c for c in text if c.isprintable()} | {chr(c) for c in range(33, 127)})
    n_pieces = N_VOCAB - len(special) - 256 - len(chars)
    pairs = _learn_merges(re.findall(r"▁?\w+|▁?[^\w\s▁]+|▁", text), n_pieces)
    pieces = [*(a + b for a, b in pairs), *chars]
    return Vocab(
        model="llama",
        tokens=[*special, *(f"<0x{b:02X}>" for b in range(256)), *pieces],
        types=[
            TokenType.UNKNOWN,
            *[TokenType.CONTROL] * (len(special) - 1),
            *[TokenType.BYTE] * 256,
            *[TokenType.NORMAL] * len(pieces),
        ],
        merges=[],
        scores=[*[0.0] * (len(special) + 256), *(-float(rank) for rank in range(len(pieces)))],
    )


def _byte_alphabet() -> list[str]:
    """One printable character per byte: itself where printable, else the next code point from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _learn_merges(words: list[str], n_merges: int) -> list[tuple[str, str]]:
    """The `n_merges` pairs that byte-pair encoding joins first; ties go to the smaller pair.

    Pairs whose join exists already (reached another way) are joined but not listed again.
    """
    split = Counter(tuple(word) for word in words)
    merges: list[tuple[str, str]] = []
    known: set[str] = set()
    while len(merges) < n_merges:
        pairs = Counter[tuple[str, str]]()
        for parts, count in split.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        if "".join(best) not in known:
            merges.append(best)
            known.add("".join(best))
        joined = Counter[tuple[str, ...]]()
        for parts, count in split.items():
            joined[_join(parts, best)] += count
        split = joined
    return merges


def _join(parts: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for part in parts:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return tuple(out)


class WordPieceVocab(Vocab):
    """What an encoder's tokenizer section holds: no chat template, and other special tokens."""

    def write(self, writer: GGUFWriter) -> None:
        """Add the tokenizer keys to `writer`."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre("default")
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_type_count(2)
        writer.add_pad_token_id(self.tokens.index("[PAD]"))
        writer.add_unk_token_id(self.tokens.index("[UNK]"))
        writer.add_bos_token_id(self.tokens.index("[CLS]"))
        writer.add_sep_token_id(self.tokens.index("[SEP]"))
        writer.add_mask_token_id(self.tokens.index("[MASK]"))


def wpm_vocab() -> Vocab:
    """WordPiece style: whole words and pieces of them; what begins a word is written with U+2581."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    chars = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
    counts = Counter(re.findall(r"[a-z]+", CORPUS.lower()))
    words = sorted((word for word in counts if len(word) > 1), key=lambda word: (-counts[word], word))
    pieces = [*(f"▁{c}" for c in chars), *(c for c in chars if c.isalnum()), *(f"▁{w}" for w in words)]
    tokens = [*special, *pieces][:N_VOCAB]
    tokens += [f"[unused{i}]" for i in range(N_VOCAB - len(tokens))]
    return WordPieceVocab(
        model="bert",
        tokens=tokens,
        types=[
            TokenType.CONTROL,
            TokenType.UNKNOWN,
            *[TokenType.CONTROL] * 3,
            *[TokenType.NORMAL] * (N_VOCAB - len(special)),
        ],
        merges=[],
        scores=[],
    )
