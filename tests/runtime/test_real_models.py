"""The engine on real models, through the public API."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

import erllama
from erllama import ContextOptions, Done, Token, TokenId
from erllama.engine import llama_backend
from erllama.engine.permit import PROCESS_PERMIT
from erllama.llama.ffi import choose_native_dir

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from erllama import llama

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = [
    f"The capital of {land} is" for land in ("France", "Italy", "Spain", "Japan", "Norway", "Peru", "Chad")
] + ["Once upon a time", "def fibonacci(n):", "Water boils at"]


async def together(
    model: erllama.Model, prompts: list[str], **generation: object
) -> list[erllama.Completion]:
    """All prompts at once, answers in the order of the prompts."""
    answers: dict[int, erllama.Completion] = {}

    async def ask(i: int, prompt: str) -> None:
        answers[i] = await model.complete(prompt, **generation)

    async with trio.open_nursery() as nursery:
        for i, prompt in enumerate(prompts):
            nursery.start_soon(ask, i, prompt)
            await trio.testing.wait_all_tasks_blocked()
    return [answers[i] for i in range(len(prompts))]


async def test_a_model_without_a_vocabulary_is_refused() -> None:
    """A typed error, and the engine goes on: llama.cpp would end the process."""
    async with erllama.open_engine() as engine:
        with pytest.raises(erllama.NotSupported, match="no vocabulary"):
            await engine.load_model(choose_native_dir() / "selftest.gguf")
        assert engine.models() == []


async def test_the_first_answer(smollm2_path: Path) -> None:
    """A real model answers, and every field of the completion is what the others say it is."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(smollm2_path, model_id="smol")
        result = await model.complete("The capital of France is", max_tokens=8, temperature=0.0)
        prompt_ids = model.tokenize("The capital of France is")
        assert "Paris" in result.reply
        assert result.context_tokens == prompt_ids + result.generated
        assert result.committed_tokens == len(result.context_tokens)
        assert result.reply == model.detokenize(result.generated)
        assert result.finish_reason == "length"
        assert result.cache_hit_kind == "cold"
        assert result.stats.n_prompt == len(prompt_ids)
        assert result.stats.n_generated == 8
        assert result.stats.first_token_s > 0


async def test_events_fold_into_the_completion(smollm2_path: Path) -> None:
    """G3-G5: text and ids of the events, `collect` and `complete` agree, for text and token prompts alike."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(smollm2_path)
        generation = {"max_tokens": 12, "temperature": 0.8, "seed": 7}
        whole = await model.complete("Once upon a time", **generation)
        for prompt in ("Once upon a time", model.tokenize("Once upon a time")):
            async with model.stream(prompt, **generation) as events:
                seen = [event async for event in events]
            assert isinstance(seen[-1], Done)
            assert "".join(e.text for e in seen if isinstance(e, Token)) == whole.reply
            assert [e.id for e in seen if isinstance(e, TokenId)] == whole.generated
            assert seen[-1].completion.reply == whole.reply
        async with model.stream("Once upon a time", **generation) as events:
            assert (await erllama.collect(events)).generated == whole.generated


async def test_seeds_decide_and_are_reported(smollm2_path: Path) -> None:
    """G10: the same seed repeats, a drawn one is reported and repeats too."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(smollm2_path)

        async def say(seed: int | None) -> erllama.Completion:
            return await model.complete("My favourite animal is", max_tokens=12, temperature=0.8, seed=seed)

        first = await say(1)
        assert (await say(1)).generated == first.generated
        assert len({tuple((await say(seed)).generated) for seed in range(1, 6)}) > 1
        drawn = await say(None)
        assert (await say(drawn.seed)).generated == drawn.generated


async def test_a_grammar_holds_from_first_to_last_token(smollm2_path: Path) -> None:
    """G26: twenty seeds, every output parses; sampled hot, four at a time."""
    grammar = 'root ::= "{\\"digits\\": \\"" [0-9] [0-9] [0-9] "\\"}"'
    async with erllama.open_engine() as engine:
        model = await engine.load_model(smollm2_path, context=ContextOptions(n_ctx=1024, n_seq_max=4))
        outputs: list[str] = []

        async def ask(seed: int, *, first: bool) -> None:
            result = await model.complete(
                "A number:", grammar=grammar, grammar_first=first, seed=seed, temperature=1.2, max_tokens=64
            )
            assert result.finish_reason == "stop"
            outputs.append(result.reply)

        async with trio.open_nursery() as nursery:
            for seed in range(20):
                nursery.start_soon(lambda seed=seed: ask(seed, first=seed % 4 == 0))
        assert len(outputs) == 20
        assert all(re.fullmatch(r"\d{3}", json.loads(text)["digits"]) for text in outputs)


