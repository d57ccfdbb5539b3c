"""Text ⇄ tokens: bounds, odd input, caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from erllama.errors import InvalidContent, NotSupported
from erllama.llama import Model
from erllama.llama.ffi import choose_native_dir

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.model

TEXTS = ["", " ", "The capital of France is", "Grüße, 世界! 🦙", "a\0b\0", "line\nline\r\n\ttab", "x" * 3000]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(smollm2: Model, text: str) -> None:
    """Without special tokens the text comes back byte for byte, NUL bytes included."""
    ids = smollm2.vocab.tokenize(text, add_special=False, parse_special=False)
    assert smollm2.vocab.detokenize(ids) == text.encode()


def test_known_tokens(smollm2: Model) -> None:
    """The pin's tokens of a known sentence."""
    assert smollm2.vocab.tokenize("The capital of France is") == [504, 3575, 282, 4649, 314]


def test_pieces_join_to_the_text(smollm2: Model) -> None:
    """The pieces of all tokens are the text; control tokens are empty unless asked for."""
    vocab = smollm2.vocab
    ids = vocab.tokenize("Grüße 🦙", add_special=False)
    assert b"".join(vocab.piece(t) for t in ids) == "Grüße 🦙".encode()
    (control,) = vocab.tokenize("<|im_end|>", add_special=False)
    assert vocab.is_control(control)
    assert vocab.is_eog(control)
    assert vocab.piece(control) == b""
    assert vocab.piece(control, special=True) == b"<|im_end|>"


def test_special_text_is_plain_unless_parsed(smollm2: Model) -> None:
    """A typed `<|im_end|>` becomes a control token only with parse_special."""
    assert len(smollm2.vocab.tokenize("<|im_end|>", add_special=False, parse_special=False)) > 1


def test_bos_is_added_where_the_model_wants_it(gemma: Model) -> None:
    """Gemma's prompts begin with BOS, and `remove_special` takes it off again."""
    vocab = gemma.vocab
    ids = vocab.tokenize("Hello")
    assert vocab.add_bos
    assert ids[0] == vocab.bos
    assert vocab.tokenize("Hello", add_special=False) == ids[1:]
    assert vocab.detokenize(ids, remove_special=True) == b"Hello"


def test_lone_surrogate_names_its_position(smollm2: Model) -> None:
    """Text that is no text is invalid_content, and says where."""
    with pytest.raises(InvalidContent, match="position 3") as caught:
        smollm2.vocab.tokenize("abc\ud800d")
    assert caught.value.detail == {"position": 3}


def test_bytes_that_are_no_utf8_do_not_crash(smollm2: Model) -> None:
    """Raw bytes go through, whatever they are."""
    assert smollm2.vocab.tokenize(b"\xff\xfe\x00abc\xc3", add_special=False)


def test_text_bound(smollm2: Model) -> None:
    """B17: 64 MiB and one byte are refused before the tokenizer runs."""
    with pytest.raises(InvalidContent, match="67108865 bytes"):
        smollm2.vocab.tokenize(b"x" * (64 * 2**20 + 1))


