"""A program that uses the public API, for the type checker: `mypy --strict` must find nothing here.

It is never run. Each line states a type that users rely on.
"""

from __future__ import annotations

from typing import assert_type

import numpy as np
import numpy.typing as npt

import erllama
from erllama import (
    CacheHit,
    ChatMessage,
    ChatParams,
    ChatStatistics,
    Completion,
    ContextOptions,
    Done,
    EmbeddingFacts,
    Engine,
    Miss,
    Model,
    ModelInfo,
    ModelOptions,
    Prefilled,
    RequestInfo,
    Stats,
    Thinking,
    Token,
    TokenId,
    ToolCall,
    ToolCallDelta,
)


async def loading() -> None:
    """Engines and models."""
    async with erllama.open_engine(stream_buffer_events=64) as engine:
        assert_type(engine, Engine)
        model = await engine.load_model(
            "model.gguf",
            model_id="m",
            model=ModelOptions(n_gpu_layers=0, load_mode="mmap"),
            context=ContextOptions(n_ctx=None, n_seq_max=4, flash_attn="auto", type_k="q8_0"),
            progress=lambda share: None,
        )
        assert_type(model, Model)
        assert_type(engine.model("m"), Model)
        assert_type(engine.models(), list[ModelInfo])
        assert_type(engine.requests(), list[RequestInfo])
        assert_type(model.model_id, str)
        await generating(model)
        await engine.unload("m")


async def generating(model: Model) -> None:
    """One-shot, streamed and collected."""
    result = await model.complete("Once", max_tokens=8, temperature=0.0, stop=["\n"], seed=1)
    assert_type(result, Completion)
    assert_type(result.reply, str)
    assert_type(result.generated, list[int])
    assert_type(result.stats, Stats)
    assert_type(result.stats.first_token_s, float)

    async with model.stream([1, 2, 3], logit_bias={5: -1.0}, logprobs=3) as events:
        async for event in events:
            match event:
                case Token():
                    assert_type(event.text, str)
                case TokenId():
                    assert_type(event.id, int)
                case Done():
                    assert_type(event.completion, Completion)

    async with model.stream("Once") as events:
        assert_type(await erllama.collect(events), Completion)


async def keeping(model: Model) -> None:
    """Sessions, pins, and what is there."""
    ready = await model.prefill_only("Once", session_id=("a", 1), parent_key=None, on_full="error")
    assert_type(ready, Prefilled)
    assert_type(ready.finish_key, bytes | None)
    more = await model.continue_([1], session_id=("a", 1), expect_committed=ready.context_tokens, seed=1)
    assert_type(more, Completion)
    assert_type(more.miss, Miss | None)
    async with model.continue_stream("x", session_id=1, stop="\n") as events:
        assert_type(await erllama.collect(events), Completion)
    await model.end_session(1)
    assert_type(await model.pin("Once", ttl_s=1.0), int)
    assert_type(await model.unpin("Once"), bool)
    assert_type(model.cached_prefix_len([1, 2]), int)
    assert_type(model.last_cache_hit(), CacheHit | None)
    assert_type(model.info().pinned_idle_seqs, int)


def tokens(model: Model) -> None:
    """Text to ids and back."""
    assert_type(model.tokenize("text", add_special=False), list[int])
    assert_type(model.detokenize([1, 2]), str)


def failures(error: erllama.ErllamaError) -> None:
    """Every error says what a program needs."""
    assert_type(error.reason, str)
    assert_type(error.http_status, int)
    assert_type(error.retry_after_s, float | None)


async def mistakes(model: Model) -> None:
    """What the checker refuses. An ignore that is not needed is an error, so these lines are tests."""
    await model.complete("x", temprature=0.0)  # type: ignore[call-arg]
    await model.complete("x", max_tokens="8")  # type: ignore[arg-type]
    await model.continue_("x", session_id=1, parent_key=b"")  # type: ignore[call-arg]
    ContextOptions(flash_attn="maybe")  # type: ignore[arg-type]
    ModelOptions(n_gpu_layer=1)  # type: ignore[call-arg]


async def chatting(model: Model) -> None:
    """Messages in, a message out; halves; events."""
    answer = await model.chat(
        [{"role": "user", "content": "Hi"}], tools=[{"type": "function"}], json_schema={}, temperature=0.0
    )
    assert_type(answer.message, ChatMessage | None)
    assert answer.message is not None
    assert_type(answer.message.tool_calls, tuple[ToolCall, ...])
    await model.chat([answer.message, {"role": "user", "content": "And?"}], reasoning="off", session_id="s")
    params = await model.chat_apply([{"role": "user", "content": "Hi"}])
    assert_type(params, ChatParams)
    assert_type(params.prompt_ids, list[int])
    assert_type(await model.chat_parse(params, "text", partial=True), ChatMessage)
    assert_type(await model.render_chat_template([{"role": "user", "content": "Hi"}]), list[int])
    assert_type(await model.warm([{"role": "user", "content": "Hi"}]), Prefilled)
    assert_type(model.chat_statistics(), ChatStatistics)
    async with model.chat_stream([{"role": "user", "content": "Hi"}], thinking_budget_tokens=8) as events:
        async for event in events:
            match event:
                case Thinking(text=text):
                    assert_type(text, str)
                case ToolCallDelta(index=index, arguments=arguments):
                    assert_type(index, int)
                    assert_type(arguments, str)
                case _:
                    pass


async def embedding(model: Model) -> None:
    """Vectors of float32."""
    assert_type(await model.embed("text"), npt.NDArray[np.float32])
    assert_type(await model.embed_batch(["text", [1, 2]]), npt.NDArray[np.float32])
    assert_type(model.info().embeddings, EmbeddingFacts | None)