async def test_greedy_output_is_the_same_with_the_grammar_in_front_or_on_rejection(
    smollm2_path: Path,
) -> None:
    """G9: both grammar modes give the same greedy text."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(smollm2_path)
        grammar = 'root ::= [a-z ]+ "."'
        texts = [
            (
                await model.complete(
                    "The sea is", grammar=grammar, grammar_first=first, temperature=0.0, max_tokens=20
                )
            ).generated
            for first in (False, True)
        ]
        assert texts[0] == texts[1]


async def test_one_decode_per_step_with_mixed_rows(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B13, G14: four requests of different length are prefilled and decoded in common calls."""
    calls: list[int] = []
    decode_rows = llama_backend.decode_rows

    def spy(context: llama.Context, batch: llama.Batch, *rows: Any) -> Any:
        calls.append(batch.n_tokens)
        return decode_rows(context, batch, *rows)

    monkeypatch.setattr(llama_backend, "decode_rows", spy)
    async with erllama.open_engine() as engine:
        model = await engine.load_model(smollm2_path, context=ContextOptions(n_ctx=1024, n_seq_max=4))
        calls.clear()
        await together(model, ["word " * n for n in (5, 50, 150, 5)], max_tokens=10, temperature=0.0)
        statistics = model.statistics()
    assert len(calls) == statistics.n_steps
    assert sum(calls) == statistics.n_prefill_tokens + statistics.n_decode_rows
    assert max(calls) > 4  # prefill beside decode
    assert len(calls) < 4 * 10  # and not one call per token of each


async def test_identical_greedy_prompts_at_once_give_one_answer(smollm2_path: Path) -> None:
    """Sequences do not leak into each other: eight times the same question, one distinct answer."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(smollm2_path, context=ContextOptions(n_ctx=1024, n_seq_max=8))
        answers = await together(model, ["The three primary colours are"] * 8, max_tokens=24, temperature=0.0)
    assert len({tuple(a.generated) for a in answers}) == 1


async def test_everybody_gets_the_answer_to_his_own_question(smollm2_path: Path) -> None:
    """Ten prompts through four sequences: each answer continues its own prompt as it does alone."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(smollm2_path, context=ContextOptions(n_ctx=1024, n_seq_max=4))
        alone = [await model.complete(p, max_tokens=8, temperature=0.0) for p in PROMPTS]
        crowd = await together(model, PROMPTS, max_tokens=8, temperature=0.0)
    agree = sum(a.generated == c.generated for a, c in zip(alone, crowd, strict=True))
    # Row classes differ between alone and in company, so greedy text may split; first tokens rarely do.
    assert sum(a.generated[0] == c.generated[0] for a, c in zip(alone, crowd, strict=True)) >= 9
    assert agree >= 7, f"{agree} of {len(PROMPTS)} agree"


