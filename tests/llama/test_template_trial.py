"""Templates that would take the process with them are typed errors; it goes on."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from chat.scenes import FOLDER, NAMES

from erllama.errors import InvalidContent
from erllama.files import cache_dir
from erllama.llama.template_text import check_text
from erllama.llama.template_trial import check_ends

pytestmark = pytest.mark.model


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """Where verdicts are remembered; what is known of this machine's CPU is shared."""
    (cache_dir() / "variants").mkdir(parents=True, exist_ok=True)
    (tmp_path / "variants").symlink_to(cache_dir() / "variants")
    monkeypatch.setenv("ERLLAMA_CACHE_DIR", str(tmp_path))
    return tmp_path / "templates"


ENDLESS = [
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{%- macro f(x) -%}a{{- f(x) -}}{%- endmacro -%}{{ f(1) }}",
    "{% macro f(x) %}{% set y = f(x) %}{% endmacro %}{{ f(1) }}",
    "{% macro f(x) %}{{ g(x) }}{% endmacro %}{% macro g(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(x) %}{% if x %}a{% endif %}{{ '{% if %}' ~ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% for i in range(3000000) %}a{% endfor %}",
    "{% for i in range(0, 99999999999999999999) %}a{% endfor %}",
    "{{ 'a' * 1000000000 }}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_what_can_be_seen_is_refused_at_once(source):
    """Macros that call themselves whatever happens, and absurd amounts."""
    with pytest.raises(InvalidContent, match="the chat template cannot be used"):
        check_text(source)


@pytest.mark.parametrize("name", NAMES)
def test_upstreams_templates_pass(name):
    """Some of them walk schemas by macros that call themselves."""
    check_text((FOLDER / f"{name}.jinja").read_text())


HIDDEN = {
    "a macro under a condition": "{% macro f(x) %}{% if x %}{{ f(x) }}{% endif %}{% endmacro %}{{ f(1) }}",
    "a value that holds itself": "{% set ns = namespace(x=1) %}{% set ns.x = ns %}{{ ns|tojson }}",
    "a text that doubles": "{% set ns = namespace(t='aaaaaaaa') %}{% for i in range(64) %}"
    "{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t }}",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", HIDDEN)
def test_what_only_shows_when_it_runs_is_tried_elsewhere(what, memory):
    """The child dies or is ended, we do not; the verdict is remembered."""
    check_text(HIDDEN[what])
    with pytest.raises(InvalidContent, match="rendering it"):
        check_ends(HIDDEN[what], "build")
    [remembered] = memory.iterdir()
    remembered.write_text("was remembered", encoding="utf-8")
    with pytest.raises(InvalidContent, match="was remembered"):
        check_ends(HIDDEN[what], "build")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openai-gpt-oss-120b", "google-gemma-4-31B-it"])
def test_templates_with_recursion_that_ends_are_tried_once(name, memory, monkeypatch):
    """Remembered by text and build: the second look starts no process."""
    source = (FOLDER / f"{name}.jinja").read_text()
    check_ends(source, "build")
    monkeypatch.setattr("erllama.llama.template_trial.leashed", None)
    check_ends(source, "build")
    with pytest.raises(TypeError):
        check_ends(source, "another build")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="addresses are limited there")
def test_addresses_that_libraries_take_are_not_the_templates(tmp_path):
    """A process with twice the limit in use tries a template as well as a small one."""
    program = (
        "import mmap, sys\n"
        "from erllama.llama.template_trial import main\n"
        "no_reserve = 0x4000  # linux/mman.h: MAP_NORESERVE\n"
        "flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve\n"
        "held = mmap.mmap(-1, 8 << 30, flags=flags)\n"
        "sys.exit(main(sys.argv[1]))"
    )
    file = tmp_path / "template"
    file.write_text("{{ messages[0].content }}")
    assert subprocess.run([sys.executable, "-c", program, file], check=False).returncode == 0


def test_a_text_full_of_quotes_costs_its_length():
    """Tags and strings that nobody closes: no look at the same character for every one of them."""
    for hostile in ("{{ ' " * 200_000, "{% " * 200_000, "{{" + "(" * 500_000, "{# " * 200_000):
        started = time.process_time()
        check_text(hostile)
        assert time.process_time() - started < 5.0
