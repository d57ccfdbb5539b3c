"""Embeddings over HTTP: the official clients against real models, and everything odd on arithmetic."""

from __future__ import annotations

import base64
from functools import partial

import anthropic
import numpy as np
import ollama
import openai
import pytest
import trio

from erllama.server.embedding_models import context_of
from erllama.server.settings import ModelTable
from erllama.testing import FakeBackend, FakeEmbedder, fake_vector
from erllama.types import EmbeddingFacts

from .conftest import start_server, stop_server
from .scenes import serving, until

HELLO = [{"role": "user", "content": "hello"}]
TEXTS = ["the sea", "a question", "the lighthouse keeper"]
N_EMBD = 8


def fake(*, generates=False, pooling="mean", n_ctx=100, **more):
    facts = EmbeddingFacts(n_embd=N_EMBD, pooling=pooling, n_ctx=n_ctx, n_rows=100, n_lanes=4, whole=True)
    return FakeBackend(embedder=FakeEmbedder(facts), generates=generates, **more)


def unit(vector):
    return vector / np.linalg.norm(vector)


def expected(text):
    return unit(fake_vector(list(text.encode()), N_EMBD))


async def ask(scene, path="/v1/embeddings", **body):
    return await scene.client.post(path, json={"model": "fake", **body})


@pytest.fixture(scope="module")
def embedding_server(tiny_gguf, tmp_path_factory):
    """A server with an encoder, a generator, and one of each that is told to be the other."""
    config = tmp_path_factory.mktemp("server") / "server.toml"
    dense = tiny_gguf("dense")
    config.write_text(
        f"[models.bert]\npath = '{tiny_gguf('bert')}'\nembedding_dimensions = [16]\n"
        f"[models.dense]\npath = '{dense}'\n"
        f"[models.both]\npath = '{dense}'\nembeddings = true\n"
        f"[models.off]\npath = '{tiny_gguf('bert')}'\nembeddings = false\n"
    )
    process, url = start_server("--config", str(config), "--no-cache")
    yield url
    stop_server(process)


