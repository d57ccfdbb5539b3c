"""Running CMake and ninja: progress, logs, advice, and what is done twice. All programs are fakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tools.libllama import compile as compiling
from tools.libllama import toolchain
from tools.libllama.errors import BuildError
from tools.libllama.profile import Platform, plan_profile

FAKE_CMAKE = """\
#!/bin/sh
if [ "$1" = --version ]; then echo "cmake version 3.25.1"; exit 0; fi
echo configured >> "{folder}/calls"
while [ $# -gt 0 ]; do [ "$1" = -B ] && build="$2"; shift; done
touch "$build/CMakeCache.txt" "$build/build.ninja"
"""
FAKE_NINJA = """\
#!/bin/sh
if [ "$1" = --version ]; then echo 1.11.1; exit 0; fi
echo "ninja $*" >> "{folder}/calls"
echo "[1/2] Building CXX object src/CMakeFiles/llama.dir/llama.cpp.o"
echo "[2/2] Linking CXX shared library bin/libllama.so"
"""


def program(folder, name, text):
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def tools(tmp_path):
    """A toolchain of shell scripts that write down how they were called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    compilers = toolchain.Compilers(cc=("/bin/cc",), cxx=("/bin/c++",), id="fake 1")
    return toolchain.Toolchain(
        compilers=compilers,
        cmake=program(folder, "cmake", FAKE_CMAKE.format(folder=folder)),
        ninja=program(folder, "ninja", FAKE_NINJA.format(folder=folder)),
    )


@pytest.fixture
def calls(tools, tmp_path):
    """The calls of the fake programs so far."""
    path = tmp_path / "bin" / "calls"
    path.touch()
    return lambda: path.read_text().splitlines()


@pytest.fixture
def folder(tmp_path):
    """An empty build folder."""
    path = tmp_path / "build"
    path.mkdir()
    return path


@pytest.fixture
def profile():
    """A CPU profile."""
    return plan_profile("cpu", Platform(system="linux", machine="x86_64"), commit="0" * 40)


def configure(tmp_path, folder, profile, tools, progress):
    compiling.configure(tmp_path / "src", folder, profile, tools, folder / "log", progress, None)


def test_configures_once_for_the_same_inputs(tmp_path, folder, profile, tools, progress, calls):
    """A second run with the same options goes straight to ninja."""
    configure(tmp_path, folder, profile, tools, progress)
    configure(tmp_path, folder, profile, tools, progress)
    assert calls() == ["configured"]


def test_configures_again_when_something_changed(tmp_path, folder, profile, tools, progress, calls):
    """Other options or another place of the sources begin a new configuration."""
    configure(tmp_path, folder, profile, tools, progress)
    other = plan_profile("cpu", Platform(system="linux", machine="x86_64"), commit="1" * 40)
    configure(tmp_path, folder, other, tools, progress)
    compiling.configure(tmp_path / "moved", folder, other, tools, folder / "log", progress, None)
    assert len(calls()) == 3


def test_libraries_of_other_options_do_not_stay(tmp_path, folder, profile, tools, progress):
    """What an earlier configuration linked is not taken for the new one's."""
    configure(tmp_path, folder, profile, tools, progress)
    (folder / "bin").mkdir()
    (folder / "bin" / "libggml-cpu.so").touch()
    configure(tmp_path, folder, profile, tools, progress)
    assert (folder / "bin" / "libggml-cpu.so").exists()
    other = plan_profile("cpu", Platform(system="linux", machine="x86_64"), commit="1" * 40)
    configure(tmp_path, folder, other, tools, progress)
    assert not (folder / "bin").exists()


def test_an_interrupted_configuration_is_begun_anew(tmp_path, folder, profile, tools, progress, calls):
    """A half-written CMake cache is not built upon."""
    (folder / "CMakeCache.txt").write_text("half")
    (folder / "build.ninja").write_text("half")
    configure(tmp_path, folder, profile, tools, progress)
    assert calls() == ["configured"]
    assert (folder / "CMakeCache.txt").read_text() == ""


def test_ninja_is_asked_for_what_is_needed(folder, profile, tools, progress, calls, said):
    """Only the libraries are built, with the jobs asked for, and the progress counts."""
    compiling.compile_targets(folder, profile, tools, 3, folder / "log", progress, None)
    assert calls() == [f"ninja -C {folder} -j 3 llama llama-common"]
    assert "1/2 llama.cpp (llama)" in said.getvalue()
    assert "[2/2] Linking" in (folder / "log").read_text()


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("x.cpp:1: fatal error: error writing to /tmp/x.s: No space left on device", "disk is full"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
        ("CMake Error: CMAKE_CUDA_COMPILER not found", "CUDA toolkit"),
        ("CMake Error: Could NOT find Vulkan (missing: glslc)", "libvulkan-dev"),
    ],
)
def test_a_failed_step_shows_its_last_lines_and_what_to_do(tmp_path, output, advice):
    """The error has the lines that explain it, the advice that fits, and the log's place."""
    log = tmp_path / "log"
    command = ["sh", "-c", f"seq 100; echo '{output}'; exit 3"]
    with pytest.raises(BuildError, match="Compiling failed with exit code 3") as caught:
        compiling.run_logged(command, log=log, on_line=str, lock_fd=None, what="Compiling")
    assert output in caught.value.log_tail
    assert advice in caught.value.advice
    assert str(log) in caught.value.advice
    assert output in caught.value.render()
    assert log.read_text().splitlines()[1:3] == ["1", "2"]


