"""The documentation is true: its programs run, its links lead somewhere, its tables match the code.

A block marked `python` is a program and runs in a process of its own. One marked `python fragment`
stands inside an engine: it runs with `engine`, `model`, `path`, `trio` and `erllama` defined.
Command lines in `sh` blocks must be ones that `erllama` accepts. What is marked `python client` and
`sh client` asks a server: it runs as it is written but for the address.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import reference
import trio
from server.conftest import start_server, stop_server

import erllama
from erllama.cli import parser
from erllama.engine.statistics import ActorStatistics
from erllama.errors import Reasons

REPO = Path(__file__).resolve().parent.parent
PAGES = sorted([REPO / "README.md", REPO / "CHANGELOG.md", *(REPO / "docs").rglob("*.md")])


class Block(NamedTuple):
    """A fenced block: where it begins, what is written after the fence, its lines."""

    page: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPO).as_posix()}:{self.line}"


def _blocks(page: Path) -> list[Block]:
    found, begun = [], None
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if begun is None:
            begun = (number, line[3:].strip())
        else:
            found.append(Block(page, *begun, "\n".join(lines[begun[0] : number - 1]) + "\n"))
            begun = None
    assert begun is None, f"{page}: the block that begins in line {begun} does not end"
    return found


BLOCKS = [block for page in PAGES for block in _blocks(page)]
PROGRAMS = [block for block in BLOCKS if block.kind == "python"]
FRAGMENTS = [block for block in BLOCKS if block.kind == "python fragment"]
CLIENTS = [block for block in BLOCKS if block.kind in ("python client", "sh client")]
ADDRESS = re.compile(r"(?:localhost|127\.0\.0\.1):8080")
COMMANDS = [
    (block, line)
    for block in BLOCKS
    if block.kind == "sh"
    for line in block.text.splitlines()
    if "erllama " in line and "build_libllama" not in line
]


def _outside_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """GitHub's rule: lower case, punctuation gone, spaces to hyphens."""
    heads = re.findall(r"^#+ (.*)$", _outside_blocks(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPO).as_posix())