@pytest.fixture(scope="module")
def openai_client(embedding_server):
    """OpenAI's package."""
    with openai.OpenAI(base_url=f"{embedding_server}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def ollama_client(embedding_server):
    """Ollama's package."""
    made = ollama.Client(host=embedding_server)
    yield made
    made._client.close()


@pytest.mark.model
@pytest.mark.slow
def test_openai(openai_client):
    """H1: text, lists and token ids, as numbers and as base64 (the package's own default)."""
    many = openai_client.embeddings.create(model="bert", input=TEXTS)
    assert [d.index for d in many.data] == [0, 1, 2]
    assert all(len(d.embedding) == 64 for d in many.data)
    assert np.linalg.norm(many.data[0].embedding) == pytest.approx(1, abs=1e-4)
    one = openai_client.embeddings.create(model="bert", input=TEXTS[1], encoding_format="float")
    assert np.allclose(one.data[0].embedding, many.data[1].embedding, atol=1e-3)
    assert one.usage.prompt_tokens == one.usage.total_tokens > 2
    short = openai_client.embeddings.create(model="bert", input=TEXTS[1], dimensions=16)
    assert np.allclose(short.data[0].embedding, unit(np.array(one.data[0].embedding)[:16]), atol=1e-4)
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.embeddings.create(model="bert", input="x", dimensions=32)
    assert refused.value.param == "dimensions"
    ids = openai_client.embeddings.create(model="bert", input=[[2, 9, 3], [2, 10, 3]])
    assert ids.usage.prompt_tokens == 6
    with pytest.raises(openai.BadRequestError) as long:
        openai_client.embeddings.create(model="bert", input="the sea " * 200)
    assert long.value.code == "context_length_exceeded"


@pytest.mark.model
@pytest.mark.slow
def test_ollama(ollama_client):
    """H4: many and one; what is too long is cut unless that is not wanted."""
    many = ollama_client.embed(model="bert", input=TEXTS)
    assert len(many.embeddings) == 3
    assert many.prompt_eval_count > 6
    assert many.total_duration > 0
    one = ollama_client.embeddings(model="bert", prompt=TEXTS[2])
    assert np.allclose(one.embedding, many.embeddings[2], atol=1e-3)
    long = ollama_client.embed(model="bert", input="the sea " * 200)
    assert long.prompt_eval_count == 128
    with pytest.raises(ollama.ResponseError) as refused:
        ollama_client.embed(model="bert", input="the sea " * 200, truncate=False)
    assert refused.value.status_code == 400
    assert ollama_client.show("bert").capabilities == ["embedding"]


@pytest.mark.model
@pytest.mark.slow
def test_who_embeds_and_who_does_not(embedding_server, openai_client, ollama_client):
    """H48: encoders do and cannot chat, generators the other way round; the settings say otherwise."""
    assert openai_client.embeddings.create(model="both", input="x").data
    assert openai_client.chat.completions.create(model="both", messages=HELLO, max_tokens=2).choices
    for model in ("dense", "off"):
        with pytest.raises(openai.APIStatusError) as status:
            openai_client.embeddings.create(model=model, input="x")
        assert status.value.status_code == 501
    with pytest.raises(openai.APIStatusError) as refused:
        openai_client.chat.completions.create(model="bert", messages=HELLO)
    assert refused.value.status_code == 501
    assert refused.value.body["type"] == "server_error" or refused.value.code
    for call in (partial(ollama_client.chat, messages=HELLO), partial(ollama_client.generate, prompt="x")):
        with pytest.raises(ollama.ResponseError) as wrong:
            call(model="bert")
        assert wrong.value.status_code == 501
    client = anthropic.Anthropic(base_url=embedding_server, api_key="none", max_retries=0)
    with client, pytest.raises(anthropic.APIStatusError) as status:
        client.messages.create(model="bert", max_tokens=4, messages=HELLO)
    assert status.value.status_code == 501


async def test_every_shape_of_input():
    """A string, strings, ids, lists of ids; vectors of unit length, in order, with their tokens counted."""
    async with serving(fake) as scene:
        for given, texts in (
            ("ab", ["ab"]),
            (["ab", "cde"], ["ab", "cde"]),
            (list(b"ab"), ["ab"]),
            ([list(b"ab"), list(b"cde")], ["ab", "cde"]),
        ):
            reply = (await ask(scene, input=given)).json()
            assert [d["index"] for d in reply["data"]] == list(range(len(texts)))
            for each, text in zip(reply["data"], texts, strict=True):
                assert np.allclose(each["embedding"], expected(text), atol=1e-6)
            assert reply["usage"] == {"prompt_tokens": len("".join(texts))} | {
                "total_tokens": len("".join(texts))
            }
            assert (reply["object"], reply["model"]) == ("list", "fake")
        coded = (await ask(scene, input="ab", encoding_format="base64")).json()["data"][0]["embedding"]
        assert np.allclose(np.frombuffer(base64.b64decode(coded), "<f4"), expected("ab"))
        metrics = (await scene.client.get("/metrics")).text
        assert 'erllama_tokens_total{kind="embedded",model="fake"}' in metrics


async def test_limits_come_before_anything_slow():
    """H45: 256 inputs are taken and 257 are not, and nothing was loaded for that."""
    async with serving(fake) as scene:
        many = ["x"] * 257
        for path in ("/v1/embeddings", "/api/embed"):
            assert (await ask(scene, path, input=many)).status_code == 400
        for wrong in ([], "", ["a", ""], [[]], None, 7, [1, "a"], [[1], "a"]):
            reply = await ask(scene, input=wrong)
            assert reply.status_code == 400, wrong
            assert reply.json()["error"]["param"].startswith("input")
        assert scene.loads == []
        assert len((await ask(scene, input=many[:256])).json()["data"]) == 256
        assert len((await ask(scene, input=list(range(65, 91)) * 3)).json()["data"]) == 1
        for more in ({"encoding_format": "hex"}, {"dimensions": 0}, {"colour": 1}, {"dimensions": 5}):
            assert (await ask(scene, input="x", **more)).status_code == 400
        assert (await ask(scene, input="x", dimensions=N_EMBD)).status_code == 200
        assert (await ask(scene, input=[999])).status_code == 400
        assert (await ask(scene, input="x" * 101)).json()["error"]["code"] == "context_length_exceeded"
        missing = await scene.client.post("/v1/embeddings", json={"model": "nobody", "input": "x"})
        assert missing.status_code == 404


async def test_ollamas_shapes():
    """One vector a text; without text none, and the model is loaded, or let go."""
    async with serving(fake) as scene:
        reply = (await ask(scene, "/api/embed", input=["ab", "c"], colour=1)).json()
        assert np.allclose(reply["embeddings"][1], expected("c"), atol=1e-6)
        assert reply["prompt_eval_count"] == 3
        assert reply["total_duration"] >= reply["load_duration"] >= 0
        single = await ask(scene, "/api/embeddings", prompt="ab", colour=1)
        assert np.allclose(single.json()["embedding"], expected("ab"), atol=1e-6)
        assert single.headers["x-erllama-ignored"] == "colour"
        cut = await ask(scene, "/api/embed", input="x" * 150)
        assert cut.json()["prompt_eval_count"] == 100
        assert cut.headers["x-erllama-cut-tokens"] == "50"
        refused = await ask(scene, "/api/embed", input="x" * 150, truncate=False)
        assert refused.status_code == 400
        assert refused.json()["reason"] == "context_overflow"
        assert (await ask(scene, "/api/embed", input="")).json()["embeddings"] == []
        assert (await ask(scene, "/api/embeddings")).json() == {"embedding": []}
        assert (await ask(scene, "/api/embed", input="x", keep_alive=0)).status_code == 200
        assert not scene.entry().is_loaded


async def test_models_without_embeddings_answer_501():
    """In each dialect's shape; so do those that score."""
    for make in (FakeBackend, partial(fake, pooling="rank")):
        async with serving(make) as scene:
            reply = await ask(scene, input="x")
            assert reply.status_code == 501
            assert reply.json()["error"]["code"] == "not_supported"
            for path, body in (("/api/embed", {"input": "x"}), ("/api/embeddings", {"prompt": "x"})):
                reply = await ask(scene, path, **body)
                assert reply.status_code == 501
                assert reply.json()["reason"] == "not_supported"


async def test_who_hangs_up_is_not_computed_for():
    """The native call ends, and the place in the queue is free."""

    def slow():
        made = fake(threaded=True)
        made.embedder.delay_s = 20
        return made

    async with serving(slow) as scene:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(ask, scene, input="x"))
            await until(lambda: "fake" in scene.backends and scene.backends["fake"].embedder.calls)
            nursery.cancel_scope.cancel()
        await until(lambda: not scene.entry().n_inside)


@pytest.mark.parametrize(
    ("kind", "table", "embeddings"),
    [
        ("bert", {}, True),
        ("embedding", {}, True),
        ("dense", {}, False),
        ("dense", {"embeddings": True}, True),
        ("dense", {"context": {"embeddings": True}}, True),
        ("bert", {"embeddings": False}, False),
        ("bert", {"context": {"embeddings": False}}, False),
    ],
)
async def test_how_a_model_is_opened(tiny_gguf, kind, table, embeddings):
    """H48: as its file says, unless the settings do."""
    options = await context_of(ModelTable(**table), tiny_gguf(kind))
    assert options.embeddings is embeddings


async def test_encoders_are_opened_for_their_longest_text(tiny_gguf):
    """One input fits into a batch, up to a bound; what the settings say stays."""
    options = await context_of(ModelTable(), tiny_gguf("bert"))
    assert (options.n_ctx, options.n_batch) == (128, 128)
    options = await context_of(ModelTable(), tiny_gguf("embedding"))
    assert (options.n_ctx, options.n_batch) == (2048, 2048)
    options = await context_of(ModelTable(context={"n_ctx": 64, "n_batch": 32}), tiny_gguf("bert"))
    assert (options.n_ctx, options.n_batch) == (64, 32)
