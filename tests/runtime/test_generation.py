"""complete, stream and collect as users call them."""

from __future__ import annotations

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

import erllama
from erllama import (
    CacheDelta,
    Completion,
    ContextOverflow,
    Done,
    InvalidContent,
    InvalidGrammar,
    InvalidOption,
    StickyBusy,
    Token,
    TokenId,
    UnknownOption,
)
from erllama.testing import FakeBackend, cancel_at_every_checkpoint
from erllama.testing.fake import CONTROL, EOG, N_VOCAB

from .scenes import events_of, load, loaded, wait_idle


def says(text: str | bytes | list[int]) -> FakeBackend:
    """A model that answers any prompt with this, then ends."""
    ids = list(text.encode() if isinstance(text, str) else text)
    return FakeBackend(script=lambda _: ids)


async def test_a_completion_field_by_field():
    """G1: everything a Completion tells about a scripted answer."""
    async with loaded(says("hello")) as model:
        answer = await model.complete("prompt", seed=3)
    ids = [*b"hello", EOG]
    assert isinstance(answer, Completion)
    assert answer.reply == "hello"
    assert answer.generated == ids
    assert answer.context_tokens == [*b"prompt", *ids]
    assert answer.committed_tokens == 12
    assert (answer.finish_reason, answer.stop_sequence, answer.seed) == ("stop", None, 3)
    assert (answer.finish_key, answer.cache_hit_kind, answer.cache_source) == (None, "cold", None)
    assert (answer.cache_delta, answer.logprobs) == (CacheDelta(read=0, created=0), None)
    assert (answer.stats.n_prompt, answer.stats.n_cached, answer.stats.n_generated) == (6, 0, 6)


@pytest.mark.parametrize("entry", ["complete", "stream"])
async def test_64_tokens_unless_told_otherwise(entry: str):
    """G2: a model that never ends stops after 64 ids, reason length (G25)."""
    async with loaded() as model:
        if entry == "complete":
            answer = await model.complete("go on")
        else:
            async with model.stream("go on") as events:
                answer = await erllama.collect(events)
        assert (len(answer.generated), answer.finish_reason) == (64, "length")
        assert len((await model.complete("go on", max_tokens=65)).generated) == 65


async def test_text_and_ids_of_it_are_the_same_request():
    """G3: the same prompt as text and as ids gives identical events."""
    async with loaded() as model:
        by_text = await events_of(model, "prompt", seed=1)
        by_ids = await events_of(model, list(b"prompt"), seed=1)
        by_array = await events_of(model, np.frombuffer(b"prompt", dtype=np.uint8), seed=1)

    def bare(events: list[object]) -> list[object]:
        return [getattr(e, "text", getattr(e, "id", None)) for e in events]

    assert bare(by_text) == bare(by_ids) == bare(by_array)
    assert by_text[-1].completion.generated == by_ids[-1].completion.generated


async def test_stream_collect_and_complete_agree():
    """G5, G6: the same seed three ways: same ids, text and end; the prompt and the ids are the context."""
    async with loaded() as model:
        answer = await model.complete("p", seed=9, max_tokens=30, stop="zz", logprobs=2)
        async with model.stream("p", seed=9, max_tokens=30, stop="zz", logprobs=2) as events:
            collected = await erllama.collect(events)
        events = await events_of(model, "p", seed=9, max_tokens=30, stop="zz", logprobs=2)
    done = events[-1].completion
    for other in (collected, done):
        for name in (
            "reply",
            "generated",
            "context_tokens",
            "finish_reason",
            "stop_sequence",
            "logprobs",
            "seed",
        ):
            assert getattr(other, name) == getattr(answer, name), name
    assert [e.id for e in events if isinstance(e, TokenId)] == answer.generated
    assert "".join(e.text for e in events if isinstance(e, Token)) == answer.reply
    assert [*b"p", *answer.generated] == answer.context_tokens
    assert len(answer.logprobs) == len(answer.generated)


