"""The command line of `build_libllama.py`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.libllama import build
from tools.libllama.errors import BuildError
from tools.libllama.profile import BACKENDS
from tools.libllama.progress import Progress

_DESCRIPTION = """\
Build the native part of erllama: llama.cpp from pinned sources, and the Python binding to it.

Everything lands in erllama/llama/_native/BACKEND. The sources are fetched through pip and verified;
finished libraries are kept in the user's cache folder (ERLLAMA_CACHE_DIR), so that another checkout,
or `pip install .`, does not compile again. Interrupt it whenever you like: run it again to go on.
"""
_EXAMPLES = """\
examples:
  python build_libllama.py                            what this machine needs, once: minutes; again: a second
  python build_libllama.py --backend cuda             with the CUDA toolkit installed
  python build_libllama.py --backend cuda --cmake-arg=-DCMAKE_CUDA_ARCHITECTURES=90
  python build_libllama.py --native                   for this CPU only: compiles faster, runs nowhere else
  python build_libllama.py --source ~/src/llama.cpp   your own llama.cpp instead of the pinned one
  python build_libllama.py --with-server-tools        llama-server and llama-bench too, for comparisons

exit codes: 0 built, 1 something has to be done (it says what), 2 wrong usage, 130 interrupted
"""


def parser() -> argparse.ArgumentParser:
    """The argument parser."""
    result = argparse.ArgumentParser(
        prog="build_libllama.py",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("--backend", choices=BACKENDS, help="what computes (default: metal on macOS, else cpu)")
    add("--source", type=Path, metavar="DIR", help="a llama.cpp tree of your own instead of the pinned one")
    add(
        "--cmake-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="one more argument for CMake, after ours; repeatable; write --cmake-arg=-DNAME=VALUE",
    )
    add("--with-server-tools", action="store_true", help="also build llama-server and llama-bench")
    add("--native", action="store_true", help="one CPU library for this machine instead of all variants")
    add(
        "--jobs",
        type=_positive,
        metavar="N",
        help="compilers at once (default: one per CPU, less if RAM is short)",
    )
    add("--clean", action="store_true", help="throw away the earlier build and the sources, then build")
    add("--fetch-only", action="store_true", help="only fetch, unpack and verify the sources")
    return result


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = parser().parse_args(arguments)
    progress = Progress()
    try:
        if options.fetch_only:
            progress.note(f"verified sources: {build.fetch_only(progress)}")
            return 0
        built = build.run(_request(options), progress)
        variant = built.variant.stem.removeprefix("lib")
        progress.note(f"ready: {built.native_dir} (CPU library here: {variant})")
    except BuildError as error:
        progress.close()
        print(error.render(), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        progress.close()
        print("Interrupted. Run the same command again to continue.", file=sys.stderr)
        return 130
    return 0


def _request(options: argparse.Namespace) -> build.Request:
    return build.Request(
        backend=options.backend,
        source=options.source,
        cmake_args=tuple(options.cmake_arg),
        server_tools=options.with_server_tools,
        native=options.native,
        jobs=options.jobs,
        clean=options.clean,
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value