def test_token_bound_holds_after_success(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """B17: more than 16 M tokens are refused although the tokenizer succeeded."""
    too_many = np.zeros(16 * 2**20 + 1, np.int32)
    monkeypatch.setattr(smollm2.vocab, "_tokenize", lambda *_: too_many)
    with pytest.raises(InvalidContent, match="16777217 tokens"):
        smollm2.vocab.tokenize("x")


def test_token_bound_holds_before_the_second_try(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """B17: a tokenizer that asks for too much room, or overflows, gets none."""
    for answer in (-(16 * 2**20 + 1), -(2**31)):
        monkeypatch.setitem(smollm2.vocab._lib.__dict__, "tokenize", lambda *_, answer=answer: answer)
        with pytest.raises(InvalidContent, match="more than 16777216"):
            smollm2.vocab.tokenize("x")


@pytest.mark.parametrize("n_tokens", [0, -1])
def test_no_vocabulary_fails_closed(smollm2: Model, monkeypatch: pytest.MonkeyPatch, n_tokens: int) -> None:
    """B17: with a vocabulary of zero or fewer tokens nothing reaches llama.cpp."""
    monkeypatch.setattr(smollm2.vocab, "n_tokens", n_tokens)
    with pytest.raises(InvalidContent):
        smollm2.vocab.detokenize([1])
    with pytest.raises(NotSupported):
        smollm2.vocab.detokenize([])
    with pytest.raises(NotSupported):
        smollm2.vocab.tokenize("x")


def test_a_model_without_a_vocabulary_is_refused_in_words() -> None:
    """B17: llama.cpp ends the process when it is asked about a token of none; nothing reaches it."""
    with Model.open(choose_native_dir() / "selftest.gguf") as model:
        vocab = model.vocab
        assert vocab.is_absent
        for use in (vocab.piece, vocab.is_eog, vocab.is_control):
            with pytest.raises(NotSupported, match="no vocabulary"):
                use(5)
        for use in (vocab.special_texts, lambda: vocab.tokenize("x"), lambda: vocab.detokenize([5])):
            with pytest.raises(NotSupported, match="no vocabulary"):
                use()


@pytest.mark.parametrize("ids", [[-1], [49152], [1, 2, 2**40], np.array([5, -7])])
def test_ids_outside_the_vocabulary(smollm2: Model, ids: Any) -> None:
    """Ids that no vocabulary has are named instead of looked up."""
    with pytest.raises(InvalidContent, match="is not in the vocabulary of 49152"):
        smollm2.vocab.detokenize(ids)


@pytest.mark.parametrize("token", [-1, 49152])
def test_single_ids_outside_the_vocabulary(smollm2: Model, token: int) -> None:
    """The same for everything that takes one id."""
    for use in (smollm2.vocab.piece, smollm2.vocab.is_eog, smollm2.vocab.is_control):
        with pytest.raises(InvalidContent):
            use(token)


@pytest.mark.parametrize("special", ["bos", "eos", "sep"])
def test_missing_special_tokens(
    tiny: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch, special: str
) -> None:
    """A tokenizer that would add a token its vocabulary lacks is refused: llama.cpp asserts there."""
    vocab = tiny("dense").vocab
    monkeypatch.setattr(vocab, "add_bos", True)
    monkeypatch.setattr(vocab, "add_eos", True)
    monkeypatch.setattr(vocab, special, None)
    if special == "sep":
        monkeypatch.setattr(vocab, "is_wpm", True)
    with pytest.raises(NotSupported, match="special tokens"):
        vocab.tokenize("x")


def test_tiny_vocabularies(tiny: Callable[[str], Model]) -> None:
    """Both tokenizer families of the tiny models bring text back."""
    for kind in ("dense", "spm"):
        vocab = tiny(kind).vocab
        ids = vocab.tokenize("hello there", add_special=False)
        assert vocab.detokenize(ids).strip() == b"hello there"


@pytest.mark.parametrize(
    "ids", [[1.9, 2.9], ["12"], [2**70], [True], [[1, 2]], [1, [2]], [None], 5, "12"], ids=str
)
def test_what_is_no_id(smollm2: Model, ids: Any) -> None:
    """B14: nothing is rounded, parsed or flattened silently, and no number is too large to say so."""
    with pytest.raises(InvalidContent):
        smollm2.vocab.detokenize(ids)


@pytest.mark.parametrize("ids", [[], (), range(3), np.arange(3, dtype=np.uint8), [np.int64(1)]], ids=str)
def test_what_is_one(smollm2: Model, ids: Any) -> None:
    """Any flat sequence of integers will do, an empty one too."""
    assert smollm2.vocab.checked(ids).tolist() == [int(i) for i in ids]


def test_token_bound_of_detokenize(smollm2: Model) -> None:
    """B17: more than 16 M ids are refused before anything is allocated for them."""
    with pytest.raises(InvalidContent, match="the most is 16777216"):
        smollm2.vocab.detokenize(np.full(2**24 + 1, 20, np.int32))
