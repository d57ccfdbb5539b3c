"""`build_binding`: what is compiled how, and how it fails."""

from __future__ import annotations

import json
import shlex
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.libllama import binding, runtime
from tools.libllama.errors import BuildError

from processes import is_gone  # isort: skip  # tests/ is on the path

FAKE_COMPILER = """#!{python}
import json, pathlib, sys
calls = pathlib.Path({calls!r})
with calls.open("a") as f:
    f.write(json.dumps(sys.argv[1:]) + "\\n")
if pathlib.Path(sys.argv[0]).name == "fail":
    sys.exit("boom: no such thing")
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_bytes(b"made")
"""


class Build:
    """Calls `build_binding` with a compiler that only takes notes."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.calls = folder / "calls"
        self.folder = folder
        self.said: list[str] = []

    def compiler(self, name: str = "cxx") -> str:
        path = self.folder / name
        path.write_text(FAKE_COMPILER.format(python=sys.executable, calls=str(self.calls)))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    def __call__(
        self, *, cxx: str | None = None, stamp: str = "pin-cpu", flags: tuple[str, ...] = ()
    ) -> Path:
        return binding.build_binding(
            libs_dir=self.folder / "libs",
            include_dirs=[self.folder / "include"],
            out_dir=self.out,
            cxx=shlex.split(cxx or self.compiler()),
            cxx_flags=flags,
            stamp=stamp,
            log=self.said.append,
        )

    def commands(self) -> list[list[str]]:
        return (
            [json.loads(line) for line in self.calls.read_text().splitlines()] if self.calls.exists() else []
        )


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """A build in an empty folder."""
    return Build(tmp_path)


def test_sources_and_link(build: Build) -> None:
    """Our sources get warnings, stamp and extra flags; the link a relative rpath and four libraries."""
    target = build(flags=("-fsanitize=address",))
    assert target.read_bytes() == b"made"
    *compiled, link = build.commands()
    names = [Path(next(a for a in c if a.endswith(".cpp"))).name for c in compiled]
    shims = sorted(path.name for path in binding.PACKAGE_DIR.glob("shim*.cpp"))
    assert len(shims) > 2
    assert names == [*shims, "wrappers.cpp", "_binding.cpp"]
    for command in compiled:
        assert "-std=c++17" in command
        assert "-fsanitize=address" in command
        is_ours = not any(a.endswith("_binding.cpp") for a in command)
        assert ("-Wall" in command) is is_ours
        assert f"-isystem{build.folder / 'include'}" in command
    stamp = runtime.stamp.full_stamp("pin-cpu", runtime.stamp.sources_hash(binding.PACKAGE_DIR))
    assert f'-DERLLAMA_BUILD_STAMP="{stamp}"' in compiled[0]
    assert any("$ORIGIN" in a or "@loader_path" in a for a in link)
    assert [a for a in link if a.startswith("-l")] == ["-lllama", "-lllama-common", "-lggml", "-lggml-base"]
    assert runtime.stamp.expected_stamp(build.out, binding.PACKAGE_DIR) == stamp


def test_failure_shows_command_and_output(build: Build) -> None:
    """A compiler that fails is quoted, and leaves nothing that counts as built."""
    with pytest.raises(BuildError, match="Compiling the binding failed") as caught:
        build(cxx=build.compiler("fail"))
    assert caught.value.log_tail == ["boom: no such thing"]
    assert "shim.cpp" in caught.value.advice
    assert runtime.stamp.read_stamp(build.out) is None


def test_a_compiler_may_be_a_command(build: Build) -> None:
    """A launcher in front (ccache) and options behind are part of every call."""
    build(cxx=f"env {build.compiler()} -m64")
    assert {command[0] for command in build.commands()} == {"-m64"}


def test_a_killed_build_leaves_no_compiler(build: Build, tmp_path: Path) -> None:
    """kill -9 of the build ends the compiler and what the compiler started."""
    hanging = tmp_path / "hang"
    hanging.write_text(f"#!/bin/sh\nsleep 60 &\necho $$ $! > {tmp_path}/pids\nwait\n")
    hanging.chmod(0o755)
    code = f"""
from pathlib import Path
from tools.libllama import binding
binding.build_binding(libs_dir=Path("x"), include_dirs=[], out_dir=Path({str(build.out)!r}),
                      cxx=[{str(hanging)!r}], stamp="x", log=str)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as us:
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text().strip():
            assert us.poll() is None
            time.sleep(0.01)
        us.kill()
    assert [is_gone(int(pid)) for pid in (tmp_path / "pids").read_text().split()] == [True, True]
