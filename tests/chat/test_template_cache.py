"""Parsed templates are made once for whoever wants them, and nobody waits for another's."""

from __future__ import annotations

import threading

import pytest

from erllama.chat.templates import TemplateCache


class Slow:
    """Makes a template when it is told to."""

    def __init__(self):
        self.begun, self.go = threading.Event(), threading.Event()
        self.n_made = 0

    def __call__(self):
        self.n_made += 1
        self.begun.set()
        assert self.go.wait(10)
        return object()


def in_thread(work):
    """A thread that does it."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_nobody_waits_for_anothers_template():
    """While one is made, others are got, and it can be purged; whoever made it has it."""
    cache, slow, got = TemplateCache(4), Slow(), []
    thread = in_thread(lambda: got.append(cache.get("slow", slow)))
    assert slow.begun.wait(10)
    other = object()
    assert cache.get("other", lambda: other) is other
    assert not cache.purge("slow")
    slow.go.set()
    thread.join(10)
    assert len(got) == 1
    assert not cache.purge("slow")  # a model that was unloaded meanwhile keeps none


def test_those_who_want_the_same_wait_for_it():
    """It is made once."""
    cache, slow, got = TemplateCache(4), Slow(), []
    threads = [in_thread(lambda: got.append(cache.get("slow", slow))) for _ in range(4)]
    assert slow.begun.wait(10)
    slow.go.set()
    for thread in threads:
        thread.join(10)
    assert (len(got), len(set(got)), slow.n_made, cache.n_made) == (4, 1, 1, 1)


def test_a_failure_is_not_kept():
    """The next one tries again, and an empty place takes none from those that are kept."""
    cache = TemplateCache(1)

    def fail():
        raise ValueError("no template")

    for _ in range(2):
        with pytest.raises(ValueError, match="no template"):
            cache.get("bad", fail)
    assert not cache.purge("bad")
    made = object()
    assert cache.get("bad", lambda: made) is made
    assert cache.purge("bad")
