"""`pip install` of the source distribution, as somebody without a checkout does it.

Offline: the native library comes from the user's cache, where `make build` has put it, and the
dependencies from this environment, but only those that the wheel asks for.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from packaging.requirements import Requirement

from tools.libllama import native, toolchain
from tools.libllama.pin import ROOT, read_pin
from tools.libllama.profile import Platform, plan_profile

pytestmark = [pytest.mark.model, pytest.mark.slow]

TRY = """
import pathlib, sys
import erllama, erllama.cli, erllama.models, erllama.testing
from erllama.llama.ffi import library
from erllama.llama.variant import choose
here = pathlib.Path(sys.prefix).resolve()
native = library().native_dir
assert pathlib.Path(erllama.__file__).resolve().is_relative_to(here), erllama.__file__
assert native.resolve().is_relative_to(here), native
print(choose(native).name)
"""


def pip(*arguments, **environment):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr


def closure(wheel_site):
    """The distributions that the installed wheel needs, with what those need."""
    wanted = [*next(iter(importlib.metadata.distributions(path=[str(wheel_site)]))).requires]
    found = {}
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name not in found:
            found[requirement.name] = importlib.metadata.distribution(requirement.name)
            wanted += found[requirement.name].requires or []
    return found.values()


def share(distributions, site):
    """Make distributions of this environment importable in another one, and nothing else of it."""
    here = Path(sysconfig.get_path("purelib"))
    for distribution in distributions:
        for top in {path.parts[0] for path in distribution.files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(here / top)


def test_the_source_distribution_installs_and_works_in_a_clean_environment(tmp_path, user_cache, monkeypatch):
    """B3: sdist → wheel → empty environment: erllama imports, its library loads, a variant decodes."""
    for name in ("ERLLAMA_BACKEND", "ERLLAMA_CMAKE_ARGS"):
        monkeypatch.delenv(name, raising=False)
    pin, on = read_pin(), Platform.here()
    profile = plan_profile(None, on, commit=pin.commit)
    key = native.native_key(
        pin.tree, profile, toolchain.find_compilers().id, on, toolchain.toolkit_id(profile.backend)
    )
    assert native.is_complete(native.entry_dir(key)), "a plain `make build` has to come first"

    sdist = next(SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path / "w"), sdist)
    (wheel,) = (tmp_path / "w").iterdir()
    assert "-none-any" not in wheel.name

    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    (site,) = folder.glob("lib/python*/site-packages")
    share(closure(site), site)
    done = subprocess.run(
        [python, "-I", "-W", "error", "-c", TRY], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "ggml-cpu" in done.stdout
    version = subprocess.run(
        [folder / "bin" / "erllama", "version"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert version.returncode == 0, version.stderr
    assert pin.version in version.stdout or pin.commit[:7] in version.stdout
