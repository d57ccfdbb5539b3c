"""What the build's tests share: a tiny pinned archive, a silent progress, an empty cache folder."""

from __future__ import annotations

import io
import os
import tarfile

import pytest

from tools.libllama import tree
from tools.libllama.pin import Pin
from tools.libllama.progress import Progress

FILES = {
    "CMakeLists.txt": b"project(tiny)\n",
    "include/llama.h": b"int llama_x(void);\n",
    "ggml/include/ggml.h": b"\n",
    "common/chat.h": b"\n",
    "src/llama.cpp": b"int llama_x(void) { return 1; }\n",
}


USER_CACHE = os.environ.get("ERLLAMA_CACHE_DIR")


class Said(io.StringIO):
    """A stream that is no terminal, for a Progress whose words a test reads."""


@pytest.fixture
def files():
    """What the tiny archive's tree holds."""
    return FILES


@pytest.fixture
def said():
    """What the build printed."""
    return Said()


@pytest.fixture
def progress(said):
    """A progress that prints into `said`, every time."""
    return Progress(said, every_s=0.0)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder, so that no test sees or changes the user's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ERLLAMA_CACHE_DIR", str(folder))
    monkeypatch.delenv("ERLLAMA_CPU_VARIANT", raising=False)
    return folder


@pytest.fixture
def user_cache(cache, monkeypatch):
    """The user's own cache folder after all, for a test that needs what `make build` left there."""
    if USER_CACHE is None:
        monkeypatch.delenv("ERLLAMA_CACHE_DIR")
    else:
        monkeypatch.setenv("ERLLAMA_CACHE_DIR", USER_CACHE)


@pytest.fixture
def archive(cache):
    """The tiny archive, where the cache keeps downloads; it also holds what must not be unpacked."""
    folder = cache / "downloads"
    folder.mkdir(parents=True)
    path = folder / "tiny-1.0.tar.gz"
    extra = {"README.md": b"upstream's\n", ".git": b"gitdir: ../..\n"}
    with tarfile.open(path, "w:gz") as bundle:
        for name, data in {**FILES, **extra}.items():
            member = tarfile.TarInfo(f"tiny-1.0/vendor/llama.cpp/{name}")
            member.size = len(data)
            bundle.addfile(member, io.BytesIO(data))
        other = tarfile.TarInfo("tiny-1.0/setup.py")
        bundle.addfile(other, io.BytesIO(b""))
    return path


@pytest.fixture
def pin(archive, tmp_path):
    """The pin of the tiny archive."""
    model = tmp_path / "model"
    for name, data in FILES.items():
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_bytes(data)
    return Pin(
        package="tiny",
        version="1.0",
        archive=archive.name,
        sha256=tree.file_digest(archive),
        subtree="vendor/llama.cpp",
        tree=tree.tree_digest(tree.scan(model)),
        commit="0123456789abcdef",
    )


@pytest.fixture
def vendor(tmp_path):
    """A vendor folder as a checkout has it: our two files."""
    folder = tmp_path / "vendor"
    folder.mkdir()
    (folder / "pin.toml").write_text("ours\n")
    (folder / "README.md").write_text("ours\n")
    return folder
