"""The fake is strict: whatever an engine could mix up changes its answer or stops it (M14)."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from erllama.backend import MemoryKind, Row, SamplingParams, Step, StepResult, StepStatus
from erllama.errors import InvalidContent, InvalidGrammar
from erllama.testing import FakeBackend
from erllama.testing.fake import CONTROL, EOG, N_VOCAB

PARAMS = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repetition_penalty=1.0, seed=7)


def opened(**settings: object) -> FakeBackend:
    """A fake that is open, with four slots."""
    backend = FakeBackend(**{"n_slots": 4, **settings})
    backend.open()
    return backend


def step(backend: FakeBackend, *rows: Row) -> list[int | None]:
    """Compute rows; the tokens sampled."""
    result = backend.step(Step(rows))
    assert result.status is StepStatus.OK
    return [None if s is None else s.token for s in result.sampled]


def draws(backend: FakeBackend, params: SamplingParams, slot: int = 0, n: int = 12) -> list[int]:
    """Draw `n` tokens after the same prompt."""
    sampler, ledger = backend.new_sampler(params), [1, 2, 3]
    for _ in range(n):
        pos = backend.n_kv(slot)
        (token,) = step(backend, Row(slot, pos, ledger[pos:], sampler))
        ledger.append(token)
    return ledger[3:]


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"repetition_penalty": 1.2},
        {"seed": 8},
        {"grammar": "root ::= digits"},
        {"logit_bias": ((65, 1.0),)},
    ],
    ids=str,
)
def test_every_parameter_changes_the_answer(change: dict[str, object]):
    """A chain with one other parameter says something else."""
    assert draws(opened(), PARAMS) != draws(opened(), dataclasses.replace(PARAMS, **change))


def test_the_same_chain_says_the_same_in_any_slot():
    """Nothing but memory, parameters and draw count enters the answer."""
    assert draws(opened(), PARAMS) == draws(opened(), PARAMS, slot=3)


def test_a_swapped_sampler_changes_the_answer():
    """Two rows that exchange their chains get other tokens."""

    def both(swap: bool) -> list[int | None]:
        backend = opened()
        a, b = (backend.new_sampler(dataclasses.replace(PARAMS, seed=s)) for s in (1, 2))
        if swap:
            a, b = b, a
        return step(backend, Row(0, 0, [1, 2], a), Row(1, 0, [1, 2], b))

    assert both(swap=True) == both(swap=False)[::-1]
    assert both(swap=True) != both(swap=False)


def test_greedy_ignores_the_seed():
    """At temperature 0 two seeds agree, as on a real model."""
    greedy = dataclasses.replace(PARAMS, temperature=0.0)
    assert draws(opened(), greedy) == draws(opened(), dataclasses.replace(greedy, seed=99))


def test_memory_of_another_sequence_changes_the_answer():
    """A missed restore or a wrong id means other cells, hence other tokens."""
    backend = opened()
    step(backend, Row(0, 0, [1, 2, 3]), Row(1, 0, [1, 2, 4]))
    rows = [Row(slot, 3, [9], backend.new_sampler(PARAMS)) for slot in (0, 1)]
    right, wrong = step(backend, *rows)
    assert right != wrong


def test_a_row_that_does_not_continue_its_memory_is_an_assertion():
    """A stale cell or a gap does not pass silently."""
    backend = opened()
    step(backend, Row(0, 0, [1, 2]))
    for pos in (0, 1, 3):
        with pytest.raises(AssertionError, match=f"holds 2 tokens, the row starts at {pos}"):
            backend.step(Step((Row(0, pos, [5]),)))


def test_rows_must_ascend_and_fit_the_batch():
    """What llama.cpp would assert on is asserted here."""
    backend = opened(n_batch=4)
    with pytest.raises(AssertionError, match="ascending"):
        backend.step(Step((Row(1, 0, [1]), Row(0, 0, [1]))))
    with pytest.raises(AssertionError, match="ascending"):
        backend.step(Step((Row(0, 0, [1]), Row(0, 1, [1]))))
    for tokens in ([], [1] * 5):
        with pytest.raises(AssertionError):
            backend.step(Step((Row(0, 0, tokens),)))


def test_a_closed_sampler_is_an_assertion_and_is_not_live():
    """Freed chains are found, used or leaked."""
    backend = opened()
    sampler = backend.new_sampler(PARAMS)
    assert len(backend.live_samplers) == 1
    sampler.close()
    sampler.close()
    assert not backend.live_samplers
    with pytest.raises(AssertionError, match="closed sampler"):
        backend.step(Step((Row(0, 0, [1], sampler),)))


def test_a_full_memory_refuses_and_changes_nothing():
    """NO_ROOM leaves what was there, and less may fit."""
    backend = opened(n_cells=5)
    step(backend, Row(0, 0, [1, 2, 3]))
    refused = backend.step(Step((Row(0, 3, [4]), Row(1, 0, [1, 2]))))
    assert (refused.status, refused.rc, backend.memory) == (StepStatus.NO_ROOM, 1, {0: {0: 1, 1: 2, 2: 3}})
    step(backend, Row(0, 3, [4]), Row(1, 0, [1]))


@pytest.mark.parametrize("kind", list(MemoryKind))
def test_cuts(kind: MemoryKind):
    """Everybody can drop all; a recurrent state cannot go back."""
    backend = opened(memory_kind=kind)
    step(backend, Row(0, 0, [1, 2, 3]), Row(1, 0, [1, 2, 3]))
    exact = kind not in (MemoryKind.RECURRENT, MemoryKind.HYBRID, MemoryKind.WHOLE)
    assert backend.cut(0, 2) is exact
    assert backend.n_kv(0) == (2 if exact else 3)
    assert backend.cut(1, 3)
    assert backend.cut(1, 0)
    assert backend.n_kv(1) == 0
    assert backend.cut(2, 0)
    assert not backend.cut(2, 1)


def test_a_script_is_said_and_then_ended():
    """`script` maps the prompt's text to ids, then end of generation for ever."""
    backend = opened(script=lambda prompt: list(prompt.upper().encode()))
    sampler = backend.new_sampler(PARAMS)
    ledger = list(b"ab")
    for _ in range(4):
        pos = backend.n_kv(0)
        (token,) = step(backend, Row(0, pos, ledger[pos:], sampler))
        ledger.append(token)
    assert ledger[2:] == [65, 66, EOG, EOG]


