"""From options to a resolved chain: who wins, what is refused, how a seed is drawn."""

from __future__ import annotations

import pytest

from erllama.engine import sampling
from erllama.engine.sampling import DEFAULTS, resolve_sampling
from erllama.errors import InvalidOption
from erllama.options import GenerationOptions

MODEL = {"temperature": 0.3, "top_k": 11, "top_p": 0.5, "min_p": 0.2, "repetition_penalty": 1.3}
GIVEN = {"temperature": 1.5, "top_k": 3, "top_p": 0.7, "min_p": 0.01, "repetition_penalty": 1.1}


def resolve(model: dict[str, float] | None = None, **options: object):
    """Resolved parameters for a vocabulary of 100."""
    return resolve_sampling(GenerationOptions(**options), model or {}, 100)


@pytest.mark.parametrize("name", list(DEFAULTS))
def test_the_request_wins_over_the_model_over_the_default(name: str):
    """Each parameter has three sources, in this order."""
    assert getattr(resolve(MODEL, **GIVEN), name) == GIVEN[name]
    assert getattr(resolve(MODEL), name) == MODEL[name]
    assert getattr(resolve(), name) == DEFAULTS[name]


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_zero_is_a_value(name: str):
    """0 given by the request is not taken for absent."""
    assert getattr(resolve(MODEL, **{name: 0}), name) == 0


def test_a_fraction_in_the_model_file_becomes_a_whole_top_k():
    """A GGUF may store top_k as a float; the chain gets an integer."""
    top_k = resolve({"top_k": 40.0}).top_k
    assert (top_k, type(top_k)) == (40, int)


def test_a_given_seed_is_kept_and_a_missing_one_is_drawn_in_range(monkeypatch: pytest.MonkeyPatch):
    """The drawn seed is one that a request could give: 0 to 2**32 - 2."""
    assert resolve(seed=0).seed == 0
    asked: list[int] = []
    monkeypatch.setattr(sampling.secrets, "randbelow", lambda n: asked.append(n) or n - 1)
    drawn = resolve().seed
    assert asked == [2**32 - 1]
    assert resolve(seed=drawn).seed == drawn == 2**32 - 2


def test_biases_are_sorted_and_checked():
    """The same biases in any order are the same chain; a token outside the vocabulary is named."""
    assert resolve(logit_bias={7: 1.0, 3: -1.0}).logit_bias == ((3, -1.0), (7, 1.0))
    for token in (100, -1):
        with pytest.raises(InvalidOption, match=rf"token {token} .*vocabulary of 100") as caught:
            resolve(logit_bias={5: 1.0, token: 0.5})
        assert caught.value.detail == {"key": "logit_bias", "value": token}


def test_the_rest_is_passed_on():
    """Grammar, its place and log-probabilities reach the chain unchanged."""
    params = resolve(grammar="root ::= digits", grammar_first=True, logprobs=3)
    assert (params.grammar, params.grammar_first, params.logprobs) == ("root ::= digits", True, 3)