async def test_events_are_one_closed_family():
    """G4: tokens, ids and one Done at the end, all naming the request; an id before its text."""
    async with loaded(says([*b"a", CONTROL, *"🎉".encode()])) as model, model.stream("p") as stream:
        events = [event async for event in stream]
        assert [type(e) for e in events] == [TokenId, Token, *[TokenId] * 5, Token, TokenId, Done]
        assert {e.request for e in events} == {stream.request}
        assert str(stream.request) == f"fake#{stream.request.id}"
        assert [e.text for e in events if isinstance(e, Token)] == ["a", "🎉"]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with pytest.raises(InvalidContent, match="no result any more"):
            await erllama.collect(stream)


@given(st.binary(max_size=40))
def test_joined_text_is_the_decoded_bytes(raw: bytes):
    """G4: whatever bytes the model produces, the text is their decoding, in whole characters."""

    async def main() -> None:
        async with loaded(says(raw)) as model:
            events = await events_of(model, "p")
        texts = [e.text for e in events if isinstance(e, Token)]
        assert "".join(texts) == events[-1].completion.reply == raw.decode(errors="replace")
        assert all(texts)
        assert events[-1].completion.generated == [*raw, EOG]

    trio.run(main)


@pytest.mark.parametrize("n", [1, 2, 3])
async def test_max_tokens_inside_a_character(n: int):
    """An emoji cut by max_tokens is U+FFFD in reply and stream alike."""
    async with loaded(says("🎉")) as model:
        events = await events_of(model, "p", max_tokens=n)
    assert [e.text for e in events if isinstance(e, Token)] == ["\ufffd"]
    assert events[-1].completion.reply == "\ufffd"


@pytest.mark.parametrize("stop", ["END", ["END"], ("nothing", "END"), ["ND", "END"]])
async def test_stop_strings_halt_and_never_show(stop: object):
    """G8: text before the stop only, in chunks and reply alike; the model is not asked for more."""
    async with loaded(says("all of it END and more")) as model:
        events = await events_of(model, "p", stop=stop)
        answer = events[-1].completion
        assert "".join(e.text for e in events if isinstance(e, Token)) == answer.reply == "all of it "
        assert (answer.finish_reason, answer.stop_sequence) == ("stop", "END")
        assert bytes(answer.generated) == b"all of it END"
        assert (await model.complete("p", stop=stop)).reply == answer.reply


async def test_no_stop_sequence_at_other_ends():
    """G8: after length, natural end and cancel `stop_sequence` is None and held text is delivered."""
    async with loaded(says("so EN")) as model:
        natural = await model.complete("p", stop="END")
        length = await model.complete("p", stop="END", max_tokens=4)
        async with model.stream("p", stop="END") as events:
            events.cancel()
            cancelled = await erllama.collect(events)
    got = [(a.reply, a.finish_reason, a.stop_sequence) for a in (natural, length, cancelled)]
    assert got == [("so EN", "stop", None), ("so E", "length", None), ("", "cancelled", None)]


async def test_seeds():
    """G10: a given seed repeats itself and is reported; a drawn one, given, repeats its answer."""
    async with loaded() as model:
        one, again, two, drawn = [
            await model.complete("p", **g) for g in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {})
        ]
        assert one.generated == again.generated != two.generated
        assert (one.seed, two.seed) == (1, 2)
        assert (await model.complete("p", seed=drawn.seed)).generated == drawn.generated


async def test_a_grammar_reaches_the_chain_and_a_bad_one_leaves_nothing():
    """A grammar constrains every id; one that cannot be read is refused before anything was queued."""
    backend = FakeBackend()
    async with loaded(backend) as model:
        answer = await model.complete("p", grammar="root ::= digits")
        assert answer.reply.isdigit()
        with pytest.raises(InvalidGrammar):
            await model.complete("p", grammar="root ::=")
        await wait_idle(model)
        assert backend.live_samplers == set()


