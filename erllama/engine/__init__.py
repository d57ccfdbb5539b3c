"""The actor of one model: requests in, one co-batched step at a time, events out.

What lives here: admission, sequences and their states, the planner, the step loop, sampling
parameters, text assembly and streams. It may use `erllama.llama` (through `llama_backend`),
`erllama.backend` and the types below; `runtime` and above may call it.
"""
