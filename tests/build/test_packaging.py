"""What the source distribution and the wheel are made of, and the commands around the build."""

from __future__ import annotations

import os
import subprocess
import tarfile

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from tools import requirements
from tools.libllama import binding, hatch_hook, runtime, toolchain
from tools.libllama.errors import BuildError
from tools.libllama.pin import ROOT


@pytest.fixture(scope="module")
def sdist_names(tmp_path_factory):
    """The files of a source distribution made from this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    path = next(SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"]))
    with tarfile.open(path) as bundle:
        return {name.partition("/")[2] for name in bundle.getnames()}


def test_the_sdist_has_every_native_source_of_ours(sdist_names):
    """B3: declarations, shim, build modules and pin are all in the source distribution."""
    ours = [
        *runtime.stamp.source_files(binding.PACKAGE_DIR),
        *(ROOT / "tools" / "libllama").glob("*.py"),
        ROOT / "build_libllama.py",
        ROOT / "vendor" / "llama.cpp" / "pin.toml",
        ROOT / "vendor" / "llama.cpp" / "README.md",
        ROOT / "Makefile",
    ]
    assert len(ours) > 20
    assert {path.relative_to(ROOT).as_posix() for path in ours} <= sdist_names


def test_the_sdist_has_nothing_that_is_not_ours(sdist_names):
    """Upstream's sources, built libraries and caches stay out."""
    foreign = [
        name
        for name in sdist_names
        if name.startswith("vendor/") and name.count("/") > 1 and not name.endswith(("pin.toml", "README.md"))
    ]
    assert foreign == []
    assert [name for name in sdist_names if "/_native/" in name or "__pycache__" in name] == []
    assert [name for name in sdist_names if name.endswith((".so", ".gguf", ".o"))] == []


def hook(tmp_path):
    data = {"force_include": {}}
    builder = WheelBuilder(str(ROOT))
    return hatch_hook.NativeBuildHook(
        str(ROOT), {}, builder.config, builder.metadata, str(tmp_path), "wheel"
    ), data


def test_a_wheel_carries_the_native_folder_and_a_platform_tag(tmp_path, monkeypatch):
    """The hook builds, and the wheel is for this Python and platform only."""
    from tools.libllama import build

    native_dir = ROOT / "erllama" / "llama" / "_native" / "cpu"
    asked = []

    def run(request, _progress):
        asked.append(request)
        return build.Built(native_dir=native_dir, variant=native_dir / "x.so")

    monkeypatch.setattr(build, "run", run)
    monkeypatch.setenv("ERLLAMA_BACKEND", "cuda")
    monkeypatch.setenv("ERLLAMA_CMAKE_ARGS", "-DA=1 '-DB=x y'")
    plugin, data = hook(tmp_path)
    plugin.initialize("standard", data)
    assert asked == [build.Request(backend="cuda", cmake_args=("-DA=1", "-DB=x y"))]
    assert data["force_include"] == {str(native_dir): "erllama/llama/_native/cpu"}
    assert (data["pure_python"], data["infer_tag"]) == (False, True)


def test_an_editable_install_builds_too_unless_make_did(tmp_path, monkeypatch):
    """`pip install -e .` builds into the checkout; make, which has built already, skips that."""
    from tools.libllama import build

    asked = []

    def run(request, _progress):
        asked.append(request)
        return build.Built(native_dir=ROOT / "x", variant=ROOT / "x")

    monkeypatch.setattr(build, "run", run)
    plugin, data = hook(tmp_path)
    plugin.initialize("editable", data)
    assert len(asked) == 1
    assert data["force_include"] == {}
    monkeypatch.setenv("ERLLAMA_SKIP_NATIVE_BUILD", "1")
    plugin.initialize("editable", data)
    assert len(asked) == 1


def test_a_failed_build_fails_the_install_with_the_sentence(tmp_path, monkeypatch):
    """pip shows the same words that the command line shows."""
    from tools.libllama import build

    def run(*_):
        raise BuildError("No C++ compiler found.", advice="Install one.")

    monkeypatch.setattr(build, "run", run)
    plugin, data = hook(tmp_path)
    with pytest.raises(SystemExit, match=r"No C\+\+ compiler found"):
        plugin.initialize("standard", data)


