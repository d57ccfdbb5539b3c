"""What may import what inside the store."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

import erllama.kvcache

FOLDER = pathlib.Path(erllama.kvcache.__file__).parent
PURE = {
    *(
        "arena",
        "catalog",
        "costs",
        "header",
        "key",
        "kinds",
        "meta",
        "names",
        "parts",
        "pins",
        "planner",
        "policy",
    ),
    *("score", "sim", "stats", "tiers", "tree", "trie", "walk"),
}
THREADS = {"files", "filetier", "journal", "lookuplog", "publish", "read", "recover", "root"}


def imports(path: pathlib.Path) -> set[str]:
    """Top-level packages and erllama modules a file imports when it runs (type-checking blocks do not)."""
    found: set[str] = set()
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            found.add("." * statement.level + (statement.module or ""))
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_imports(path: pathlib.Path) -> None:
    """Deciding modules and file modules know no trio; nobody knows an engine or llama.cpp."""
    found = imports(path)
    own = {name for name in found if name.startswith("erllama")}
    assert own <= {"erllama.checks", "erllama.errors", "erllama.options", "erllama.types"}
    if path.stem in PURE | THREADS:
        assert "trio" not in found
        shells = {
            ".store",
            ".writer",
            ".loader",
            ".finder",
            ".saver",
            ".tierset",
            ".room",
            ".runner",
            ".match",
        }
        assert not found & shells


def test_the_store_needs_no_native_library() -> None:
    """B4, K38: importing and using the store loads nothing of llama.cpp."""
    code = "import sys, erllama.kvcache.store; print(*(m for m in sys.modules if m.startswith('erllama.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if not name.startswith("erllama.kvcache")}
    assert loaded <= {f"erllama.{name}" for name in ("checks", "errors", "machine", "options", "types")}
