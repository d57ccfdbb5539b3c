"""`erllama version`: one fact a line."""

from __future__ import annotations

import re

import pytest

from erllama import models
from erllama.cli import version
from erllama.errors import NativeLibraryError


@pytest.mark.model
def test_it_names_build_backend_and_variant(erllama_command):
    """What somebody who helps would ask for first."""
    said = erllama_command("version")
    assert said.status == 0
    facts = {line[:12].strip(): line[12:].strip() for line in said.out.splitlines()}
    assert set(facts) == {
        *("erllama", "python", "models", "llama.cpp", "backend", "cpu variant", "build"),
    }
    assert facts["models"] == str(models.models_dir())
    assert all(facts.values())
    assert re.fullmatch(r"\S+ \(from llama-cpp-python [\d.]+, commit [0-9a-f]{12}\)", facts["llama.cpp"])


def test_without_a_build_it_says_what_it_can(erllama_command, monkeypatch):
    """No native library: the other facts, then the error with what to run."""

    def missing() -> None:
        raise NativeLibraryError("not built; run: python build_libllama.py")

    monkeypatch.setattr(version, "build_info", missing)
    said = erllama_command("version")
    assert said.status == 1
    assert said.out.startswith("erllama ")
    assert "models" in said.out
    assert said.err == "erllama: not built; run: python build_libllama.py [native_library]\n"
