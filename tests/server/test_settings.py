"""What the settings keep to themselves."""

from __future__ import annotations

import pytest

import erllama
from erllama.errors import InvalidConfig
from erllama.server.serving import with_signing_key
from erllama.server.settings import make_settings


def test_keys_are_in_no_repr() -> None:
    """Neither the clients' nor the one that signs, which the engine gets too."""
    names = ("openai", "anthropic", "ollama")
    auth = {name: [f"secret-{name}"] for name in names} | {"thinking_signing_key": "secret-signing"}
    settings = make_settings({"auth": auth})
    config = with_signing_key(erllama.EngineConfig(), settings)
    assert config.thinking_signing_key == b"secret-signing"
    for shown in (repr(settings), str(settings), repr(settings.auth), repr(config)):
        assert "secret" not in shown


def test_a_mistyped_key_is_in_no_error() -> None:
    """The place is named, the value only where it is no secret."""
    for auth in (
        {"openai": "secret"},
        {"openai": [{"secret": 1}]},
        {"opnai": ["secret"]},
        {"ollama": [7, "secret"]},
    ):
        with pytest.raises(InvalidConfig, match=r"^auth") as refused:
            make_settings({"auth": auth})
        assert "secret" not in f"{refused.value} {refused.value.detail}"
    with pytest.raises(InvalidConfig) as refused:
        make_settings({"auth": "secret"})
    assert "secret" not in f"{refused.value} {refused.value.detail}"
    with pytest.raises(InvalidConfig) as refused:
        make_settings({"queue": {"depth": -1}})
    assert refused.value.detail == {"key": "queue.depth", "value": -1}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"auth": {"openai": "hunter2"}}, "auth.openai: expected a list of texts"),
        ({"auth": {"openai": [7]}}, "auth.openai.0: expected a text"),
        (
            {"models": {"a": {"embedding_dimensions": 3}}},
            "models.a.embedding_dimensions: expected a list of whole numbers",
        ),
        ({"listen": {"port": "x"}}, "listen.port: expected a whole number"),
        ({"limits": {"total_s": "long"}}, "limits.total_s: expected a number"),
        ({"limits": {"total_s": 0}}, "limits.total_s: should be greater than 0"),
        ({"fit_history": "perhaps"}, "fit_history: expected true or false"),
        ({"auth": 3}, "auth: expected a table"),
        ({"models": 3}, "models: expected a table"),
    ],
)
def test_complaints_are_in_words_of_the_file(values, told):
    """Not in those of the library that checks it; a key is not repeated."""
    with pytest.raises(InvalidConfig) as caught:
        make_settings(values)
    assert str(caught.value) == told
