"""The tiny models are what they claim to be, to the byte and to llama.cpp."""

from __future__ import annotations

import make_tiny_gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from erllama import llama
from erllama.options import ModelOptions

GENERATING = {
    "dense": "dense",
    "spm": "dense",
    "window": "window",
    "recurrent": "recurrent",
    "hybrid": "hybrid",
}
MARKUP = "<|im_start|>user\nnaïve 日本 🙂\t x  \x01 don't 1234\n\n<think>a</think><|im_end|>"


@pytest.mark.parametrize("kind", make_tiny_gguf.ALL_KINDS)
def test_the_same_bytes_every_time(kind, tmp_path):
    """Two runs write equal files of at most 1.1 MB, and nothing else."""
    first = make_tiny_gguf.make_tiny_gguf(kind, tmp_path / "first.gguf").read_bytes()
    second = make_tiny_gguf.make_tiny_gguf(kind, tmp_path / "second.gguf").read_bytes()
    assert first == second
    assert len(first) < 1.1e6
    assert all(path.name.endswith(".gguf") and not path.name.startswith(".") for path in tmp_path.iterdir())


def _generate(path, prompt: str, n_tokens: int) -> tuple[str, list[int]]:
    """Memory kind and greedy ids."""
    greedy = llama.SamplerParams(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=1
    )
    with llama.Model.open(str(path), ModelOptions()) as model:
        params = llama.ContextParams(n_ctx=512, n_batch=512, n_seq_max=2)
        with (
            llama.Context.open(model, params) as context,
            llama.SamplerChain(model.vocab, greedy) as chain,
        ):
            batch = llama.Batch(512, 2)
            tokens, pos, ids = model.vocab.tokenize(prompt, add_special=True, parse_special=True), 0, []
            for _ in range(n_tokens):
                batch.clear()
                row = batch.add(0, tokens, pos)
                assert context.decode(batch) == 0
                pos += len(tokens)
                tokens = [chain.sample(context, row)]
                assert not model.vocab.is_eog(tokens[0])
                ids += tokens
            return context.memory_kind.value, ids


@pytest.mark.model
@pytest.mark.parametrize(("kind", "memory"), GENERATING.items())
def test_each_generating_kind_remembers(tiny_gguf, kind, memory):
    """X4's kinds have the memory they stand for, do not repeat themselves, and no word is forgotten.

    A cache that lost or doubled a cell must show in what they say, so one word near the start of 200
    tokens has to change it.
    """
    kind_found, ids = _generate(tiny_gguf(kind), "The capital of France is Paris.", 40)
    assert kind_found == memory
    assert len(set(ids)) > 12
    filler = " and then the answers of the sea" * 20
    said = [_generate(tiny_gguf(kind), f"{word} asks{filler}", 24)[1] for word in ("Paris", "Rome", "The")]
    assert said[0] != said[1] != said[2] != said[0]


@pytest.mark.model
def test_the_window_is_as_wide_as_it_says(tiny_gguf):
    """llama.cpp finds the sliding window in the file."""
    with llama.Model.open(str(tiny_gguf("window")), ModelOptions()) as model:
        assert model.facts.n_swa == make_tiny_gguf.WINDOW


@pytest.mark.model
@pytest.mark.parametrize("kind", ["dense", "spm"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="▁\0"), max_size=40))
def test_any_text_comes_back(tiny_gguf, kind, text):
    """Both vocabularies hold every byte: text → ids → text is the identity."""
    vocab = _vocab(tiny_gguf(kind))
    ids = vocab.tokenize(text, add_special=False, parse_special=False)
    assert b"".join(vocab.piece(i) for i in ids).decode() == text


_open_models: dict[str, llama.Model] = {}


def _vocab(path) -> llama.Vocab:
    """One model per file, kept open: hypothesis asks often."""
    key = str(path)
    if key not in _open_models:
        _open_models[key] = llama.Model.open(key, ModelOptions(vocab_only=True))
    return _open_models[key].vocab


@pytest.fixture(scope="module", autouse=True)
def _close_models():
    yield
    while _open_models:
        _open_models.popitem()[1].close()


@pytest.mark.model
def test_control_tokens_are_single_tokens(tiny_gguf):
    """`<|im_start|>` is one control token where it is parsed, and many where it is text."""
    vocab = _vocab(tiny_gguf("dense"))
    parsed = vocab.tokenize(MARKUP, add_special=True, parse_special=True)
    plain = vocab.tokenize(MARKUP, add_special=True, parse_special=False)
    assert parsed[0] == plain[0] == 0
    assert parsed[1] == 1
    assert parsed[-1] == 2
    assert len(plain) > len(parsed) + 10


@pytest.mark.model
def test_the_embedding_model_encodes(tiny_gguf):
    """Mean-pooled vectors that differ from text to text."""
    with llama.Model.open(str(tiny_gguf("embedding")), ModelOptions()) as model:
        params = llama.ContextParams(n_ctx=128, n_batch=128, embeddings=True, pooling="mean")
        with llama.Context.open(model, params) as context:
            vectors = []
            for text in ("the sea", "a question"):
                batch = llama.Batch(128)
                batch.add(
                    0, model.vocab.tokenize(text, add_special=True, parse_special=True), 0, output="all"
                )
                assert context.encode(batch) == 0
                vectors.append(context.embeddings_seq(0).copy())
    assert vectors[0].shape == (make_tiny_gguf.N_EMBD,)
    assert abs(vectors[0] - vectors[1]).max() > 0.01


def test_the_command_line_lists_and_writes(tmp_path, capsys):
    """`--list` has every kind; KIND OUT writes one."""
    assert make_tiny_gguf.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(make_tiny_gguf.ALL_KINDS)
    assert make_tiny_gguf.main(["dense", str(tmp_path / "d.gguf")]) == 0
    assert (tmp_path / "d.gguf").read_bytes()[:4] == b"GGUF"