async def test_a_full_cache_is_no_error(smollm2_path: Path) -> None:
    """X10: four requests of 100 + 200 tokens in 512 cells all finish; somebody waited for it."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(smollm2_path, context=ContextOptions(n_ctx=512, n_seq_max=4))
        bias = {
            model.tokenize("<|im_end|>")[0]: float("-inf"),
            model.tokenize("<|endoftext|>")[0]: float("-inf"),
        }
        prompts = [f"{i} " + "tell me more " * 32 for i in range(4)]
        answers = await together(model, prompts, max_tokens=200, temperature=0.0, logit_bias=bias)
        assert [a.finish_reason for a in answers] == ["length"] * 4
        assert all(len(a.generated) == 200 for a in answers)
        assert model.statistics().n_preempted > 0
        assert model.info().available_seqs == 4


async def test_the_event_loop_stays_responsive(smollm2_path: Path) -> None:
    """B6: a heartbeat of 10 ms is not late by more than 100 ms through load, prefill and decode.

    But for one in twenty: a busy machine lets even an idle loop wait.
    """
    late: list[float] = []

    async def heartbeat() -> None:
        while True:
            due = trio.current_time() + 0.01
            await trio.sleep_until(due)
            late.append(trio.current_time() - due)

    async with trio.open_nursery() as nursery, erllama.open_engine() as engine:
        nursery.start_soon(heartbeat)
        model = await engine.load_model(smollm2_path)
        await model.complete("word " * 1000, max_tokens=16)
        nursery.cancel_scope.cancel()
    assert len(late) > 50
    assert sorted(late)[-1 - len(late) // 20] < 0.1


async def test_leaving_a_stream_frees_the_sequence(smollm2_path: Path) -> None:
    """R8: cancelled in prefill and in decode, the slot is free again and the next answer is right."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(smollm2_path)
        reference = (
            await model.complete("The capital of France is", max_tokens=8, temperature=0.0)
        ).generated
        with trio.move_on_after(0.2) as scope:
            await model.complete("word " * 1800, max_tokens=8)
        assert scope.cancelled_caught
        async with model.stream("Once upon a time", max_tokens=500) as events:
            async for event in events:
                if isinstance(event, Token):
                    break
        again = await model.complete("The capital of France is", max_tokens=8, temperature=0.0)
        assert again.generated == reference
        assert model.info().available_seqs == 1


async def test_a_lone_prefill_is_aborted_at_once(smollm2_path: Path) -> None:
    """R2: cancelling the only request of a step does not wait for the step to end."""
    async with erllama.open_engine() as engine:
        context = ContextOptions(n_ctx=4096, n_batch=2048, prefill_chunk_size=2048)
        model = await engine.load_model(smollm2_path, context=context)
        with trio.move_on_after(0.5):
            await model.complete("word " * 3000, max_tokens=1)
        answer = await model.complete("The capital of France is", max_tokens=4, temperature=0.0)
        assert "Paris" in answer.reply
        assert model.statistics().n_aborted_steps == 1


async def test_a_step_over_its_budget_fails_its_callers_only(smollm2_path: Path) -> None:
    """R1, R4: whoever runs gets DecodeTimeout, whoever waits is answered by the fresh context."""
    async with erllama.open_engine() as engine:
        context = ContextOptions(n_ctx=4096, n_batch=2048, prefill_chunk_size=2048, decode_budget_s=0.5)
        model = await engine.load_model(smollm2_path, context=context)
        outcomes: dict[str, object] = {}

        async def ask(name: str, prompt: str) -> None:
            try:
                outcomes[name] = await model.complete(prompt, max_tokens=2, temperature=0.0)
            except erllama.ErllamaError as error:
                outcomes[name] = error

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "slow", "word " * 3000)
            await trio.testing.wait_all_tasks_blocked()
            for i in range(5):
                nursery.start_soon(ask, f"waiting {i}", "The capital of France is")
        assert isinstance(outcomes.pop("slow"), erllama.DecodeTimeout)
        assert len(outcomes) == 5
        assert all(isinstance(o, erllama.Completion) for o in outcomes.values())
        assert model.statistics().n_rebuilt == 1


async def test_two_models_share_the_cores(smollm2_path: Path, tiny_gguf: Callable[[str], Path]) -> None:
    """X27: two models answer at once, each as it does alone."""
    async with erllama.open_engine() as engine:
        first = await engine.load_model(smollm2_path)
        second = await engine.load_model(tiny_gguf("dense"))
        alone = [
            (await m.complete("The capital of France is", max_tokens=16, temperature=0.0)).generated
            for m in (first, second)
        ]
        both: dict[str, list[int]] = {}

        async def ask(model: erllama.Model) -> None:
            answer = await model.complete("The capital of France is", max_tokens=16, temperature=0.0)
            both[model.model_id] = answer.generated

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, first)
            nursery.start_soon(ask, second)
        assert [both[first.model_id], both[second.model_id]] == alone


