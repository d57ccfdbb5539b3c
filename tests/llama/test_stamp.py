"""The stamp: what changes it, and that a binding with another one is refused."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from erllama.errors import NativeLibraryError
from erllama.llama import ffi, stamp

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package folder with native sources."""
    folder = tmp_path / "package"
    (folder / "cdef").mkdir(parents=True)
    (folder / "cdef" / "types.h").write_text("typedef int t;")
    (folder / "shim.cpp").write_text("int x;")
    return folder


def test_hash_follows_content_and_names(package: Path) -> None:
    """Any changed byte or renamed file of the native sources gives another hash."""
    first = stamp.sources_hash(package)
    (package / "shim.cpp").write_text("int y;")
    second = stamp.sources_hash(package)
    (package / "shim.cpp").rename(package / "shim2.cpp")
    assert len({first, second, stamp.sources_hash(package)}) == 3


def test_without_sources_the_recorded_hash_counts(package: Path, tmp_path: Path) -> None:
    """An installed package without C++ sources trusts what the build recorded."""
    stamp.write_stamp(tmp_path, "base", "0123")
    shutil.rmtree(package / "cdef")
    (package / "shim.cpp").unlink()
    assert stamp.expected_stamp(tmp_path, package) == "base+0123"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"base": 1}'])
def test_unreadable_record_means_not_built(tmp_path: Path, package: Path, content: str) -> None:
    """A damaged or half-written stamp file counts as no build."""
    (tmp_path / stamp.STAMP_FILE).write_text(content)
    assert stamp.expected_stamp(tmp_path, package) is None


def test_missing_binding_says_what_to_run(tmp_path: Path) -> None:
    """Without a build the error names the command that makes one."""
    with pytest.raises(NativeLibraryError, match=r"not built.*python build_libllama\.py"):
        ffi.load(tmp_path / "cpu")


@pytest.mark.model
def test_stale_binding_is_refused(package: Path) -> None:
    """A binding compiled from other sources than the ones here is not used."""
    native_dir = ffi.library().native_dir
    with pytest.raises(NativeLibraryError, match=r"built from other sources.*run: python build_libllama\.py"):
        ffi.load(native_dir, package)


@pytest.mark.model
def test_broken_binding_is_a_typed_error(tmp_path: Path) -> None:
    """A file that is no extension module is refused with the command to run."""
    real = ffi._binding_path(ffi.library().native_dir)
    assert real is not None
    (tmp_path / real.name).write_bytes(b"not a library")
    stamp.write_stamp(tmp_path, "base", "0123")
    with pytest.raises(NativeLibraryError, match="cannot be loaded"):
        ffi.load(tmp_path)


def test_backend_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ERLLAMA_BACKEND wins; else a built GPU backend, else cpu, present or not."""
    monkeypatch.delenv("ERLLAMA_BACKEND", raising=False)
    assert ffi.choose_native_dir(tmp_path / "nothing").name == "cpu"
    for name in ("cpu", "vulkan", "half-built"):
        (tmp_path / name).mkdir()
    stamp.write_stamp(tmp_path / "cpu", "b", "s")
    assert ffi.choose_native_dir(tmp_path).name == "cpu"
    stamp.write_stamp(tmp_path / "vulkan", "b", "s")
    assert ffi.choose_native_dir(tmp_path).name == "vulkan"
    monkeypatch.setenv("ERLLAMA_BACKEND", "cuda")
    assert ffi.choose_native_dir(tmp_path).name == "cuda"


def test_what_to_run_depends_on_backend_and_installation(tmp_path: Path) -> None:
    """Among the sources the build with its backend, in an installation a new one."""
    assert ffi.build_advice("cuda").endswith("build_libllama.py --backend cuda")
    assert ffi.build_advice("cpu").endswith("build_libllama.py")
    assert ffi.build_advice("cuda", tmp_path).startswith("install it again: ERLLAMA_BACKEND=cuda pip install")
