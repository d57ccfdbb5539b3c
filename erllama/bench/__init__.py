"""`erllama bench`: the workloads that say how fast erllama is, beside llama.cpp's own server if wanted.

What lives here: the workloads (one module per kind), the two sides that answer them (`own`, `peer`), and what
turns their figures into a table, JSON and plots. It uses the public API and reads counters below it; only
`cli` may import it. A workload says what it compares and judges its figures by a bar; it never asserts.
"""
