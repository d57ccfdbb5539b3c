"""What an earlier compile left behind never becomes a library of other sources or flags.

With the real CMake, ninja and compiler, on a library of one file.
"""

from __future__ import annotations

import ctypes
import os
import shutil

import pytest

from tools.libllama import compile as compiling
from tools.libllama import native, reuse, toolchain, tree
from tools.libllama.profile import Platform, Profile
from tools.libllama.source import Source

CODE = """
#ifdef EXTRA
int extra(void) { return 1; }
#endif
int version(void) { return %d; }
"""
PROFILE = Profile(
    backend="cpu", options={"GGML_NATIVE": "OFF", "CMAKE_BUILD_TYPE": "Release"}, targets=("llama",)
)


class Tiny:
    """A library that tells its version; `build()` compiles it as the real one is compiled."""

    def __init__(self, folder, progress):
        self.root, self.folder, self.progress = folder / "src", folder / "build", progress
        self.root.mkdir()
        self.n_built = 0
        (self.root / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.20)\nproject(t C CXX)\n"
            "add_library(llama SHARED a.c b.c)\nadd_library(other STATIC c.cpp)\n"
        )
        (self.root / "b.c").write_text("int b;\n")
        (self.root / "c.cpp").write_text("int c;\n")
        self.write(1)

    def write(self, version, *, when_s=None):
        path = self.root / "a.c"
        path.write_text(CODE % version)
        if when_s is not None:
            os.utime(path, (when_s, when_s))

    def build(self):
        files = tree.scan(self.root)
        source = Source(root=self.root, digest=tree.tree_digest(files), pinned=False, files=files)
        compilers = toolchain.find_compilers()
        tools = toolchain.find_toolchain(compilers)
        recipe = native.recipe_key(PROFILE, compilers.id, Platform.here())
        self.folder.mkdir(exist_ok=True)
        reuse.make_reusable(self.folder, source, recipe)
        log = self.folder / "log"
        log.write_text("")
        compiling.configure(self.root, self.folder, PROFILE, tools, log, self.progress, None)
        compiling.compile_targets(self.folder, PROFILE, tools, 1, log, self.progress, None)
        self.compiled = [name for name in ("a.c", "b.c") if f"{name}.o" in log.read_text()]
        self.n_built += 1
        copy = self.folder.parent / f"{self.n_built}.so"  # a library is loaded once per path
        shutil.copy(next(path for path in self.folder.glob("libllama.*")), copy)
        return ctypes.CDLL(str(copy))


@pytest.fixture
def tiny(tmp_path, progress):
    """A library, built once."""
    tiny = Tiny(tmp_path, progress)
    assert tiny.build().version() == 1
    return tiny


@pytest.mark.slow
def test_flags_from_the_environment_are_honoured(tiny, monkeypatch):
    """CFLAGS that came after the first build reach every object."""
    monkeypatch.setenv("CFLAGS", "-DEXTRA=1")
    assert tiny.build().extra() == 1
    monkeypatch.delenv("CFLAGS")
    assert not hasattr(tiny.build(), "extra")


@pytest.mark.slow
def test_sources_with_old_times_are_compiled(tiny):
    """Sources that tar or rsync put there with a time before the last build are not overlooked."""
    tiny.write(2, when_s=10**9)
    assert tiny.build().version() == 2


@pytest.mark.slow
def test_an_edit_compiles_only_what_it_touched(tiny):
    """Working on a tree of one's own stays quick: what did not change is not compiled again."""
    later_s = (tiny.folder / ".ninja_log").stat().st_mtime + 2
    tiny.write(2, when_s=later_s)
    assert tiny.build().version() == 2
    assert tiny.compiled == ["a.c"]


@pytest.mark.slow
def test_a_file_that_came_or_went_starts_over(tiny):
    """A new file may shadow an old one, so nothing is kept."""
    (tiny.root / "new.h").write_text("\n")
    tiny.build()
    assert tiny.compiled == ["a.c", "b.c"]


@pytest.mark.slow
def test_an_unchanged_tree_compiles_nothing(tiny):
    """The same again is no work."""
    assert tiny.build().version() == 1
    assert tiny.compiled == []


@pytest.mark.slow
def test_a_compiler_behind_a_launcher_compiles(tiny, monkeypatch):
    """CXX="env c++" (as with ccache) is a command that CMake understands."""
    monkeypatch.setenv("CC", "env cc")
    monkeypatch.setenv("CXX", "env c++")
    assert tiny.build().version() == 1
    assert "/env " in (tiny.folder / "CMakeFiles" / "rules.ninja").read_text()


@pytest.mark.parametrize("damage", ["", "{", "[]", "7"])
def test_a_damaged_mark_keeps_nothing(tmp_path, damage):
    """A half-written or foreign mark says nothing about the objects, so they go."""
    folder = tmp_path / "build"
    (folder / "CMakeFiles").mkdir(parents=True)
    (folder / "erllama-objects.json").write_text(damage)
    source = Source(root=tmp_path, digest="d", pinned=True)
    reuse.make_reusable(folder, source, "r")
    assert [path.name for path in folder.iterdir()] == ["erllama-objects.json"]
    (folder / "a.o").touch()
    reuse.make_reusable(folder, source, "r")
    assert (folder / "a.o").exists()
