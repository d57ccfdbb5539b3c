"""Messages ⇄ tokens: what a conversation becomes before it is computed, and what its answer means.

What lives here: validation of messages and tools, templates and their cache, control-token text kept apart,
JSON schema → grammar, deltas from partial parses, thinking. Everything is synchronous and without trio.
It may use `erllama.engine` and `erllama.llama`; `runtime` and above may call it.
"""
