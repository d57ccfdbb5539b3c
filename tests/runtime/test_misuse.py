"""What newcomers get wrong about loops and blocks: each mistake says what to write instead."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest
import trio

import erllama
from erllama import RequestError, open_engine
from erllama.testing import FakeBackend

from .scenes import loaded, wait_idle

if TYPE_CHECKING:
    from erllama.backend import BackendFacts


@pytest.mark.parametrize("call", ["complete", "unload", "wait_closed", "reset_session"])
async def test_another_loop_is_refused_and_the_model_lives_on(call: str):
    """From `trio.run` in a thread: reason "wrong_loop" before anything is touched."""
    async with loaded() as model:
        arguments = {"complete": ("hi",), "reset_session": ("s",)}.get(call, ())
        with pytest.raises(RequestError, match=r"trio\.from_thread") as caught:
            await trio.to_thread.run_sync(lambda: trio.run(getattr(model, call), *arguments))
        assert caught.value.reason == "wrong_loop"
        assert (await model.complete("p", max_tokens=3)).generated
        await wait_idle(model)


async def test_a_stream_and_an_engine_stay_in_their_loop():
    """Neither events nor new models can be had from another loop."""
    async with loaded() as model, model.stream("p", max_tokens=5) as events, open_engine() as engine:
        for call in (events.__anext__, engine.load_model):
            with pytest.raises(RequestError) as caught:
                await trio.to_thread.run_sync(lambda call=call: trio.run(call))
            assert caught.value.reason == "wrong_loop"
        with pytest.raises(RequestError, match=r"trio\.from_thread"):
            await trio.to_thread.run_sync(events.cancel)
        assert (await erllama.collect(events)).finish_reason == "length"


def test_asyncio_is_told_to_be_trio():
    """`asyncio.run(main())` fails at once with what to write."""

    async def main() -> None:
        async with open_engine():
            pass

    with pytest.raises(RequestError, match=r"trio\.run\(main\)") as caught:
        asyncio.run(main())
    assert caught.value.reason == "wrong_loop"


async def test_blocks_that_were_not_entered_say_so():
    """Forgetting `async with` names the line to write."""
    with pytest.raises(AttributeError, match=r"async with open_engine\(\) as engine:"):
        await open_engine().load_model("x")
    with pytest.raises(RequestError, match=r"async with open_engine\(\) as engine:"):
        await open_engine()
    with pytest.raises(RequestError, match=r"async with open_engine\(\) as engine:"), open_engine():
        raise AssertionError("entered")
    async with loaded() as model:
        with pytest.raises(RequestError, match=r"async with model\.stream\(…\) as events:"):
            async for _ in model.stream("p"):
                pass
        with pytest.raises(AttributeError, match=r"model\.stream"):
            model.stream("p").cancel()


async def test_two_readers_of_one_stream_both_end():
    """Each event reaches one of them, and both loops end."""
    seen: list[erllama.Event] = []

    async def read(events) -> None:
        seen.extend([event async for event in events])

    async with loaded() as model, model.stream("p", max_tokens=8) as events:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, events)
            nursery.start_soon(read, events)
        assert sum(isinstance(event, erllama.Done) for event in seen) == 1
        assert sum(isinstance(event, erllama.TokenId) for event in seen) == 8


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"n_ctx": 512}, r"context=ContextOptions\(n_ctx=…\)"),
        ({"n_gpu_layers": 1}, r"model=ModelOptions\(n_gpu_layers=…\)"),
        ({"model_name": "x"}, "did you mean 'model_id'"),
        ({"verbose": True}, "known options: backend, chat_template, context, deterministic, exact, model"),
    ],
)
async def test_what_load_model_does_not_take_has_its_place(arguments, hint):
    """An option given to `load_model` itself is an UnknownOption that says where it goes."""
    async with open_engine() as engine:
        with pytest.raises(erllama.UnknownOption, match=hint):
            await engine.load_model("x.gguf", **arguments)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("timeout", "fail_after"), ("stream", "async with model.stream"), ("n_predict", "max_tokens")],
)
async def test_what_other_libraries_call_it(name: str, hint: str):
    """Names from elsewhere are answered with erllama's."""
    async with loaded() as model:
        with pytest.raises(erllama.UnknownOption, match=hint):
            await model.complete("p", **{name: 1})


def test_options_go_by_name():
    """A positional option says how to write it."""
    with pytest.raises(erllama.InvalidOption, match=r"ContextOptions\(n_ctx=…\)"):
        erllama.ContextOptions(512)


@pytest.mark.parametrize(
    ("path", "hint"),
    [("", "is empty"), ("absent.gguf", "relative ones start in"), (".", "is a folder"), (3, "is no path")],
)
async def test_what_is_no_file_is_told_apart(path: str, hint: str):
    """Empty, missing and a folder are three mistakes."""
    async with open_engine() as engine:
        with pytest.raises(erllama.InvalidConfig, match=hint):
            await engine.load_model(path)


async def test_after_the_engine_the_model_says_so():
    """A model used after its engine's block blames the block, not an unload."""
    async with loaded() as model:
        pass
    with pytest.raises(erllama.NotLoaded, match="ended with its engine"):
        await model.complete("p")


async def test_progress_never_repeats_itself():
    """A fraction that has not changed since the last look is not reported again."""
    looks = iter((0.125, 0.25, 0.25, 0.25, 1.0, 1.0))
    enough = threading.Event()

    class Slow(FakeBackend):
        def load_fraction(self) -> float:
            fraction = next(looks, None)
            if fraction is None:
                enough.set()
            return fraction or 1.0

        def open(self) -> BackendFacts:
            assert enough.wait(10)
            return super().open()

    seen: list[float] = []
    async with open_engine() as engine:
        await engine.load_model(backend=Slow(threaded=True), progress=seen.append)
    assert seen == [0.125, 0.25, 1.0]


async def test_progress_has_to_be_callable():
    """`progress=True` is refused before anything is loaded."""
    async with open_engine() as engine:
        with pytest.raises(erllama.InvalidOption, match="progress=True: expected a function"):
            await engine.load_model("x.gguf", progress=True)