BAD_OPTIONS = [
    ({"max_token": 5}, UnknownOption, "max_token"),
    ({"max_tokens": 0}, InvalidOption, "max_tokens"),
    ({"max_tokens": "5"}, InvalidOption, "max_tokens"),
    ({"max_tokens": True}, InvalidOption, "max_tokens"),
    ({"temperature": -0.1}, InvalidOption, "temperature"),
    ({"temperature": float("nan")}, InvalidOption, "temperature"),
    ({"top_p": 1.5}, InvalidOption, "top_p"),
    ({"seed": 2**32 - 1}, InvalidOption, "seed"),
    ({"stop": [""]}, InvalidOption, "stop"),
    ({"logit_bias": {N_VOCAB: 1.0}}, InvalidOption, "logit_bias"),
    ({"on_full": "wait"}, InvalidOption, "on_full"),
]


@pytest.mark.parametrize("entry", ["complete", "stream"])
@pytest.mark.parametrize(("options", "error", "key"), BAD_OPTIONS, ids=str)
async def test_bad_options_are_refused_before_anything_happens(
    entry: str, options: dict, error: type, key: str
):
    """G12: a typed error naming the key; nothing was admitted and the model computed nothing."""
    backend = FakeBackend()
    async with loaded(backend) as model:
        with pytest.raises(error) as caught:
            await (
                model.complete("p", **options) if entry == "complete" else events_of(model, "p", **options)
            )
        assert caught.value.detail["key"] == key
        await wait_idle(model)
    assert backend.steps == []
    assert backend.live_samplers == set()


BAD_PROMPTS = {
    "empty text": "",
    "no tokens": [],
    "bytes": b"abc",
    "bytearray": bytearray(b"abc"),
    "floats": [1.0, 2.0],
    "nested": [[1, 2], [3, 4]],
    "ragged": [[1], [2, 3]],
    "nested nothing": [[]],
    "strings": ["a"],
    "None inside": [1, None],
    "booleans": [True, False],
    "a number": 5,
    "None": None,
    "a set": {1, 2},
    "beyond the vocabulary": [1, N_VOCAB],
    "negative": [-1],
    "beyond 64 bits": [2**70],
    "beyond 63 bits": [2**63],
    "lone surrogate": "a\ud800",
}


@pytest.mark.parametrize("prompt", list(BAD_PROMPTS.values()), ids=list(BAD_PROMPTS))
async def test_what_is_no_prompt_is_invalid_content(prompt: object):
    """Every other thing than text and flat ids in the vocabulary is refused, and nothing was computed."""
    backend = FakeBackend()
    async with loaded(backend) as model:
        with pytest.raises(InvalidContent):
            await model.complete(prompt)
        await wait_idle(model)
    assert backend.steps == []


async def test_a_token_outside_the_vocabulary_is_named():
    """The error says which token, where, and how many there are."""
    async with loaded() as model:
        with pytest.raises(InvalidContent, match=f"token 999 at index 2 .* {N_VOCAB}") as caught:
            await model.complete([1, 2, 999])
        assert caught.value.detail == {"index": 2, "token": 999, "n_vocab": N_VOCAB}


async def test_the_length_of_a_prompt():
    """R6: n_ctx - 1 tokens give one token, n_ctx are refused with both lengths, the next request is fine."""
    backend = FakeBackend(n_ctx=100)
    async with loaded(backend) as model:
        longest = await model.complete([1] * 99)
        assert (len(longest.generated), longest.finish_reason) == (1, "length")
        n_steps = len(backend.steps)
        for n in (100, 101):
            with pytest.raises(ContextOverflow, match=f"{n} tokens.*100") as caught:
                await model.complete([1] * n)
            assert caught.value.detail == {"n_prompt": n, "n_ctx": 100}
        assert len(backend.steps) == n_steps
        at_the_end = await model.complete([1] * 90, max_tokens=1000)
        assert (at_the_end.committed_tokens, at_the_end.finish_reason) == (100, "length")
        assert (await model.complete("after", seed=1)).stats.n_generated == 64


