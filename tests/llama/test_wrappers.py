"""The generator of noexcept wrappers, as text; and what an exception becomes in Python."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from erllama.errors import NativeError
from erllama.llama import ensure_backend

REPO = Path(__file__).resolve().parents[2]


def _load(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


wrappers = _load("erllama_wrappers_under_test", REPO / "tools" / "libllama" / "wrappers.py")
CDEF = sorted((REPO / "erllama" / "llama" / "cdef").glob("*.h"), key=lambda p: (p.name != "types.h", p.name))
HEADERS = [path.read_text() for path in CDEF]


def test_wrapper_keeps_signature_and_adds_error() -> None:
    """A wrapper has the types of its function, plus where to report an exception."""
    (made,) = wrappers.functions(["struct m; int32_t llama_f(const struct m *a, char b[4], bool c);"])
    assert made.prototype == "int32_t el_f(const struct m *a, char b[4], bool c, struct el_error *err)"
    assert "try { return llama_f(a, b, c); }" in made.body
    assert "noexcept" in made.body
    assert made.body.count("return {};") == 1


def test_wrapper_of_void_and_of_pointers() -> None:
    """A function without a result has none to return, a pointer result keeps its star."""
    void, pointer = wrappers.functions(["void shim_a(void); const char *ggml_b(void);"])
    assert void.prototype == "void el_a(struct el_error *err)"
    assert "return" not in void.body
    assert pointer.prototype == "const char *el_ggml_b(struct el_error *err)"


def test_two_functions_of_one_wrapper_name_are_refused() -> None:
    """A name clash stops the build instead of hiding a function."""
    with pytest.raises(ValueError, match="llama_x and shim_x share a wrapper name"):
        wrappers.functions(["void llama_x(void); void shim_x(void);"])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("void other_x(void);", "starts with one of"),
        ("void llama_x(int32_t);", "needs a name"),
        ("void llama_x(int32_t n, ...);", "variadic"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(text: str, match: str) -> None:
    """Unknown prefixes, nameless parameters and variadic functions are errors of the headers."""
    with pytest.raises(ValueError, match=match):
        wrappers.functions([text])


def test_types_hold_no_functions() -> None:
    """Taking the functions out of the headers leaves the types."""
    assert wrappers.functions([wrappers.type_declarations(HEADERS)]) == []


@pytest.mark.model
def test_every_function_is_bound_through_its_wrapper_only() -> None:
    """B5: the binding has the wrappers and constants, nothing of llama.h, ggml or the shim itself."""
    raw = ensure_backend()._raw
    bound = {name for name in dir(raw) if callable(getattr(raw, name))}
    assert bound == {f.wrapper for f in wrappers.functions(HEADERS)}
    assert len(bound) > 80


def test_position_shifts_are_not_bound() -> None:
    """LLAMA_CPP: never seq_add or seq_div; they are not even declared."""
    assert not any("seq_add" in f.name or "seq_div" in f.name for f in wrappers.functions(HEADERS))


@pytest.mark.model
@pytest.mark.parametrize(
    ("kind", "reason", "text"),
    [
        (1, "oom", "out of memory"),
        (2, "exception", "thrown by the test hook"),
        (3, "exception", "not a std::exception"),
    ],
)
def test_exceptions_become_typed_errors(kind: int, reason: str, text: str) -> None:
    """B5: bad_alloc, runtime_error and anything else thrown in C++ reach Python as NativeError."""
    lib = ensure_backend()
    with pytest.raises(NativeError, match=text) as caught:
        lib.test_throw(kind)
    assert caught.value.reason == reason
    lib.test_throw(0)  # the error was taken out: the next call is clean