def test_build_tools_come_from_the_index_only_where_the_system_has_none(tmp_path, monkeypatch):
    """CMake and ninja are build requirements exactly where they are missing, for pip and for make."""
    plugin, _ = hook(tmp_path)
    monkeypatch.setattr(toolchain, "_candidates", lambda _: [])
    assert plugin.dependencies() == ["cmake>=3.20", "ninja"]
    assert {"cmake>=3.20", "ninja", "cffi>=1.17"} <= set(requirements.requirements())
    monkeypatch.setattr(toolchain, "find_cmake", lambda: "cmake")
    monkeypatch.setattr(toolchain, "find_ninja", lambda: "ninja")
    assert plugin.dependencies() == []


def make(*arguments, cwd=ROOT, **environment):
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_make_alone_lists_what_there_is():
    """`make` without a target is the help."""
    out = make().stdout
    for target in ("demo", "test", "build", "check", "clean", "help"):
        assert f"\n  {target} " in out


def test_who_wants_a_demo_gets_no_test_tools(tmp_path):
    """`make demo` installs what runs, `make test`, `check` and `asan` what is missing for them besides."""
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "requirements.py").touch()
    for target in ("demo", "build", "sources", "test", "check", "asan"):
        said = make("--dry-run", target, cwd=tmp_path).stdout
        assert "tools/requirements.py  >" in said, target
        assert ("tools/requirements.py --dev" in said) == (target in ("test", "check", "asan")), target
    assert not set(requirements.dev_requirements()) <= set(requirements.requirements())


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("#!/bin/sh\n[ $1 = -c ] && exit 1\n", "older than 3.11"),
        ("#!/bin/sh\n[ $1 = -c ] && exit 0\necho no ensurepip; exit 1\n", "apt install python3-venv"),
    ],
)
def test_a_python_that_will_not_do_is_one_sentence(tmp_path, script, words):
    """Too old, or without venv: make says which, and what to install, and leaves no half .venv."""
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "requirements.py").touch()
    python = tmp_path / "python"
    python.write_text(script)
    python.chmod(0o755)
    done = make("build", f"PYTHON={python}", cwd=tmp_path)
    assert done.returncode != 0
    assert words in done.stdout
    assert not (tmp_path / ".venv").exists()


def test_a_half_made_environment_is_completed(tmp_path):
    """Killed while venv was at work (an interpreter, no pip): the next make finishes it, and says so."""
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    half = tmp_path / ".venv" / "bin"
    half.mkdir(parents=True)
    (half / "python").write_text("#!/bin/sh\nexit 1\n")
    (half / "python").chmod(0o755)
    (tmp_path / ".venv" / "mine").touch()
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n[ $1 = -c ] && exit 0\nprintf '#!/bin/sh\\nexit 0\\n' > .venv/bin/python\n")
    python.chmod(0o755)
    done = make(".venv/.erllama-pip", f"PYTHON={python}", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "==> Creating .venv\n")
    assert (tmp_path / ".venv" / "mine").exists()
    (tmp_path / ".venv" / ".erllama-pip").unlink()
    (half / "python").write_text("#!/bin/sh\nexit 1\n")
    python.write_text("#!/bin/sh\n[ $1 = -c ] && exit 0\nexit 1\n")
    done = make(".venv/.erllama-pip", f"PYTHON={python}", cwd=tmp_path)
    assert done.returncode != 0
    assert "cannot make a virtual environment with pip" in done.stdout
    assert (tmp_path / ".venv" / "mine").exists()  # what was there before us is not ours to delete


def test_a_missing_python_is_one_sentence(tmp_path):
    """No python3 at all."""
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "requirements.py").touch()
    done = make("build", "PYTHON=no-such-python", cwd=tmp_path)
    assert done.returncode != 0
    assert "apt install python3" in done.stdout


def test_ci_runs_the_readme_s_test_command():
    """.ci/run is executable and does what the README tells a newcomer to do."""
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    assert "make test" in path.read_text()
    assert "make test" in (ROOT / "README.md").read_text()
