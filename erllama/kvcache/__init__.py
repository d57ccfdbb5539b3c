"""The store: a tree of opaque KV parts, tiered over RAM and files, that a crash cannot make lie.

What lives here: tree (index), header and meta (file format), arena, publish, recover, planner, store.
It knows nothing of llama.cpp or of an engine: payloads are bytes, an identity is a hash.
Imports only erllama.errors, erllama.options and below; the engine and the tools may call it.
`open_store` is the asynchronous face; everything else is synchronous and usable without trio.
"""

from __future__ import annotations
