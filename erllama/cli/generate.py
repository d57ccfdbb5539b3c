"""`erllama generate`: continue one prompt, printing whole characters as they come."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

import erllama
from erllama.errors import ContextOverflow, InvalidContent, InvalidGrammar
from erllama.options import GenerationOptions

from .checking import check_kept, checked, context_of, generation_of, misuse
from .loaded import loaded
from .progress import show_warnings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from erllama.options import ContextOptions
    from erllama.types import Completion


def run(arguments: argparse.Namespace) -> None:
    """Check everything that can be checked before the model is fetched or loaded, then generate."""
    context = context_of(arguments)
    generation = _generation(arguments)
    check_kept(arguments)
    prompt = arguments.prompt if arguments.prompt is not None else _read_stdin(arguments)
    with show_warnings():
        trio.run(_generate, arguments, context, generation, prompt)


async def _generate(
    arguments: argparse.Namespace, context: ContextOptions, generation: dict[str, Any], prompt: str
) -> None:
    async with loaded(arguments, context) as found:
        with _in_words_of_the_command(arguments):
            completion = await _print_stream(found.model, prompt, generation)
    if arguments.stats:
        print(stats_line(completion), file=sys.stderr)
    elif found.is_kept and sys.stderr.isatty():
        print(f"{reused(completion)} came from the cache", file=sys.stderr)


async def _print_stream(model: Any, prompt: str, generation: dict[str, Any]) -> Completion:
    text = ""
    async with model.stream(prompt, **generation) as events:
        async for event in events:
            match event:
                case erllama.Token(text=text):
                    print(text, end="", flush=True)
                case erllama.Done(completion=completion):
                    if not text.endswith("\n"):
                        print(flush=True)
                    return completion
    raise AssertionError("a stream ends with Done or an error")


@contextmanager
def _in_words_of_the_command(arguments: argparse.Namespace) -> Iterator[None]:
    """Name the file and the argument that a failure is about."""
    try:
        yield
    except InvalidGrammar as why:
        raise InvalidGrammar(f"{arguments.grammar}: {why}", detail=why.detail) from None
    except ContextOverflow as why:
        hint = str(why).replace("load the model with a larger n_ctx", "give a larger --n-ctx")
        raise ContextOverflow(hint, detail=why.detail) from None


def _generation(arguments: argparse.Namespace) -> dict[str, Any]:
    """The generation options that were given, checked."""
    given = generation_of(arguments)
    if arguments.grammar is not None:
        given["grammar"] = _read_grammar(arguments.grammar)
    if arguments.no_cache:
        given["cache"] = "off"
    checked(GenerationOptions, arguments, given)
    return given


def _read_grammar(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as why:
        reason = why.strerror if isinstance(why, OSError) else "it is not UTF-8 text"
        raise InvalidContent(f"cannot read the grammar {path!r}: {reason}; give a GBNF file") from None


def _read_stdin(arguments: argparse.Namespace) -> str:
    if sys.stdin.isatty():
        misuse(arguments, "no prompt; give -p TEXT or pipe one in")
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as why:
        raise InvalidContent(
            f"standard input is not UTF-8 text (byte {data[why.start]:#04x} at {why.start}); convert it first"
        ) from None


def stats_line(completion: Completion) -> str:
    """Tokens and speed of an answer, in one line."""
    stats = completion.stats
    # A time of none, as of a prompt that was all there, has no speed.
    prefill = f" at {stats.n_computed / stats.prefill_s:.0f} tokens/s" if stats.prefill_s else ""
    n_decoded = max(stats.n_generated - 1, 0)  # the first token comes out of the prefill
    decode = f" ({n_decoded / stats.decode_s:.1f} tokens/s)" if stats.decode_s else ""
    read = f"{stats.n_cached} from the cache, {stats.n_computed} computed{prefill}"
    return (
        f"prompt {stats.n_prompt} tokens ({read}), "
        f"answer {stats.n_generated} tokens{decode}, "
        f"first token after {stats.first_token_s:.2f} s, ended by {completion.finish_reason}, "
        f"seed {completion.seed}"
    )


def reused(completion: Completion) -> str:
    """How much of the prompt was not computed."""
    return f"{completion.stats.n_cached} of {completion.stats.n_prompt} prompt tokens"
