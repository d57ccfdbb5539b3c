"""Stopping a decode by flag and by deadline, and what is true afterwards."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from erllama.errors import InvalidBatch
from erllama.llama import Batch

from .support import feed, off_by, prompt, step

if TYPE_CHECKING:
    from collections.abc import Callable

    from erllama.llama import Context, Model

    from .support import OpenContext

pytestmark = pytest.mark.model


def _batch(context: Context, tokens: list[int], pos: int = 0, *, seq_id: int = 0) -> Batch:
    batch = Batch(len(tokens), context.n_seq_max)
    batch.add(seq_id, tokens, pos)
    return batch


def test_raised_flag_stops_every_decode(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """A raised flag answers rc 2 with its cause until it is cleared."""
    context = open_context(tiny("dense"))
    batch = _batch(context, prompt(context.model, 20))
    assert context.abort.cause is None
    context.abort.raise_flag()
    assert context.decode(batch) == 2
    assert context.abort.cause == "cancel"
    assert context.decode(batch) == 2
    context.abort.clear()
    assert context.abort.cause is None
    assert context.decode(batch) == 0


def test_deadline(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """A passed deadline answers rc 2 as "deadline"; a far or disarmed one does not."""
    context = open_context(tiny("dense"))
    batch = _batch(context, prompt(context.model, 20))
    context.abort.arm(0.0)
    assert context.decode(batch) == 2
    assert context.abort.cause == "deadline"
    context.abort.arm(None)
    assert context.decode(batch) == 0
    for far in (3600, 1e300):  # the second does not fit into nanoseconds
        context.abort.arm(far)
        context.memory.rm(0)
        assert context.decode(batch) == 0


@pytest.mark.slow
def test_flag_stops_a_running_decode(smollm2: Model, open_context: OpenContext) -> None:
    """Raised by another thread, the flag ends a decode long before it would be done."""
    context = open_context(smollm2, n_ctx=1024, n_batch=512)
    batch = _batch(context, prompt(smollm2, 512))
    answers: list[int] = []
    decoder = threading.Thread(target=lambda: answers.append(context.decode(batch)))
    decoder.start()
    time.sleep(0.05)  # the decode is running: 512 rows take seconds
    raised = time.process_time()
    context.abort.raise_flag()
    decoder.join()
    assert answers == [2]
    assert time.process_time() - raised < 1.0


@pytest.mark.parametrize("kind", ["dense", "window"])
def test_repair_after_abort(tiny: Callable[[str], Model], open_context: OpenContext, kind: str) -> None:
    """LLAMA_CPP: after rc 2 `pos_max` is right for dense and window memory, and going on from it is exact."""
    model = tiny(kind)
    tokens = prompt(model, 200)
    context = open_context(model, n_ubatch=64)
    reference = open_context(model, n_ubatch=64)
    feed(reference, tokens[:100])
    feed(context, tokens[:100])
    context.abort.arm(0.0)
    assert context.decode(_batch(context, tokens[100:], 100)) == 2
    context.abort.clear()
    assert context.memory.pos_max(0) == 99
    assert off_by(feed(context, tokens[100:], pos=100), feed(reference, tokens[100:], pos=100)) == 0


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_states_are_lost_by_an_abort(
    tiny: Callable[[str], Model], open_context: OpenContext, kind: str
) -> None:
    """LLAMA_CPP: after rc 2 recurrent and hybrid sequences must be removed; then they compute right again."""
    model = tiny(kind)
    tokens = prompt(model, 150)
    context, reference = open_context(model, n_ubatch=64), open_context(model, n_ubatch=64)
    expected = feed(reference, tokens)
    feed(context, tokens[:50])
    context.abort.raise_flag()
    assert context.decode(_batch(context, tokens[50:], 50)) == 2
    context.abort.clear()
    assert context.memory.rm(0)
    assert context.memory.pos_max(0) == -1
    assert off_by(feed(context, tokens), expected) == 0


def test_neighbour_survives_an_abort(tiny: Callable[[str], Model], open_context: OpenContext) -> None:
    """A sequence that was not part of the aborted step goes on bit for bit."""
    model = tiny("dense")
    context, reference = open_context(model), open_context(model)
    for each in (context, reference):
        feed(each, prompt(model, 40), seq_id=1)
    context.abort.raise_flag()
    assert context.decode(_batch(context, prompt(model, 30, seed=2))) == 2
    context.abort.clear()
    assert context.memory.pos_max(0) == -1
    assert off_by(step(context, 5, 40, seq_id=1), step(reference, 5, 40, seq_id=1)) == 0


def test_a_deadline_may_be_armed_by_the_decode_itself(
    tiny: Callable[[str], Model], open_context: OpenContext
) -> None:
    """`arm_next` takes effect with the next decode, and only with that one's beginning."""
    context = open_context(tiny("dense"))
    batch = Batch(4, 3)
    batch.add(0, [1, 2], 0)
    context.abort.arm_next(0.0)
    assert context.abort.fields.deadline_ns == 0
    assert context.decode(batch) == 2
    assert context.abort.cause == "deadline"
    assert context.abort.is_raised
    context.abort.clear()
    assert not context.abort.is_raised
    context.memory.rm(0)
    assert context.decode(batch) == 0  # asked for once
    context.abort.arm(0.0)
    context.abort.arm_next(None)
    batch.clear()
    batch.add(0, [3], 2)
    assert context.decode(batch) == 0
    context.abort.arm_next(0.0)
    with pytest.raises(InvalidBatch):
        context.decode(batch)  # refused before anything is armed
    batch.clear()
    batch.add(0, [3], 3)
    assert context.decode(batch) == 0
