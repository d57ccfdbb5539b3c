"""hatchling build hook: `pip install .` (and `-e .`, and from an sdist) builds the native part.

The wheel then carries `erllama/llama/_native/**` and a tag for this Python and platform. Options reach an
isolated build through the environment: `ERLLAMA_BACKEND`, `ERLLAMA_CMAKE_ARGS` (split like a shell does).
With `ERLLAMA_SKIP_NATIVE_BUILD=1` an editable install leaves the native part to whoever built it (make).
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# The hook is loaded by path; the rest of the build is imported from the project it lies in.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs the native build before the files of a wheel are collected."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """CMake and ninja from the package index, where the system has none that will do."""
        from tools.libllama.toolchain import missing_requirements

        return missing_requirements()

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, and have the result shipped; an editable install finds it in the checkout."""
        from tools.libllama import build
        from tools.libllama.errors import BuildError
        from tools.libllama.progress import Progress

        if version == "editable" and os.environ.get("ERLLAMA_SKIP_NATIVE_BUILD") == "1":
            return
        try:
            built = build.run(request_from_environment(), Progress())
        except BuildError as error:
            raise SystemExit(error.render()) from error
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if version != "editable":
            place = built.native_dir.relative_to(self.root).as_posix()
            build_data["force_include"][str(built.native_dir)] = place


def request_from_environment() -> Any:
    """The build's options, as far as an isolated build can be given any."""
    from tools.libllama.build import Request

    return Request(
        backend=os.environ.get("ERLLAMA_BACKEND") or None,
        cmake_args=tuple(shlex.split(os.environ.get("ERLLAMA_CMAKE_ARGS", ""))),
    )
