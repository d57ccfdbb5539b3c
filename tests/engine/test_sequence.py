"""One request's token state: invariants, events of each kind of end, times."""

from __future__ import annotations

import pytest

from erllama.backend import Sampled
from erllama.engine.sequence import Sequence
from erllama.engine.stream import EventBuffer
from erllama.options import GenerationOptions
from erllama.types import Request, Stats, Token, TokenId, TokenLogprob

ME = Request(1, "m")


class Chain:
    """Counts how often it was freed."""

    n_closed = 0

    def close(self) -> None:
        self.n_closed += 1


def make(prompt: str = "abc", *, n_ctx: int = 100, **generation: object) -> Sequence:
    """A queued sequence, submitted at second 10."""
    return Sequence(
        request=ME,
        prompt=list(prompt.encode()),
        options=GenerationOptions(**generation),
        sampler=Chain(),
        seed=5,
        n_ctx=n_ctx,
        buffer=EventBuffer(256, lambda: None),
        now=10.0,
    )


def decoding(**generation: object) -> Sequence:
    """A sequence whose prompt is in memory but for its last token."""
    seq = make(**generation)
    seq.admit(0, 11.0)
    seq.restored(11.0)
    seq.computed(2, 13.0)
    return seq


def say(seq: Sequence, text: bytes, *, eog: bool = False) -> list[object]:
    """Sample each byte in turn; reasons returned. Then `eog`, if wanted."""
    reasons = []
    for token in text:
        seq.computed(seq.n_tokens, 14.0)
        reasons.append(seq.accept(Sampled(token=token), piece=bytes([token]), is_eog=False, now=14.0))
    if eog:
        seq.computed(seq.n_tokens, 14.0)
        reasons.append(seq.accept(Sampled(token=256), piece=b"<eog>", is_eog=True, now=14.0))
    return reasons


def events(seq: Sequence) -> list[object]:
    """What the reader would get."""
    return list(seq.buffer._events)


def test_a_whole_life_with_its_events_and_times():
    """Every id is announced, text follows it, Done is last; seconds add up."""
    seq = decoding(max_tokens=2)
    assert say(seq, b"hi") == [None, "length"]
    assert seq.finish("length", 20.0) == 0
    completion = events(seq)[-1].completion
    assert events(seq)[:-1] == [TokenId(104, ME), Token("h", ME), TokenId(105, ME), Token("i", ME)]
    assert (completion.reply, completion.generated) == ("hi", [104, 105])
    assert completion.context_tokens == [97, 98, 99, 104, 105]
    assert completion.committed_tokens == 5
    assert (completion.finish_reason, completion.seed, completion.logprobs) == ("length", 5, None)
    assert completion.stats == Stats(
        n_prompt=3, n_generated=2, queue_s=1.0, prefill_s=2.0, first_token_s=4.0, decode_s=7.0
    )
    assert completion.stats.n_computed == 3


def test_end_of_generation_is_an_id_without_text():
    """G25: the end token is announced and counted, and shows nothing."""
    seq = decoding()
    assert say(seq, b"a", eog=True) == [None, "stop"]
    seq.finish("stop", 20.0)
    assert events(seq)[:-1] == [TokenId(97, ME), Token("a", ME), TokenId(256, ME)]
    assert events(seq)[-1].completion.generated == [97, 256]
    assert events(seq)[-1].completion.reply == "a"


def test_a_stop_string_ends_it_and_is_named():
    """G8: the reply ends before the match, the ids include it."""
    seq = decoding(stop=["END"])
    assert say(seq, b"xEND") == [None, None, None, "stop"]
    seq.finish("stop", 20.0)
    completion = events(seq)[-1].completion
    assert (completion.reply, completion.stop_sequence) == ("x", "END")
    assert bytes(completion.generated) == b"xEND"
    assert [e.text for e in events(seq) if isinstance(e, Token)] == ["x"]


