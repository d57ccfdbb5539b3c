"""Saying what a newer llama.cpp changes in the functions and structs that we use."""

from __future__ import annotations

import time

from tools.libllama import binding
from tools.libllama.api_diff import compare_api, declarations, used_names

CDEF = [
    "struct llama_batch { int32_t n_tokens; };\nstruct el_error { int kind; };\n",
    "int32_t llama_decode(struct llama_context *ctx, struct llama_batch batch);\n"
    "void llama_free(struct llama_context *ctx);\nvoid shim_x(void);\n",
]
OLD = """
// Decode.
LLAMA_API int32_t llama_decode(
        struct llama_context * ctx,   // the context
          struct llama_batch   batch);
struct llama_batch { int32_t n_tokens; /* rows */ int32_t * token; };
LLAMA_API void llama_free(struct llama_context * ctx);
"""


def test_names_what_we_use_and_nothing_of_ours():
    """Upstream's functions and structs count, the shim's do not."""
    assert used_names(CDEF) == ["llama_batch", "llama_decode", "llama_free"]


def test_layout_and_comments_are_no_change():
    """Other spaces, line breaks, comments and export macros are the same declaration."""
    new = OLD.replace("(\n        ", "( ").replace("// Decode.", "/* decodes */").replace("LLAMA_API ", "")
    diff = compare_api(used_names(CDEF), OLD, new)
    assert (diff.gone, diff.changed, diff.n_same) == ([], [], 3)


def test_reports_a_changed_signature_a_new_field_and_a_function_that_is_gone():
    """Each difference is named, with the parts that differ."""
    new = (
        "int32_t llama_decode(struct llama_context * ctx, struct llama_batch batch, bool wait);\n"
        "struct llama_batch { int32_t n_tokens; int64_t * token; };\n"
    )
    diff = compare_api(used_names(CDEF), OLD, new)
    assert diff.gone == ["llama_free"]
    assert [name for name, _, _ in diff.changed] == ["llama_batch", "llama_decode"]
    report = diff.describe()
    assert "GONE     llama_free" in report
    assert "- int32_t*token;" in report
    assert "+ int64_t*token;" in report
    assert "bool wait" in report


def test_a_deprecation_s_text_is_no_declaration():
    """Upstream's notes name functions and hold addresses; neither confuses the report."""
    note = 'DEPRECATED(void llama_update(int x), "see https://x/ and call llama_decode() instead");\n'
    diff = compare_api(used_names(CDEF), OLD, note + OLD)
    assert (diff.gone, diff.changed) == ([], [])


def test_a_name_within_another_is_not_it():
    """`llama_free` is not found in `llama_free_all`."""
    assert "llama_free" not in declarations("void llama_free_all(void);")


def test_large_headers_take_no_time():
    """A report on headers of upstream's size is a matter of a second, not of minutes."""
    many = "\n".join(f"LLAMA_API int llama_f{i}(struct llama_context * ctx, int a{i});" for i in range(5000))
    lists = "\n".join(
        f"enum llama_e{i} {{ {', '.join(f'E{i}_{j}' for j in range(500))} }};" for i in range(50)
    )
    started = time.process_time()
    diff = compare_api([f"llama_f{i}" for i in range(200)], many + lists, many)
    assert time.process_time() - started < 20
    assert diff.n_same == 200


def test_what_we_declare_can_be_looked_up():
    """The names come from the real declarations of the binding."""
    names = used_names(binding.cdef_headers())
    assert "llama_decode" in names
    assert "llama_context_params" in names
    assert not [name for name in names if name.startswith(("shim_", "el_"))]
