"""Engine and Model, as users see them.

What lives here: `open_engine`, the model registry, option handling, read-outs. It drives
`erllama.engine` and may use everything below; `server` and `cli` call it.
"""