@pytest.mark.parametrize("reason", ["length", "cancelled"])
def test_held_back_text_is_delivered_at_any_other_end(reason: str):
    """A prefix of a stop is flushed before Done, and no stop sequence is reported."""
    seq = decoding(stop=["END"], max_tokens=3)
    say(seq, b"xEN")
    seq.finish(reason, 20.0)
    completion = events(seq)[-1].completion
    assert events(seq)[-2] == Token("EN", ME)
    assert (completion.reply, completion.finish_reason, completion.stop_sequence) == ("xEN", reason, None)


def test_a_stop_completed_by_the_flush_is_a_stop():
    """A stop of U+FFFD matched by an unfinished character: the reason says so."""
    seq = decoding(stop="\ufffd", max_tokens=2)
    say(seq, b"x\xf0")
    seq.finish("length", 20.0)
    completion = events(seq)[-1].completion
    assert (completion.reply, completion.finish_reason, completion.stop_sequence) == ("x", "stop", "\ufffd")


def test_the_end_of_the_context_is_length():
    """R6: the ledger never grows beyond n_ctx."""
    seq = make(n_ctx=5, max_tokens=100)
    seq.admit(0, 11.0)
    seq.restored(11.0)
    seq.computed(2, 11.0)
    assert say(seq, b"xy") == [None, "length"]
    assert seq.n_tokens == 5


def test_logprobs_are_collected_when_asked_for():
    """One per sampled token, in order."""
    seq = decoding(logprobs=0)
    for token in (97, 98):
        seq.computed(seq.n_tokens, 14.0)
        logprob = TokenLogprob(token=token, logprob=-0.5)
        seq.accept(Sampled(token=token, logprob=logprob), piece=b"", is_eog=False, now=14.0)
    seq.finish("stop", 20.0)
    assert [p.token for p in events(seq)[-1].completion.logprobs] == [97, 98]


def test_preempted_it_keeps_tokens_and_text():
    """It gives up slot and memory only; times count from the first admission."""
    seq = decoding(max_tokens=4)
    say(seq, b"ab")
    assert seq.preempt() == 0
    assert (seq.phase.value, seq.n_kv, seq.n_generated, seq.has_slot) == ("queued", 0, 2, False)
    seq.check()
    seq.admit(3, 50.0)
    seq.computed(4, 60.0)
    seq.check()
    say(seq, b"cd")
    seq.finish("length", 70.0)
    completion = events(seq)[-1].completion
    assert completion.reply == "abcd"
    assert completion.stats.queue_s == 1.0


@pytest.mark.parametrize(("n_kv", "phase"), [(0, "prefill"), (3, "prefill"), (4, "decode")])
def test_rewinding(n_kv: int, phase: str):
    """What is lost is prefilled again; nothing lost but the pending token is no change of phase."""
    seq = decoding()
    say(seq, b"ab")
    seq.rewind(n_kv)
    assert (seq.n_kv, seq.phase.value) == (n_kv, phase)
    seq.check()


def test_the_end_frees_the_sampler_once_and_says_so():
    """After finish or fail the sampler is closed, the slot returned and `ended` set."""
    for end in (lambda s: s.finish("stop", 20.0), lambda s: s.fail(KeyError("x"))):
        seq = decoding()
        assert not seq.ended.is_set()
        assert end(seq) == 0
        assert seq.sampler.n_closed == 1
        assert seq.ended.is_set()
        seq.check()


def test_a_queued_one_that_ends_gives_up_no_slot():
    """Cancelled before admission: no lane, and its Done says that nothing was generated."""
    seq = make()
    assert seq.finish("cancelled", 12.0) is None
    completion = events(seq)[-1].completion
    assert (completion.generated, completion.stats.queue_s) == ([], 2.0)


def test_broken_invariants_are_found():
    """D7: a ledger two tokens ahead while decoding, or more memory than tokens, is an assertion."""
    for n_kv in (1, 3, 99, -1):
        seq = decoding()
        seq.cells.n = n_kv
        with pytest.raises(AssertionError):
            seq.check()


def test_its_repr_shows_where_it_is():
    """Request, phase, memory against tokens, slot."""
    assert repr(make()) == "<Sequence m#1 queued 0/3 slot=None>"
    assert repr(decoding()) == "<Sequence m#1 decode 2/3 slot=0>"
