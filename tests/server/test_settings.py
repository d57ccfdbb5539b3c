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