def test_text_and_tokens():
    """Bytes are tokens; control tokens are read from text only when asked for."""
    backend = opened()
    text = "é<eog>x<control><control>"
    ids = [0xC3, 0xA9, EOG, 0x78, CONTROL, CONTROL]
    assert backend.tokenize(text, add_special=True, parse_special=True) == ids
    assert backend.tokenize(text, add_special=True, parse_special=False) == list(text.encode())
    assert backend.tokenize("<control>", add_special=True, parse_special=False) == list(b"<control>")
    assert backend.detokenize(ids).decode() == text
    assert [backend.piece(t) for t in (0x78, EOG, CONTROL)] == [b"x", b"", b""]
    assert [t for t in range(N_VOCAB) if backend.is_eog(t)] == [EOG]


def test_what_cannot_be_text_or_tokens_is_a_typed_error():
    """A lone surrogate and an id outside the vocabulary are refused as llama.cpp's binding refuses them."""
    backend = opened()
    with pytest.raises(InvalidContent, match="surrogate"):
        backend.tokenize("a\ud800", add_special=True, parse_special=True)
    for token in (-1, N_VOCAB):
        with pytest.raises(InvalidContent, match="vocabulary"):
            backend.detokenize([token])


def test_its_one_grammar_gives_digits_and_others_are_refused():
    """Enough of a grammar to see that it reached the chain."""
    backend = opened()
    drawn = draws(backend, dataclasses.replace(PARAMS, grammar="root ::= digits"))
    assert all(48 <= t < 58 for t in drawn)
    with pytest.raises(InvalidGrammar, match="root ::= x"):
        backend.new_sampler(dataclasses.replace(PARAMS, grammar="root ::= x"))


def test_before_step_may_answer_instead():
    """A scripted result is returned, and memory is left alone."""
    backend = opened(before_step=lambda _: StepResult(status=StepStatus.FATAL, rc=-3))
    assert backend.step(Step((Row(0, 0, [1]),))).rc == -3
    assert backend.memory == {}


def test_abort_ends_a_threaded_step_early():
    """A delay of a minute ends at once, with nothing computed."""
    backend = opened(threaded=True, step_delay_s=60.0)
    results: list[StepResult] = []
    thread = threading.Thread(target=lambda: results.append(backend.step(Step((Row(0, 0, [1]),)))))
    thread.start()
    while not results:
        backend.abort()
        thread.join(0.01)
    assert (results[0].status, backend.memory) == (StepStatus.ABORTED, {})


def test_logprobs_as_asked():
    """As many alternatives as the chain wants, none when it wants none."""
    backend = opened()
    for wanted in (None, 0, 3):
        sampler = backend.new_sampler(dataclasses.replace(PARAMS, logprobs=wanted))
        result = backend.step(Step((Row(0, backend.n_kv(0), [1], sampler),)))
        logprob = result.sampled[0].logprob
        assert (None if logprob is None else len(logprob.top)) == wanted