async def test_scalar_types_of_numpy_are_numbers():
    """Token ids of any integer dtype are accepted and come back as plain ints."""
    async with loaded() as model:
        answer = await model.complete(np.array([1, 2, 3], dtype=np.int32), max_tokens=np.int64(2), seed=1)
        assert answer.context_tokens[:3] == [1, 2, 3]
        assert {type(t) for t in answer.context_tokens} == {int}
        assert len(answer.generated) == 2


async def test_a_session_has_one_request_at_a_time():
    """A second request of a session in flight is refused; another session and the next turn are not."""
    async with loaded(FakeBackend(n_slots=3)) as model:
        async with model.stream("p", session_id="s", max_tokens=500):
            with pytest.raises(StickyBusy, match="'s'"):
                await model.complete("q", session_id="s")
            await model.complete("q", session_id="t", max_tokens=1)
            await model.complete("q", max_tokens=1)
        await model.complete("q", session_id="s", max_tokens=1)
        await wait_idle(model)


async def test_leaving_by_time_frees_the_slot(autojump_clock):
    """R8: `move_on_after` around a stream and around complete: nothing is left a step later."""
    async with loaded(FakeBackend(step_delay_s=1.0)) as model:
        with trio.move_on_after(5.5) as scope:
            async for _ in endless(model):
                pass
        assert scope.cancelled_caught
        with trio.move_on_after(3.5) as scope:
            await model.complete("p", max_tokens=4000)
        assert scope.cancelled_caught
        await trio.sleep(1.1)
        await wait_idle(model)


async def endless(model: erllama.Model):
    """Events as an application might wrap them."""
    async with model.stream("p", max_tokens=4000) as events:
        async for event in events:
            yield event


@pytest.mark.parametrize("prompt", ["text " * 60, [7] * 300, "x" * 20_000], ids=["text", "ids", "long text"])
async def test_cancelled_at_every_checkpoint(prompt: str | list[int]):
    """Through the public call too: no slot, sampler or request stays, wherever it is cancelled."""
    backend = FakeBackend(n_ctx=30_000, n_batch=20_000)
    async with loaded(backend) as model:

        async def attempt() -> None:
            await model.complete(prompt, max_tokens=4, grammar="root ::= digits")

        async def check() -> None:
            await wait_idle(model)
            assert backend.live_samplers == set()

        assert await cancel_at_every_checkpoint(attempt, check) > 5


async def test_opening_a_stream_is_a_checkpoint():
    """Opening streams in a loop lets others run, with ids as with text."""
    async with loaded() as model:
        for prompt in ("p", [1]):
            context = model.stream(prompt)
            with trio.testing.assert_checkpoints():
                await context.__aenter__()
            await context.__aexit__(None, None, None)


async def test_text_and_tokens():
    """G24: tokenize and detokenize on the model, sync and async, long text included."""
    async with loaded() as model:
        for text in ("plain", "é🎉 <control> x", "long é" * 20_000):
            ids = model.tokenize(text)
            assert await model.tokenize_async(text) == ids
            assert model.detokenize(ids) == await model.detokenize_async(ids) == text
        assert model.tokenize("<control>") == [CONTROL]
        assert model.tokenize("<control>", parse_special=False) == list(b"<control>")
        assert model.detokenize([0xFF, 0x41]) == "\ufffdA"
        assert model.detokenize([]) == ""
        for bad in ([N_VOCAB], [-1], [1.5], [[1]]):
            with pytest.raises(InvalidContent):
                model.detokenize(bad)


async def test_two_models_answer_as_each_does_alone():
    """X27: two models on one engine at once, each right."""
    async with erllama.open_engine() as engine:
        a, b = await load(engine, model_id="a"), await load(engine, model_id="b")
        solo = [(await m.complete("p", seed=1)).generated for m in (a, b)]
        got: dict[str, list[int]] = {}

        async def ask(model: erllama.Model) -> None:
            got[model.model_id] = (await model.complete("p", seed=1)).generated

        async with trio.open_nursery() as nursery:
            for model in (a, b):
                nursery.start_soon(ask, model)
    assert [got["a"], got["b"]] == solo