@pytest.mark.parametrize("kind", ["dense", "window", "recurrent", "hybrid"])
async def test_every_kind_of_memory_generates(tiny_gguf: Callable[[str], Path], kind: str) -> None:
    """Four at once on each kind: identical prompts give one answer, and a repeated one the same."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(tiny_gguf(kind), context=ContextOptions(n_ctx=512, n_seq_max=4))
        assert model.info().memory_kind == kind
        answers = await together(model, ["the quick brown fox"] * 4, max_tokens=16, temperature=0.0)
        assert len({tuple(a.generated) for a in answers}) == 1
        alone = [
            await model.complete("the quick brown fox", max_tokens=16, temperature=0.0) for _ in range(2)
        ]
        assert alone[0].generated == alone[1].generated


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("embedding", erllama.NotSupported),
        ("encdec", erllama.NotSupported),
        ("unknown_arch", erllama.NotSupported),
    ],
)
async def test_what_cannot_generate_says_so_at_load(
    tiny_gguf: Callable[[str], Path], kind: str, error: type[erllama.ErllamaError]
) -> None:
    """X29: a typed error at load that names the reason, and the engine goes on."""
    async with erllama.open_engine() as engine:
        with pytest.raises(error):
            await engine.load_model(tiny_gguf(kind), model_id="m")
        with pytest.raises(erllama.NotLoaded):
            engine.model("m")
        model = await engine.load_model(tiny_gguf("dense"), model_id="m")
        assert (await model.complete("ok", max_tokens=2)).generated


async def test_learned_positions_bound_a_request(tiny_gguf: Callable[[str], Path]) -> None:
    """X29: a model with 128 positions has a context of 128, however many cells there are."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(tiny_gguf("positions"), context=ContextOptions(n_threads=1))
        assert model.info().n_ctx == 128
        done = await model.complete([20] * 120, max_tokens=64, temperature=0.0)
        assert (len(done.generated), done.finish_reason) == (8, "length")
        with pytest.raises(erllama.ContextOverflow):
            await model.complete([20] * 128)
        with pytest.raises(erllama.ContextOverflow):
            await model.prefill_only([20] * 128)


async def test_logprobs_are_of_the_model(smollm2_path: Path) -> None:
    """Greedy decoding takes the likeliest token, and its log-probability is a proper one."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(smollm2_path)
        result = await model.complete("The capital of France is", max_tokens=4, temperature=0.0, logprobs=3)
        assert result.logprobs is not None
        assert [lp.token for lp in result.logprobs] == result.generated
        for lp in result.logprobs:
            assert lp.logprob <= 0
            assert len(lp.top) == 3
            assert lp.top[0] == (lp.token, lp.logprob)


async def test_text_and_tokens_round_trip(smollm2_path: Path) -> None:
    """G24: tokenize and detokenize are inverse for ASCII, accents, CJK and emoji."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(smollm2_path)
        for text in ("hello world", "Ünïcödé", "日本語テキスト", "🦙🦙 llama", "a\tb\nc  d"):
            tokens = model.tokenize(text, add_special=False)
            assert model.detokenize(tokens) == text
            assert await model.tokenize_async(text, add_special=False) == tokens


async def test_a_model_waiting_for_the_permit_can_be_cancelled_and_unloaded(
    tiny_gguf: Callable[[str], Path],
) -> None:
    """R9: somebody else computing without end holds up neither a cancel nor an unload."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(tiny_gguf("dense"))
        with PROCESS_PERMIT.ticket().held(1000), trio.fail_after(60):
            with trio.move_on_after(0.2) as scope:
                await model.complete("hello", max_tokens=3)
            assert scope.cancelled_caught
            await model.unload()


async def test_a_hopeless_prompt_is_refused_before_it_is_tokenised(smollm2_path: Path) -> None:
    """4 MB of spaces would keep llama.cpp's tokenizer busy for most of a minute; their length says enough."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(smollm2_path, context=ContextOptions(n_ctx=512))
        with trio.fail_after(40), pytest.raises(erllama.ContextOverflow, match="context length is 512"):
            await model.complete(" " * (4 << 20))
        assert (await model.complete("ok", max_tokens=1)).generated


async def test_two_engines_at_once(smollm2_path: Path) -> None:
    """Two engines in one program load the same file and do not mind each other."""
    async with erllama.open_engine() as one, erllama.open_engine() as two:
        answers = []
        for engine in (one, two):
            model = await engine.load_model(smollm2_path)
            answers.append((await model.complete("Once upon a time", max_tokens=6, temperature=0.0)).reply)
    assert answers[0] == answers[1]
