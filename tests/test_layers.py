"""Imports point downward only: a reader who opens a module knows what it cannot depend on.

The table is the architecture:
`cli > {bench, server} > runtime > chat > engine > {kvcache, llama} > {types, errors, options}`.
Adding an arrow here is a decision, not a fix.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import erllama

ROOT = Path(erllama.__file__).parent

# Package → packages it may import from. Top-level modules are below every package, except that
# `erllama` itself (its __init__) re-exports what users type and so sits on top of `runtime`.
ALLOWED: dict[str, set[str]] = {
    # llama: for `erllama version` alone
    "cli": {"erllama", "bench", "server", "runtime", "models", "llama"},
    "server": {"erllama", "runtime", "engine", "models"},  # engine: the type of event streams
    # it measures all of them; server, testing: what HTTP costs, with a model that computes nothing
    "bench": {"erllama", "runtime", "engine", "kvcache", "llama", "models", "server", "testing"},
    "runtime": {"chat", "engine", "kvcache", "llama"},
    "chat": {"engine", "llama"},
    "engine": {"kvcache", "llama"},
    "kvcache": set(),
    "llama": set(),
    "models": set(),
    "testing": {"chat", "engine", "kvcache", "llama", "runtime"},
    "tools": {"kvcache"},
    "erllama": {"chat", "runtime", "kvcache"},
    "__main__": {"cli"},
}
BASE: dict[str, set[str]] = {
    "errors": set(),
    "types": set(),
    "child": set(),
    "files": {"errors"},
    "checks": {"errors"},
    "middleware": set(),
    "machine": set(),
    "sizes": set(),
    "options": {"checks", "errors", "machine"},
    "backend": {"errors", "types"},
}

# The store decides in these; the rest of kvcache/ is its thin asynchronous shell.
PURE_STORE = (
    *(
        "arena",
        "catalog",
        "costs",
        "files",
        "filetier",
        "header",
        "journal",
        "key",
        "kinds",
        "lookuplog",
        "meta",
        "names",
    ),
    *(
        "parts",
        "pins",
        "planner",
        "policy",
        "publish",
        "read",
        "recover",
        "root",
        "score",
        "tree",
        "trie",
        "walk",
    ),
)
NO_TRIO = (
    *("llama/", "chat/", *(f"{module}.py" for module in BASE)),
    *(f"kvcache/{name}.py" for name in PURE_STORE),
    *(
        "engine/admission.py",
        "engine/embed_plan.py",
        "engine/planner.py",
        "engine/retokenise.py",
        "engine/sampling.py",
        "engine/sharing.py",
        "engine/state.py",
        "engine/text.py",
    ),
)

MODULES = sorted(path for path in ROOT.rglob("*.py") if "_native" not in path.parts)


def _imports(path: Path) -> set[str]:
    """Every module a file imports, at any depth and under TYPE_CHECKING too; absolute dotted names."""
    package = ("erllama", *path.relative_to(ROOT).parent.parts)
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module or "")))
            # `from erllama import models` names a module, `from erllama import Token` an attribute.
            names |= {
                f"{module}.{alias.name}" if _is_module(f"{module}.{alias.name}") else module
                for alias in node.names
            }
    return names


def _is_module(name: str) -> bool:
    head, *rest = name.split(".")
    path = ROOT.joinpath(*rest)
    return head == "erllama" and bool(rest) and (path.is_dir() or path.with_suffix(".py").is_file())


def _layer(name: str) -> str | None:
    """`erllama.engine.planner` → `engine`; None for what is not ours."""
    head, *rest = name.split(".")
    if head != "erllama":
        return None
    return rest[0] if rest else "erllama"


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _layer_of_file(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    if len(parts) > 1:
        return parts[0]
    return "erllama" if parts[0] == "__init__.py" else path.stem


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_imports_point_downward(path):
    """A module imports from its own package, from the packages below it, and from the base modules."""
    here = _layer_of_file(path)
    if here in BASE:
        allowed = BASE[here] | {here}
    else:
        assert here in ALLOWED, f"{_name(path)}: a new package needs its place in the table"
        allowed = ALLOWED[here] | BASE.keys() | {here}
    wrong = sorted(n for n in _imports(path) if (layer := _layer(n)) is not None and layer not in allowed)
    assert not wrong, f"{_name(path)} imports {', '.join(wrong)}; {here} may use {sorted(allowed)}"


@pytest.mark.parametrize("path", [m for m in MODULES if _layer_of_file(m) != "llama"], ids=_name)
def test_only_the_binding_sees_cffi(path):
    """Nothing outside `erllama/llama` imports cffi or the compiled binding."""
    seen = {n for n in _imports(path) if n.split(".")[0] in {"cffi", "_cffi_backend"} or "_native" in n}
    assert not seen, f"{_name(path)} imports {seen}"


@pytest.mark.parametrize("path", [m for m in MODULES if _name(m).startswith(NO_TRIO)], ids=_name)
def test_pure_modules_know_no_trio(path):
    """What decides, and everything that runs on the native thread, is free of trio."""
    assert "trio" not in {n.split(".")[0] for n in _imports(path)}, f"{_name(path)} imports trio"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_imports_inside_a_package_are_relative(path):
    """Inside a package `.name`, across packages `erllama.name`: a move shows what it breaks."""
    here = _layer_of_file(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("erllama."):
            assert here in BASE or _layer(node.module or "") != here, f"{_name(path)}: {node.module}"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_every_module_says_what_lives_there(path):
    """A module opens with a docstring."""
    assert ast.get_docstring(ast.parse(path.read_text())), f"{_name(path)} has no docstring"


def test_the_rules_catch_what_they_forbid(tmp_path, monkeypatch):
    """The import reader sees plain, from-, relative, nested and type-checking imports."""
    monkeypatch.setattr("test_layers.ROOT", tmp_path)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "planner.py").write_text("")
    file = tmp_path / "engine" / "odd.py"
    file.write_text(
        "import trio.lowlevel\nfrom .planner import plan\nfrom . import planner\nfrom ..cli import main\n"
        "def f():\n    from erllama.runtime import engine\n"
        "if TYPE_CHECKING:\n    import cffi\n    from erllama import Token, engine\n"
    )
    assert _imports(file) == {
        "trio.lowlevel",
        "erllama.engine.planner",
        "erllama.cli",
        "erllama.runtime",
        "cffi",
        "erllama",
        "erllama.engine",
    }
