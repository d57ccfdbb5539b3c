"""How many threads a context computes with."""

from __future__ import annotations

from erllama.engine.context_threads import ContextThreads


class Context:
    """What is said to a native context."""

    def __init__(self) -> None:
        self.said: list[tuple[int, int]] = []

    def set_threads(self, n_threads: int, n_threads_batch: int) -> None:
        """Note it."""
        self.said.append((n_threads, n_threads_batch))


def disturbed() -> tuple[ContextThreads, Context]:
    """Four threads got the CPU time of two, so three are used."""
    threads, context = ContextThreads("m.gguf", 4, 8, adapt=True), Context()
    threads.observe(context, 1.0, 2.0)  # type: ignore[arg-type]
    return threads, context


def test_without_adapting_it_is_what_was_asked_for() -> None:
    """Threads of their own for single rows and for more, whatever a call got."""
    threads, context = ContextThreads("m.gguf", 4, 8, adapt=False), Context()
    threads.observe(context, 1.0, 0.1)  # type: ignore[arg-type]
    assert (threads.n_for(1), threads.n_for(2), context.said) == (4, 8, [])
    assert ContextThreads("m.gguf", 4, None, adapt=False).n_for(100) == 4


def test_a_busy_machine_gets_fewer() -> None:
    """The context is told, once."""
    threads, context = disturbed()
    assert context.said == [(3, 3)]
    threads.observe(context, 1.0, 3.0)  # type: ignore[arg-type]
    assert context.said == [(3, 3)]
    assert threads.n_for(1) == threads.n_for(2) == 3


def test_exact_bits_take_all_threads() -> None:
    """From the next decode on, and what was found out is forgotten."""
    threads, context = disturbed()
    threads.use_all(context)  # type: ignore[arg-type]
    threads.use_all(context)  # type: ignore[arg-type]
    assert context.said == [(3, 3), (4, 4)]
    assert threads.n_for(1) == 4


def test_a_context_made_anew_goes_on_with_what_was_found_out() -> None:
    """It is opened with all threads."""
    threads, _ = disturbed()
    second = Context()
    threads.opened(second)  # type: ignore[arg-type]
    assert second.said == [(3, 3)]
