"""The native build: pinned llama.cpp sources in, a folder of loadable libraries out.

`build_libllama.py`, the packaging hook and the Makefile all come in through `build.run`. Nothing here
is imported by the library at run time, and nothing here needs more than the standard library, except
`selftest_model` (gguf, numpy) and `binding` (cffi).
"""