def test_ctrl_c_ends_the_running_command(tmp_path):
    """An interrupt in the middle ends the child before it is passed on."""
    pids = []

    def interrupt(line):
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiling.run_logged(
            ["sh", "-c", "echo $$; exec sleep 60"],
            log=tmp_path / "log",
            on_line=interrupt,
            lock_fd=None,
            what="Compiling",
        )
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_ctrl_c_that_only_ninja_heard_is_an_interrupt(tmp_path):
    """Ninja's own word for it is no compile error."""
    command = ["sh", "-c", "echo ninja: build stopped: interrupted by user.; exit 130"]
    with pytest.raises(KeyboardInterrupt):
        compiling.run_logged(command, log=tmp_path / "log", on_line=str, lock_fd=None, what="Compiling")


def test_kill_9_of_the_build_ends_the_running_command(tmp_path):
    """No compiler goes on in the background when the build is killed."""
    code = f"""
        from pathlib import Path
        from tools.libllama.compile import run_logged
        run_logged(["sh", "-c", "echo $$; exec sleep 60"], log=Path({str(tmp_path / "log")!r}),
                   on_line=lambda line: print(line, flush=True), lock_fd=None, what="x")
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    ) as build:
        child = int(build.stdout.readline())
        build.send_signal(signal.SIGKILL)
    for _ in range(200):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            break
        time.sleep(0.01)
    else:
        pytest.fail("the child is still there")


def only(monkeypatch, folder):
    """A search path with nothing but `folder`, and an interpreter without programs beside it."""
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain.sys, "executable", str(folder / "python"))


def test_a_compiler_with_a_launcher_and_options(monkeypatch, tmp_path):
    """CXX may be a command: its first word is looked up, the rest is kept; options make another build."""
    only(monkeypatch, tmp_path)
    program(tmp_path, "cc", "#!/bin/sh\necho cc 1\n")
    program(tmp_path, "g++", "#!/bin/sh\necho g++ 12\n")
    program(tmp_path, "ccache", "#!/bin/sh\nshift\necho g++ 12\n")
    monkeypatch.setenv("CXX", "g++")
    plain = toolchain.find_compilers()
    monkeypatch.setenv("CXX", "ccache g++")
    cached = toolchain.find_compilers()
    assert cached.cxx == (f"{tmp_path}/ccache", "g++")
    assert cached.id == plain.id
    monkeypatch.setenv("CXX", "g++ -m32")
    assert toolchain.find_compilers().id == f"{plain.id} -m32"
    monkeypatch.setenv("CXX", "g++ '")
    with pytest.raises(BuildError, match="No C"):
        toolchain.find_compilers()


def test_a_toolkit_s_version_is_part_of_a_gpu_build(monkeypatch, tmp_path):
    """CUDA, HIP and Vulkan name their compiler's version; a CPU build has none to name."""
    only(monkeypatch, tmp_path)
    for name in ("nvcc", "hipcc", "glslc"):
        program(tmp_path, name, f"#!/bin/sh\necho {name} 1\necho release 2\n")
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.delenv("HIPCXX", raising=False)
    monkeypatch.setattr(toolchain.sys, "platform", "linux")
    assert toolchain.toolkit_id("cpu") == ""
    assert toolchain.toolkit_id("cuda") == "nvcc 1\nrelease 2\n"
    assert toolchain.toolkit_id("hip").startswith("hipcc 1")
    assert toolchain.toolkit_id("vulkan").startswith("glslc 1")


