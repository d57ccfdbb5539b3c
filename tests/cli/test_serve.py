"""What `erllama serve` makes of a file and of arguments, without serving anything."""

from __future__ import annotations

import pytest

from erllama.cli.parser import parse
from erllama.cli.serve import settings_of
from erllama.errors import InvalidConfig

pytest.importorskip("pydantic")


@pytest.fixture
def settings(tmp_path):
    """Settings of a file's text and arguments; `a.gguf` and `b.gguf` are there."""
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()

    def made(text, *arguments):
        file = tmp_path / "erllama.toml"
        file.write_text(text)
        told = [each.replace("DIR", str(tmp_path)) for each in arguments]
        return settings_of(parse(["serve", "--config", str(file), *told]))

    return made


FILE = '[models.q]\npath = "a.gguf"\nkeep_alive_s = 7\ncontext = { n_ctx = 512, n_seq_max = 2 }\n'


def test_an_argument_overrides_what_it_names_and_no_more(settings):
    """-m of a name that the file has: another path, and the rest as the file says."""
    table = settings(FILE, "-m", "q=DIR/b.gguf", "--n-ctx", "1024").models["q"]
    assert table.path.endswith("b.gguf")
    assert table.keep_alive_s == 7
    assert table.context == {"n_ctx": 1024, "n_seq_max": 2}


def test_arguments_concern_models_that_are_given_with_them(settings):
    """The file's other models keep their context; without any -m it is refused, not passed over."""
    made = settings(FILE, "-m", "new=DIR/b.gguf", "--n-ctx", "1024").models
    assert made["q"].context["n_ctx"] == 512
    assert made["new"].context == {"n_ctx": 1024}
    for argument in ("--n-ctx", "--n-seq-max"):
        with pytest.raises(InvalidConfig, match="context"):
            settings(FILE, argument, "3")
    assert settings("", "--n-ctx", "1024").models["smollm2"].context == {"n_ctx": 1024}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("models = 3", "models"),
        ("limits = 3", "limits"),
        ("listen = 3", "listen"),
        ("models.q = 3", "models.q"),
    ],
)
def test_a_value_where_a_table_belongs_is_told(settings, text, key):
    """By its key, and not as a traceback."""
    with pytest.raises(InvalidConfig, match="table") as caught:
        settings(text, "-m", "q=DIR/b.gguf")
    assert caught.value.detail == {"key": key}
