"""What `erllama serve` makes of a file and of arguments, without serving anything."""

from __future__ import annotations

import gc

import pytest

from erllama.cli import serve
from erllama.cli.parser import parse
from erllama.cli.serve import settings_of
from erllama.errors import InvalidConfig, NativeLibraryError

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


DEEP = "x = " + "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[models.q]\npath = "~nosuchuser/a.gguf"\n', "nosuchuser"),
        ('[models.q]\nchat_template_file = "~nosuchuser/a"\n', "nosuchuser"),
        (f'[models.q]\npath = "{"a" * 5000}"\n', "too long"),
        ('[models.q]\npath = "a\\u0000b"\n', "null"),
        ('[models.q]\npath = "a.gguf/b"\n', "no file"),
        (DEEP, "deep"),
    ],
    ids=["home", "home of a template", "long", "zero byte", "below a file", "deep"],
)
def test_a_file_that_leads_nowhere_is_told(settings, text, complaint):
    """In one line, at the start and after SIGHUP alike."""
    with pytest.raises(InvalidConfig, match=complaint):
        settings(text)


def test_a_home_that_is_not_there_is_told():
    """Also of the file itself, and of an argument."""
    for arguments in (["--config", "~nosuchuser/erllama.toml"], ["-m", "q=~nosuchuser/a.gguf"]):
        with pytest.raises(InvalidConfig, match="nosuchuser"):
            settings_of(parse(["serve", *arguments]))


def test_a_folder_that_may_not_be_read_is_told(settings, monkeypatch):
    """Not as a traceback; root may read everything, so the refusal is made here."""

    def refused(path, **_):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("erllama.cli.serve.os.stat", refused)
    with pytest.raises(InvalidConfig, match=r"models\.q: .*Permission denied"):
        settings(FILE)


def test_a_build_that_is_missing_is_told_at_the_start(erllama_command, monkeypatch):
    """As by the other commands, and not to the first client."""

    def missing():
        raise NativeLibraryError("not built; run: python build_libllama.py")

    monkeypatch.setattr(serve, "build_info", missing)
    said = erllama_command("serve", "--port", "0")
    assert (said.status, said.out) == (1, "")
    assert said.err == "erllama: not built; run: python build_libllama.py [native_library]\n"


def test_a_template_is_of_models_given_with_it(settings, tmp_path):
    """Or of the default model; not of the file's, and it has to be there."""
    (tmp_path / "t.jinja").touch()
    template = ("--chat-template", "DIR/t.jinja")
    made = settings(FILE, "-m", "new=DIR/b.gguf", *template).models
    assert made["new"].chat_template_file == str(tmp_path / "t.jinja")
    assert made["q"].chat_template_file is None
    assert settings("", *template).models["smollm2"].chat_template_file == str(tmp_path / "t.jinja")
    with pytest.raises(InvalidConfig, match="chat_template_file"):
        settings(FILE, *template)
    with pytest.raises(InvalidConfig, match="no file"):
        settings("", "--chat-template", "DIR/none")


@pytest.mark.parametrize(
    ("host", "keys", "told"),
    [
        ("127.0.0.1", (), None),
        (
            "127.0.0.1",
            ("openai",),
            "every program on this machine, for they have no keys in [auth]: anthropic, ollama",
        ),
        (
            "0.0.0.0",
            (),
            "everybody who reaches this port, for they have no keys in [auth]: openai, anthropic, ollama",
        ),
        ("0.0.0.0", ("anthropic",), "openai, ollama"),
        ("::", ("anthropic", "openai"), "everybody"),
        ("0.0.0.0", ("anthropic", "openai", "ollama"), None),
    ],
)
def test_surfaces_that_are_open_are_named(settings, host, keys, told):
    """A line at the start, where others reach them or somebody has thought of keys."""
    table = "".join(f'{name} = ["k"]\n' for name in keys)
    line = serve.open_line(settings(f"[auth]\n{table}", "--host", host))
    assert line is None if told is None else told in line


def test_what_is_there_at_the_start_is_not_collected_again():
    """A full collection that looks at all of it holds up every stream meanwhile."""
    before = gc.get_freeze_count()
    serve._settle()
    try:
        assert gc.get_freeze_count() > before
        assert len(gc.get_objects(generation=2)) < gc.get_freeze_count() / 10
    finally:
        gc.unfreeze()
