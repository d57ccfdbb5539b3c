"""What the commands that generate check before a model is fetched or loaded."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from erllama.errors import InvalidOption
from erllama.options import ContextOptions, GenerationOptions

if TYPE_CHECKING:
    import argparse

T = TypeVar("T", ContextOptions, GenerationOptions)


def context_of(arguments: argparse.Namespace) -> ContextOptions:
    """The context that was asked for."""
    return checked(ContextOptions, arguments, {"n_ctx": arguments.n_ctx, "n_threads": arguments.threads})


def generation_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The generation options that were given; their values are not checked yet."""
    names = {field.name for field in fields(GenerationOptions)}
    return {name: value for name, value in vars(arguments).items() if name in names and value is not None}


def check_kept(arguments: argparse.Namespace) -> None:
    """Refuse cache and model arguments that cannot go together."""
    if arguments.no_cache and (arguments.kv_dir is not None or arguments.kv_max is not None):
        misuse(arguments, "argument --no-cache: not together with --kv-dir or --kv-max")
    if arguments.kv_dir == "":
        misuse(arguments, "argument --kv-dir: expected a folder")
    if arguments.model == "":
        misuse(arguments, "argument -m/--model: expected the path of a GGUF file")


def checked(kind: type[T], arguments: argparse.Namespace, given: dict[str, Any]) -> T:
    """Options of that kind; a wrong value ends the command like any other misuse, naming the argument."""
    try:
        return kind(**{name: value for name, value in given.items() if value is not None})
    except InvalidOption as why:
        key = str(why.detail["key"]) if isinstance(why.detail, dict) else "?"
        argument = "--threads" if key == "n_threads" else "--" + key.replace("_", "-")
        misuse(arguments, f"argument {argument}: {str(why).partition(': ')[2].replace('None or ', '')}")


def misuse(arguments: argparse.Namespace, mistake: str) -> NoReturn:
    parser: argparse.ArgumentParser = arguments.parser
    parser.error(mistake)