def test_links_lead_somewhere(page):
    """Every relative link names a file in the repository and, after `#`, a heading in it."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _outside_blocks(page)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            broken.append(target)
    assert not broken


def test_links_reach_every_page():
    """Starting from the README, each page can be found by clicking."""
    seen, todo = set(), [REPO / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        todo += [
            (page.parent / target.partition("#")[0]).resolve()
            for target in re.findall(r"\]\(([^)\s]+)\)", _outside_blocks(page))
            if not re.match(r"[a-z]+:|#", target)
        ]
    assert set(PAGES) - seen == set()


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_programs_run(block, tmp_path, smollm2_path):
    """A program in the documentation ends well, prints something and warns of nothing."""
    file = tmp_path / "program.py"
    file.write_text(block.text)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        check=False,
        env=os.environ | {"PYTHONPATH": str(REPO)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not done.stderr


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("block", FRAGMENTS, ids=str)
async def test_fragments_run(block, smollm2_path):
    """A fragment runs inside an engine with the default model loaded."""
    source = f"async def fragment(engine, model, path):\n{textwrap.indent(block.text, '    ')}"
    namespace = {"erllama": erllama, "trio": trio}
    exec(compile(source, str(block), "exec"), namespace)
    async with erllama.open_engine() as engine:
        model = await engine.load_model(smollm2_path, context=erllama.ContextOptions(n_ctx=512))
        await namespace["fragment"](engine, model, smollm2_path)


@pytest.fixture(scope="module")
def server(smollm2_path, tiny_gguf):
    """Host and port of a server with the models that the pages name."""
    models = ("-m", f"smollm2={smollm2_path}", "-m", f"bge={tiny_gguf('bert')}")
    process, url = start_server("--no-cache", *models)
    yield url.removeprefix("http://")
    stop_server(process)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("block", CLIENTS, ids=str)
def test_clients_are_answered(block, server, tmp_path):
    """A client in the documentation ends well and prints what it was answered, which is no error."""
    text = ADDRESS.sub(server, block.text)
    assert text != block.text
    command = [sys.executable, "-c", text] if block.kind == "python client" else ["bash", "-ec", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if block.kind == "sh client":
        assert {"choices", "tokens", "content"} & json.loads(done.stdout).keys()


def test_there_is_something_to_run():
    """The block finder finds: a change of its rules must not empty the tests above."""
    assert len(PROGRAMS) >= 5
    assert len(FRAGMENTS) >= 4
    assert len(COMMANDS) >= 4
    assert len(CLIENTS) >= 6
    known = {"", "python", "python fragment", "python client", "sh", "sh client", "mermaid"}
    known |= {"text", "toml", "ini", "dockerfile", "nginx", "yaml"}
    assert {block.kind for block in BLOCKS} <= known


@pytest.mark.parametrize(("block", "line"), COMMANDS, ids=lambda part: str(part)[:60])
def test_command_lines_are_accepted(block, line):
    """Each `erllama …` in the documentation is one that the parser accepts."""
    words = shlex.split(line.split("|")[-1], comments=True)
    command = next(i for i, word in enumerate(words) if word.endswith("erllama"))
    assert parser.parse(words[command + 1 :]).command


def test_reason_tables_are_complete():
    """Each reason an error may carry stands in docs/reference/errors.md."""
    page = (REPO / "docs/reference/errors.md").read_text()
    missing = sorted(reason for reason in Reasons.all() if f"`{reason}`" not in page)
    assert missing in ([], ["error"])  # "error" is the root's own, which nothing raises


def test_option_and_reason_tables_are_up_to_date(capsys):
    """What tools/reference.py would write is what is there."""
    assert reference.main(["--check"]) == 0, capsys.readouterr().out


def test_option_meanings_follow_the_code(monkeypatch):
    """An option without a meaning, or a meaning without an option, stops the generator by name."""
    kind, meanings = next(iter(reference.MEANINGS.items()))
    monkeypatch.setitem(reference.MEANINGS, kind, meanings | {"n_gpu_tables": "?"})
    with pytest.raises(SystemExit, match="n_gpu_tables"):
        reference.option_tables()


def test_errors_marked_as_not_raised_are_not():
    """tools/reference.py lists exactly the classes that no module of the package raises."""
    sources = [path.read_text() for path in (REPO / "erllama").rglob("*.py")]
    kinds = [kind for branch in erllama.ErllamaError.__subclasses__() for kind in branch.__subclasses__()]
    unraised = {
        kind.__name__
        for kind in kinds
        if not any(re.search(rf"(?<!class )\b{kind.__name__}\(", text) for text in sources)
    }
    assert unraised == reference.NOT_RAISED


def test_public_methods_are_in_the_reference():
    """Every public method of Engine and Model and field of a record stands in docs/reference/api.md."""
    page = (REPO / "docs/reference/api.md").read_text()
    names = [
        name
        for kind in (erllama.Engine, erllama.Model)
        for name, member in inspect.getmembers(kind)
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    ]
    for kind in (erllama.Completion, erllama.Stats, erllama.ModelInfo, erllama.RequestInfo, ActorStatistics):
        names += kind.__dataclass_fields__
    missing = [name for name in names if not re.search(rf"\b{name}\b", page)]
    assert not missing


def test_docs_name_no_private_place():
    """Nothing in the pages points outside the repository's own tree."""
    for page in PAGES:
        assert not re.search(r"/tmp/|/work/|\.\./shared", page.read_text()), page


def test_the_first_program_is_ten_lines():
    """The README's program is short, and it is a program."""
    readme = [block for block in PROGRAMS if block.page.name == "README.md"]
    assert len([line for line in readme[0].text.splitlines() if line.strip()]) <= 12
    assert ast.parse(readme[0].text)