def test_no_compiler_says_what_to_install(monkeypatch, tmp_path):
    """A machine without a C++ compiler gets one sentence and the package's name."""
    only(monkeypatch, tmp_path)
    with pytest.raises(BuildError, match="No C compiler found") as caught:
        toolchain.find_compilers()
    assert "apt install g++" in caught.value.advice
    program(tmp_path, "cc", "#!/bin/sh\necho cc 1\n")
    with pytest.raises(BuildError, match=r"No C\+\+ compiler found"):
        toolchain.find_compilers()


def test_a_compiler_named_by_cxx_that_is_not_there(monkeypatch, tmp_path):
    """CXX is honoured, and named when it leads nowhere."""
    only(monkeypatch, tmp_path)
    monkeypatch.setenv("CXX", "g++-99")
    program(tmp_path, "cc", "#!/bin/sh\necho cc 1\n")
    with pytest.raises(BuildError, match=r"CXX=g\+\+-99"):
        toolchain.find_compilers()


def test_a_compiler_that_does_not_run_is_named(monkeypatch, tmp_path):
    """A broken compiler is found out before CMake stumbles over it."""
    only(monkeypatch, tmp_path)
    program(tmp_path, "cc", "#!/bin/sh\necho cc 1\n")
    program(tmp_path, "c++", "#!/bin/sh\nexit 1\n")
    with pytest.raises(BuildError, match=r"c\+\+ does not run"):
        toolchain.find_compilers()


def test_missing_or_old_cmake_and_missing_ninja_name_the_remedy(monkeypatch, tmp_path):
    """No CMake, one that is too old, no ninja: each names what pip can install."""
    only(monkeypatch, tmp_path)
    with pytest.raises(BuildError, match="none was found") as caught:
        toolchain.find_cmake()
    assert "pip install cmake" in caught.value.advice
    program(tmp_path, "cmake", "#!/bin/sh\necho cmake version 3.18.4\n")
    with pytest.raises(BuildError, match=r"cmake is 3\.18"):
        toolchain.find_cmake()
    with pytest.raises(BuildError, match="ninja was not found"):
        toolchain.find_ninja()
    assert toolchain.missing_requirements() == ["cmake>=3.20", "ninja"]


def test_a_wheel_s_programs_beside_the_interpreter_are_found(monkeypatch, tmp_path, tools):
    """CMake and ninja that pip put into the virtual environment need no search path."""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(toolchain.sys, "executable", str(tmp_path / "bin" / "python"))
    assert toolchain.find_cmake() == tools.cmake
    assert toolchain.find_ninja() == tools.ninja
    assert toolchain.missing_requirements() == []
