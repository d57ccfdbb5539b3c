"""`build_binding`: what is compiled how, when it is skipped, and how it fails."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tools" / "libllama"))

import binding  # noqa: E402  # the developer scripts are no package

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
            cxx=cxx or self.compiler(),
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
    stamp = binding.stamp_module.full_stamp("pin-cpu", binding.stamp_module.sources_hash(binding.PACKAGE_DIR))
    assert f'-DERLLAMA_BUILD_STAMP="{stamp}"' in compiled[0]
    assert any("$ORIGIN" in a or "@loader_path" in a for a in link)
    assert [a for a in link if a.startswith("-l")] == ["-lllama", "-lllama-common", "-lggml", "-lggml-base"]
    assert binding.stamp_module.expected_stamp(build.out, binding.PACKAGE_DIR) == stamp


def test_unchanged_inputs_compile_nothing(build: Build) -> None:
    """A second run with the same inputs says so and calls no compiler."""
    build()
    n = len(build.commands())
    build()
    assert len(build.commands()) == n
    assert build.said[-1] == "binding: up to date"


@pytest.mark.parametrize("change", [{"stamp": "other"}, {"flags": ("-g",)}])
def test_changed_inputs_compile_again(build: Build, change: dict[str, object]) -> None:
    """Another stamp or other flags build everything anew."""
    build()
    n = len(build.commands())
    build(**change)
    assert len(build.commands()) == 2 * n


def test_failure_shows_command_and_output(build: Build) -> None:
    """A compiler that fails is quoted, and leaves nothing that counts as built."""
    build()
    with pytest.raises(binding.BindingFailed, match="boom: no such thing") as caught:
        build(cxx=build.compiler("fail"), stamp="next")
    assert "shim.cpp" in str(caught.value)
    assert binding.stamp_module.read_stamp(build.out) is None
    assert build().read_bytes() == b"made"
